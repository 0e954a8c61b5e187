"""What should be found is worked out from token ids; a real engine finds exactly that."""

import io
import json
from pathlib import Path

import pytest

from bench.common.harness import BenchmarkError, Options, Report
from bench.common.origin import ROOT
from bench.prefix_reuse import Memory, Plan, Sessions, Turn, report_turns
from engine.prepare import prepare_model
from engine.prepared_model import PreparedModel

# A first turn of 48 tokens fills three blocks, but its last token is never computed.
PLAN = Plan(first_tokens=44, later_tokens=20, answer_tokens=4, num_turns=3)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    source: Path = ROOT / "tests" / "data" / "tiny-real"
    return prepare_model(source, tmp_path_factory.mktemp("cache"), lambda stage, fraction: None)


def test_whole_blocks_are_found_and_the_last_token_never() -> None:
    memory = Memory(4)
    memory.add(list(range(11)))
    assert memory.find(list(range(11))) == 8
    assert memory.find(list(range(8))) == 4, "of a prompt that is all there, the last block is computed again"
    assert memory.find([*range(9), 77, 78]) == 8
    assert memory.find([77, *range(1, 9)]) == 0
    assert memory.find([*range(4), 77, *range(5, 12)]) == 4


def test_the_ideal_time_is_that_of_the_tokens_that_are_new() -> None:
    turn = Turn(prompt_tokens=100, saved_tokens=80, known_tokens=80, warm_s=0.5, cold_s=2.0)
    assert turn.hit == 0.8
    assert turn.speedup.value == 4.0
    assert turn.speedup.baseline == pytest.approx(5.0)


def test_an_engine_computes_exactly_what_nobody_computed_before(prepared: PreparedModel) -> None:
    sessions = Sessions(prepared, PLAN, num_sessions=2)
    sessions.warm_up()
    for start in (0, 337):
        turns = sessions.session(start)
        assert [turn.prompt_tokens for turn in turns] == [44, 68, 92]
        assert [turn.saved_tokens for turn in turns] == [turn.known_tokens for turn in turns]
        assert [turn.known_tokens for turn in turns] == [0, 32, 64]


def test_an_answer_that_depends_on_the_cache_is_an_error(
    prepared: PreparedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions = Sessions(prepared, PLAN, num_sessions=1)
    answers = iter([(0.1, [1, 2]), (0.1, [1, 3])])
    monkeypatch.setattr(sessions, "_serve", lambda engine, prompt: next(answers))
    with pytest.raises(BenchmarkError, match="answer"):
        sessions.session(0)


def test_a_line_for_the_tokens_and_one_for_each_later_turn() -> None:
    first, second = Turn(40, 0, 0, 1.0, 1.0), Turn(64, 32, 32, 0.5, 1.0)
    out = io.StringIO()
    with Report(Options(), out=out, err=io.StringIO()) as report:
        report_turns("m", [[first, second]] * 5, report, seed=0)
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [(line["metric"], line["variant"], line["ratio"]) for line in lines] == [
        ("prefill_tokens_saved_vs_hit_share", "m", 1.0),
        ("ttft_vs_ideal", "m:turn2", 1.0),
    ]
    assert lines[0]["value"] == pytest.approx(32 / 104, rel=1e-5)

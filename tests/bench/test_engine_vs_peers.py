"""The comparison with other engines: the line protocol, the arithmetic, and peers that are not there. The engines
themselves are measured by the benchmark alone."""

import io
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bench.common.exported_model import export
from bench.common.harness import BenchmarkError, Options, Report
from bench.common.peer_loads import (
    Load,
    LoadKind,
    decode_rate,
    equal_shares,
    geomean_vs_best,
    long_loads,
    normal_loads,
    quick_loads,
)
from bench.common.peer_process import Outcome, PeerError, PeerProcess
from bench.engine_vs_peers import ADAPTERS, PEERS, TINY_MODEL, Contender, Contest, interpreters, parse, setups
from bench.peers.protocol import LoadedEngine, Setup, serve_lines
from engine.gguf_source import GgufFile
from engine.prepare import prepare_model
from engine.prepared_model import PreparedModel
from tests.support.fake_engine import FakeEngine

FAKE = Path(__file__).parents[1] / "support" / "fake_engine.py"
SETUP = Setup("model", threads=1, max_seqs=4, max_context=64, pool_tokens=256)
KEYS = {"metric", "variant", "value", "unit", "baseline", "baseline_value", "ratio", "n", "ci95", "seed", "machine"}


def peer(kind: str = "0", name: str = "fake") -> PeerProcess:
    return PeerProcess(name, (sys.executable, str(FAKE), kind), threads=1, timeout_s=60.0)


def answers(*commands: dict[str, Any]) -> list[dict[str, Any]]:
    def load(setup: Setup) -> LoadedEngine:
        assert setup == SETUP
        return FakeEngine("0")

    out = io.StringIO()
    serve_lines(load, io.StringIO("".join(json.dumps(command) + "\n" for command in commands)), out)
    return [json.loads(line) for line in out.getvalue().splitlines()]


LOAD = {"command": "load", "setup": SETUP.to_json()}
GENERATE = {"command": "generate", "prompts": [[1, 2], [5]], "max_tokens": 3}


def test_each_command_has_one_line_for_an_answer_and_leaving_has_none() -> None:
    loaded, generated = answers(LOAD, GENERATE, {"command": "leave"}, GENERATE)
    assert loaded == {"version": "0.1-fake"}
    assert generated["tokens"] == [[3, 4, 5], [5, 6, 7]]
    assert [len(times) for times in generated["times_s"]] == [3, 3]
    assert all(0.0 < times[0] < times[1] < times[2] for times in generated["times_s"])


def test_what_fails_is_told_and_the_engine_goes_on() -> None:
    early, _, wrong, fine = answers(GENERATE, LOAD, {**GENERATE, "prompts": [["x"]]}, GENERATE)
    assert early == {"error": "no model is loaded"}
    assert wrong["error"].startswith("TypeError")
    assert fine["tokens"][1] == [5, 6, 7]


def test_a_process_answers_whatever_its_libraries_print_and_ends_when_told() -> None:
    process = peer()
    assert process.load(SETUP) == "0.1-fake"
    assert process.generate([[1, 2], [5]], 2).tokens == [[3, 4], [5, 6]]
    assert process.first_token_s() > 0.0
    assert process.memory_mb() > 1.0
    assert process.exit_code is None
    process.close()
    assert process.exit_code == 0
    process.close()
    with pytest.raises((PeerError, ValueError)):
        process.generate([[1]], 1)


@pytest.mark.parametrize(
    ("kind", "reason"), [("broken", "RuntimeError: no such architecture"), ("dying", "exit code 3: out of luck")]
)
def test_why_an_engine_cannot_be_used_is_told(kind: str, reason: str) -> None:
    process = peer(kind)

    def use() -> None:
        process.load(SETUP)
        process.generate([[1]], 1)

    with pytest.raises(PeerError, match=reason):
        use()
    process.close()


def test_a_program_that_does_not_exist_is_told() -> None:
    with pytest.raises(PeerError, match="No such file"):
        PeerProcess("ghost", ("/nowhere/python",), threads=1, timeout_s=1.0)


def test_prompts_are_new_each_time_but_for_decoding_and_the_same_for_all_engines() -> None:
    prefill, decode = Load(LoadKind.PREFILL, 1, 16, 1), Load(LoadKind.DECODE, 2, 16, 4)
    assert prefill.prompts(1000, 0, 1) == prefill.prompts(1000, 0, 1)
    assert prefill.prompts(1000, 0, 1) != prefill.prompts(1000, 0, 2)
    assert prefill.prompts(1000, 0, 1) != prefill.prompts(1000, 5, 1)
    assert decode.prompts(1000, 0, 1) == decode.prompts(1000, 0, 2)


def test_a_shared_prefix_is_shared_and_nothing_else_is() -> None:
    load = Load(LoadKind.SERVE, 3, 8, 4, shared=32)
    prompts = load.prompts(1000, 0, 0)
    assert [len(prompt) for prompt in prompts] == [40] * 3
    assert len({tuple(prompt[:32]) for prompt in prompts}) == 1
    assert len({tuple(prompt[32:]) for prompt in prompts}) == 3
    assert load.variant == "prefix32:concurrent3:8in4out"


def test_decoding_counts_only_while_all_requests_decode() -> None:
    # All decode from 2 s, when the second has its first token, to 5 s, when the first has its last.
    times = [[1.0, 2.0, 3.0, 4.0, 5.0], [2.0, 3.0, 4.0, 5.0, 6.0]]
    assert decode_rate(times) == pytest.approx(6 / 3.0)
    with pytest.raises(BenchmarkError, match="not all decode at once"):
        decode_rate([[1.0, 2.0], [3.0, 4.0]])


def test_prefill_and_serving_count_to_the_last_token() -> None:
    outcome = Outcome([[1], [2]], [[0.5], [2.0]])
    assert Load(LoadKind.PREFILL, 1, 128, 1).rate(Outcome([[1]], [[0.25]])) == 512.0
    assert Load(LoadKind.SERVE, 2, 64, 1, shared=9).rate(outcome) == 1.0


def test_no_request_outgrows_what_the_engines_are_set_up_for() -> None:
    for loads in (quick_loads(), normal_loads(), long_loads()):
        assert len({(load.kind, load.variant) for load in loads}) == len(loads)
        for load in loads:
            longest = max(map(len, load.prompts(1000, 0, 0)))
            assert longest + load.max_tokens == load.context_tokens
            assert load.requests * load.context_tokens == load.pool_tokens


def test_the_long_run_has_every_batch_context_and_concurrency_that_is_asked_for() -> None:
    loads = long_loads()
    assert {load.prompt for load in loads if load.kind is LoadKind.PREFILL} == {128, 512, 2048}
    decodes = [load for load in loads if load.kind is LoadKind.DECODE]
    assert {(load.requests, load.prompt) for load in decodes} == {(b, c) for b in (1, 8, 32) for c in (128, 512, 2048)}
    serving = [load for load in loads if load.kind is LoadKind.SERVE and not load.shared]
    assert {(load.requests, load.prompt, load.output) for load in serving} == {(16, 256, 64), (64, 256, 64)}
    assert any((load.requests, load.shared) == (32, 1024) for load in loads)


def test_equal_tokens_are_counted_place_by_place() -> None:
    assert equal_shares([[1, 2, 3, 4], [5, 6]], [[1, 2, 9, 4], [5, 6]]) == [0.75, 1.0]


def test_the_mean_takes_the_best_peer_of_each_row() -> None:
    rows = [{"a": [4.0] * 5, "b": [2.0] * 5}, {"a": [0.5] * 5, "b": [8.0] * 5}, {"b": [8.0] * 5}]
    mean, (low, high) = geomean_vs_best(rows, seed=0)
    assert mean == pytest.approx((2.0 * 0.5 * 8.0) ** (1 / 3))
    assert low == pytest.approx(mean)
    assert high == pytest.approx(mean)
    noisy = geomean_vs_best([{"a": [1.0, 2.0, 3.0, 4.0, 5.0]}], seed=0)
    assert noisy == geomean_vs_best([{"a": [1.0, 2.0, 3.0, 4.0, 5.0]}], seed=0)
    assert noisy[1][0] < noisy[0] < noisy[1][1]
    with pytest.raises(BenchmarkError, match="no row"):
        geomean_vs_best([], seed=0)


def test_an_interpreter_is_taken_from_the_flag_and_transformers_has_one_anyway() -> None:
    found = interpreters(["llama.cpp=/some/python"], ["llama.cpp", "transformers"])
    assert found["llama.cpp"] == "/some/python"
    assert "transformers" in found
    assert "vllm" not in interpreters(["vllm=/some/python"], ["transformers"])
    with pytest.raises(ValueError, match="NAME=PYTHON"):
        interpreters(["llama.cpp"], ["llama.cpp"])
    with pytest.raises(ValueError, match="NAME=PYTHON"):
        interpreters(["other=/some/python"], ["llama.cpp"])


def test_fewer_than_five_rounds_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--rounds", "4"])
    assert "at least 5" in capsys.readouterr().err


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    return prepare_model(TINY_MODEL, tmp_path_factory.mktemp("prepared"), lambda stage, fraction: None)


def test_all_engines_are_sized_for_the_largest_load(prepared: PreparedModel) -> None:
    setup = setups([Load(LoadKind.SERVE, 16, 64, 8), Load(LoadKind.PREFILL, 1, 512, 1)], prepared, 2)
    assert (setup.max_seqs, setup.max_context, setup.pool_tokens) == (16, 513, 16 * 72)


def test_what_is_exported_is_the_checkpoint_in_fp32(prepared: PreparedModel, tmp_path: Path) -> None:
    exported = export(prepared, tmp_path)
    checkpoint = load_file(Path(TINY_MODEL) / "model.safetensors")
    tensors = load_file(exported.hugging_face / "model.safetensors")
    assert set(tensors) == set(checkpoint)
    assert all(torch.equal(tensors[name], checkpoint[name].float()) for name in checkpoint)
    config = json.loads((exported.hugging_face / "config.json").read_text(encoding="utf-8"))
    assert (config["dtype"], config["model_type"]) == ("float32", "llama")
    # kvferry reads GGUF files as llama.cpp writes them, so reading one back shows that it is one of those.
    read_back = GgufFile(exported.gguf)
    assert set(read_back.tensor_names) == set(checkpoint)
    assert all(torch.equal(read_back.read(name), checkpoint[name].float()) for name in checkpoint)


def test_what_was_exported_before_is_not_written_again(prepared: PreparedModel, tmp_path: Path) -> None:
    exported = export(prepared, tmp_path)
    written = exported.gguf.stat().st_mtime_ns
    assert export(prepared, tmp_path) == exported
    assert exported.gguf.stat().st_mtime_ns == written


def test_no_peer_imports_anything_of_kvferry() -> None:
    own = {"engine", "runtime", "kv_cache", "kv_transfer", "router", "kvferry", "kvferry_rpc", "bench"}
    for name in PEERS.values():
        lines = (ADAPTERS / name).read_text(encoding="utf-8").splitlines()
        imports = [line.split() for line in lines if line.strip().startswith(("import ", "from "))]
        used = {words[1] for words in imports if words[1].partition(".")[0] in own}
        assert used == {"bench.peers.protocol"}


class Lines:
    """A contest among fake engines, and what it printed."""

    def __init__(self, **kinds: str) -> None:
        self.out = io.StringIO()
        self.report = Report(Options(), out=self.out, err=io.StringIO())
        command = (sys.executable, str(FAKE))
        ours = [Contender("kvferry-fp32", (*command, "0"), SETUP), Contender("other", (*command, "0"), SETUP, ":other")]
        peers = [Contender(name, (*command, kind), SETUP) for name, kind in kinds.items()]
        self.contest = Contest(ours, peers, self.report, Options(), settle_s=0.0)

    def run(self) -> list[dict[str, Any]]:
        try:
            self.contest.start(1, 60.0)
            self.contest.compare_outputs([[1, 2], [3]])
            self.contest.measure(Load(LoadKind.DECODE, 2, 4, 3), 1000, 5)
        finally:
            self.contest.close()
        self.contest.conclude()
        return [json.loads(line) for line in self.out.getvalue().splitlines()]


def test_a_contest_has_a_line_for_each_peer_and_form_and_the_mean_at_the_end() -> None:
    lines = Lines(same="0", foreign="7", broken="broken", dying="dying").run()
    missing = {line["baseline"]: line["reason"] for line in lines if line["metric"] == "missing"}
    assert set(missing) == {"broken", "dying", "foreign"}
    assert "no such architecture" in missing["broken"]
    assert "out of luck" in missing["dying"]
    assert "computes something else" in missing["foreign"]
    rows = [(line["metric"], line["variant"]) for line in lines if line.get("baseline") == "same"]
    expected = [("startup_s", "first-token"), ("rss_mb", "idle"), ("decode_tok_s", "batch2:context4")]
    wanted = [(metric, variant + suffix) for metric, variant in expected for suffix in ("", ":other")]
    assert [row for row in rows if row[0] != "equal_token_share"] == wanted
    measured = [line for line in lines if line["metric"] == "decode_tok_s"]
    assert [line["n"] for line in measured] == [5, 5]
    assert set(measured[0]) == KEYS | {"commit"}
    assert (lines[-1]["metric"], lines[-1]["variant"], lines[-1]["n"]) == ("geomean_vs_best_peer", "3rows", 3)
    assert math.isfinite(lines[-1]["ratio"])


def test_without_any_peer_the_run_ends_without_a_mean() -> None:
    lines = Lines(broken="broken").run()
    assert {line["metric"] for line in lines} == {"missing", "equal_token_share"}

"""Guesses with a real model and real text: they are right often enough to save steps, and change no token."""

import mmap
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from engine.build import build_engine, plan_engine
from engine.engine import Engine, EngineLoad
from engine.options import EngineOptions
from engine.sequence import SamplingParams, Sequence

TINY_REAL = Path(__file__).parents[1] / "data" / "tiny-real"
TOKENIZER = Tokenizer.from_file(str(TINY_REAL / "tokenizer.json"))


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prepared")


def build(cache_dir: Path, speculative_tokens: int) -> Engine:
    options = EngineOptions(
        model=str(TINY_REAL), cache_dir=cache_dir, num_blocks=40, speculative_tokens=speculative_tokens
    )
    options.validate()
    plan = plan_engine(options, available_bytes=None)
    return build_engine(options, plan, memoryview(mmap.mmap(-1, plan.pool_bytes)), prefill_only=False)


def answers(engine: Engine, sampling: SamplingParams) -> tuple[list[list[int]], EngineLoad]:
    """Two texts, one step at a time, and what they cost."""
    for i, text in enumerate(("- item one\n- item two\n- item three\n- item", "the cat and the dog and the cat and")):
        engine.add(Sequence(str(i), TOKENIZER.encode(text).ids, sampling, max_context_tokens=256))
    texts: dict[str, list[int]] = {}
    while engine.has_work:
        schedule = engine.schedule()
        for output in engine.publish(schedule, engine.run(schedule)):
            texts.setdefault(output.seq.seq_id, []).extend(sample.token_id for sample in output.samples)
    engine.check_integrity()
    return [texts["0"], texts["1"]], engine.load()


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_text_that_repeats_itself_takes_fewer_steps_and_is_the_same(cache_dir: Path, temperature: float) -> None:
    # The tiny model does not repeat itself by itself, so it is held to a few words.
    words = TOKENIZER.encode("- item the cat and").ids
    sampling = SamplingParams(
        max_tokens=40,
        temperature=temperature,
        top_p=0.9,
        logit_bias=tuple((token_id, 9.0) for token_id in sorted(set(words))),
        seed=5,
        ignore_eos=True,
    )
    want, plain = answers(build(cache_dir, 0), sampling)
    got, guessed = answers(build(cache_dir, 6), sampling)
    assert got == want
    assert (plain.drafted_tokens, plain.accepted_tokens) == (0, 0)
    assert 10 < guessed.accepted_tokens <= guessed.drafted_tokens
    assert guessed.steps < plain.steps
    assert guessed.tokens_generated == plain.tokens_generated == 80

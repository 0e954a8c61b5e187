"""An answer that goes on in another engine: from its tokens alone, or with its KV. It is the same at every position.

What a sequence depends on beside its tokens: the seed, the position, how often each token came before, how many came,
and where a grammar stands. All of it must be there again.
"""

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.sequence import FinishReason, SamplingParams, Sequence, TokenSample
from tests.support.toy_engine import EOS, MODEL, PROMPT, ToyEngine
from tests.support.toy_model import VOCAB_SIZE

COUNT = 9
WAYS = {
    "greedy": SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True, num_logprobs=3),
    "seeded": SamplingParams(max_tokens=COUNT, temperature=1.3, ignore_eos=True, num_logprobs=1, seed=77),
    "filtered": SamplingParams(
        max_tokens=COUNT, temperature=0.9, top_k=20, top_p=0.9, min_p=0.01, ignore_eos=True, num_logprobs=0, seed=5
    ),
    "penalties": SamplingParams(
        max_tokens=COUNT,
        temperature=0.0,
        ignore_eos=True,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.7,
        num_logprobs=2,
    ),
    # End-of-text is by far the most likely token: it comes as soon as it may.
    "min_tokens": SamplingParams(
        max_tokens=COUNT, min_tokens=5, temperature=0.0, logit_bias=((EOS, 100.0),), num_logprobs=1
    ),
    "stop token": SamplingParams(
        max_tokens=COUNT,
        min_tokens=4,
        temperature=0.8,
        seed=3,
        stop_token_ids=frozenset(range(1, 40)),
        ignore_eos=True,
        num_logprobs=1,
    ),
}


CASES = pytest.mark.parametrize(
    ("way", "grammar"), [*((way, False) for way in WAYS), ("greedy", True), ("seeded", True)]
)


class EveryThird:
    """A grammar whose state is the number of tokens: each may only come at every third position."""

    def __init__(self, num_tokens: int = 0) -> None:
        self.num_tokens = num_tokens

    def allowed(self) -> NDArray[np.uint32]:
        bits = np.zeros(-(-VOCAB_SIZE // 32) * 32, np.uint8)
        bits[self.num_tokens % 3 : VOCAB_SIZE : 3] = 1
        return np.packbits(bits, bitorder="little").view(np.uint32)

    def advance(self, token_id: int) -> None:
        assert token_id % 3 == self.num_tokens % 3
        self.num_tokens += 1

    def rewind(self, num_tokens: int) -> None:
        self.num_tokens -= num_tokens


def sequence(params: SamplingParams, output: tuple[int, ...], name: str, grammar: bool) -> Sequence:
    return Sequence(
        name,
        (*PROMPT, *output),
        params,
        max_context_tokens=400,
        num_output_tokens=len(output),
        eos_token_ids=frozenset({EOS}),
        constraint=EveryThird(len(output)) if grammar else None,
    )


def toy(speculative_tokens: int = 0) -> ToyEngine:
    return ToyEngine(MODEL, num_blocks=16, token_budget=64, speculative_tokens=speculative_tokens)


def finish(engine: ToyEngine, seq: Sequence) -> tuple[list[TokenSample], FinishReason | None]:
    engine.run_until_idle()
    return seq.samples, seq.finish_reason


def assert_same(ours: list[TokenSample], theirs: list[TokenSample]) -> None:
    assert [sample.token_id for sample in ours] == [sample.token_id for sample in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert len(mine.top_logprobs) == len(other.top_logprobs)


@CASES
def test_an_answer_continued_from_its_tokens_is_the_same_wherever_it_was_cut(way: str, grammar: bool) -> None:
    params = WAYS[way]
    whole = sequence(params, (), "whole", grammar)
    engine = toy()
    engine.engine.add(whole)
    samples, reason = finish(engine, whole)
    tokens = tuple(sample.token_id for sample in samples)
    assert way not in ("min_tokens", "stop token") or len(tokens) < COUNT, "it ends by itself"
    for cut in range(1, len(tokens)):
        engine = toy()
        rest = sequence(params, tokens[:cut], "rest", grammar)
        engine.engine.add(rest)
        more, its_reason = finish(engine, rest)
        assert_same([*samples[:cut], *more], samples)
        assert its_reason == reason


def move(source: ToyEngine, seq: Sequence, target: ToyEngine, params: SamplingParams, grammar: bool) -> Sequence:
    """As the two decode workers do it, without a link."""
    tokens, last = tuple(seq.output_token_ids[:-1]), seq.samples[-1]
    taker = sequence(params, tokens, seq.seq_id + "'", grammar)
    allocation = target.engine.reserve(taker)
    assert allocation is not None
    num_valid = seq.num_computed_tokens
    left = source.engine.hand_over(seq)
    for ours, theirs in zip(left.block_table, allocation.block_table, strict=False):
        for layer in range(source.cache.layout.num_layers):
            target.cache.k(layer)[theirs] = source.cache.k(layer)[ours]
            target.cache.v(layer)[theirs] = source.cache.v(layer)[ours]
    source.engine.release_quarantine(left.quarantine_id)
    assert source.engine.is_idle
    output = target.engine.admit_received(taker, num_valid, last)
    assert output is not None
    return taker


@CASES
def test_an_answer_handed_over_with_its_kv_is_the_same_and_nothing_is_computed_again(way: str, grammar: bool) -> None:
    params = WAYS[way]
    whole = sequence(params, (), "whole", grammar)
    engine = toy()
    engine.engine.add(whole)
    samples, reason = finish(engine, whole)
    for cut in range(1, len(samples)):
        first, second = toy(), toy()
        seq = sequence(params, (), "moved", grammar)
        first.engine.add(seq)
        while seq.num_output_tokens < cut:
            first.step()
        before = list(seq.samples)
        taker = move(first, seq, second, params, grammar)
        assert taker.num_tokens == len(PROMPT) + cut
        more, its_reason = finish(second, taker)
        assert_same([*before[:-1], *more], samples)
        assert its_reason == reason
        assert taker.arrival_tokens_computed == 0


def test_an_answer_that_guesses_ahead_leaves_with_the_kv_of_what_was_right() -> None:
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, num_logprobs=0)
    whole = sequence(params, (), "whole", False)
    engine = toy()
    engine.engine.add(whole)
    samples, _ = finish(engine, whole)
    for steps in (2, 5, 9):
        first, second = toy(speculative_tokens=4), toy()
        seq = sequence(params, (), "moved", False)
        first.engine.add(seq)
        for _ in range(steps):
            first.step()
        before = list(seq.samples)
        more, _ = finish(second, move(first, seq, second, params, False))
        assert_same([*before[:-1], *more], samples)


def test_what_does_not_run_with_all_its_kv_is_not_handed_over() -> None:
    engine = ToyEngine(MODEL, num_blocks=16, token_budget=16)
    seq = sequence(WAYS["greedy"], (), "r", False)
    assert not engine.engine.can_hand_over(seq)
    engine.engine.add(seq)
    assert not engine.engine.can_hand_over(seq)
    engine.step()
    assert not engine.engine.can_hand_over(seq), "a chunk of the prompt"
    with pytest.raises(ValueError, match="cannot be handed over"):
        engine.engine.hand_over(seq)
    engine.step()
    assert engine.engine.can_hand_over(seq)
    schedule = engine.engine.schedule()
    assert not engine.engine.can_hand_over(seq), "a step is under way"
    engine.engine.publish(schedule, engine.engine.run(schedule))
    engine.engine.cancel("r")
    assert not engine.engine.can_hand_over(seq)

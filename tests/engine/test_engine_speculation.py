"""With guesses or without: the same text, log probabilities and ends, and no trace of a wrong guess anywhere.

The model's numbers are exact (`tests.support.ledger_model`), so equal means equal.
"""

from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.sequence import FinishReason, SamplingParams, Sequence, SequenceStatus, TokenSample
from tests.support.ledger_model import LEDGER_VOCAB, LedgerModel, stored_tokens
from tests.support.toy_engine import ToyEngine, sequence, transfer

MODEL = LedgerModel()
GREEDY = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, num_logprobs=2)
BLOCK = 8

samplings = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 30),
    min_tokens=st.sampled_from([0, 0, 6]),
    temperature=st.sampled_from([0.0, 0.0, 0.6, 1.0]),
    top_p=st.sampled_from([1.0, 0.9]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.1]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.2]),
    num_logprobs=st.sampled_from([None, 0, 2]),
    stop_token_ids=st.sampled_from([frozenset[int](), frozenset({7}), frozenset({2})]),
    ignore_eos=st.booleans(),
    seed=st.integers(0, 3),
)
prompts = st.lists(st.integers(1, LEDGER_VOCAB - 1), min_size=1, max_size=20)


@dataclass(frozen=True)
class Request:
    """`comes_at`, `cancelled_at`: numbers of steps."""

    prompt: list[int]
    sampling: SamplingParams
    comes_at: int
    by_hand_off: bool
    cancelled_at: int | None


requests = st.builds(
    Request, prompts, samplings, st.integers(0, 12), st.booleans(), st.none() | st.none() | st.integers(1, 25)
)


def alone(prompt: list[int], sampling: SamplingParams, model: LedgerModel = MODEL) -> Sequence:
    """The same request in an engine that guesses nothing and serves nobody else."""
    toy = ToyEngine(model, num_blocks=40, token_budget=64)
    toy.engine.add(seq := sequence("alone", prompt, sampling=sampling))
    toy.run_until_idle()
    return seq


class Decoding:
    """An engine that guesses, and one that prefills for it."""

    def __init__(self, num_blocks: int, token_budget: int, speculative_tokens: int) -> None:
        self.toy = ToyEngine(
            MODEL, num_blocks=num_blocks, token_budget=token_budget, speculative_tokens=speculative_tokens
        )
        self._prefill = ToyEngine(MODEL, num_blocks=40, token_budget=64, prefill_only=True)

    def receive(self, seq: Sequence) -> bool:
        """Have the prompt computed elsewhere. False = no room now."""
        allocation = self.toy.engine.reserve(seq)
        if allocation is None:
            return False
        twin = sequence(seq.seq_id, seq.prompt_token_ids, sampling=seq.sampling)
        self._prefill.engine.add(twin)
        (output,) = self._prefill.run_until_idle()
        blocks = slice(allocation.cached_blocks, -(-seq.num_tokens // BLOCK))
        source = self._prefill.blocks.block_table(seq.seq_id)[blocks]
        transfer(self._prefill.cache, self.toy.cache, source, allocation.block_table[blocks])
        self._prefill.engine.finish(seq.seq_id)
        self.toy.engine.admit_received(seq, seq.num_tokens, *output.samples)
        return True

    def step(self) -> None:
        """A step, and a look at all that is left behind."""
        self.toy.step()
        for entry in self.toy.blocks._index.entries.values():
            assert stored_tokens(self.toy.cache, entry.block_id) == list(entry.token_ids), "a wrong guess is cached"
        for seq in self.toy.engine._scheduler.running:
            assert list(seq.block_table) == self.toy.blocks.block_table(seq.seq_id)
            assert len(seq.block_table) <= -(-seq.num_tokens // BLOCK), "a wrong guess holds a block"


@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(requests, min_size=1, max_size=6),
    st.sampled_from([5, 9, 24, 64]),
    st.sampled_from([7, 9, 30]),
    st.sampled_from([1, 3, 8]),
)
def test_guesses_change_nothing_that_can_be_seen(
    given_requests: list[Request], token_budget: int, num_blocks: int, speculative_tokens: int
) -> None:
    decoding = Decoding(num_blocks, token_budget, speculative_tokens)
    engine = decoding.toy.engine
    seqs = [sequence(f"s{i}", request.prompt, sampling=request.sampling) for i, request in enumerate(given_requests)]
    to_come = list(zip(seqs, given_requests, strict=True))
    for step in range(600):
        for seq, request in list(to_come):
            if request.comes_at <= step and (not request.by_hand_off or decoding.receive(seq)):
                to_come.remove((seq, request))
                if not request.by_hand_off:
                    engine.add(seq)
        for seq, request in zip(seqs, given_requests, strict=True):
            if request.cancelled_at == step:
                engine.cancel(seq.seq_id)
        decoding.step()
        if not to_come and engine.is_idle:
            break
    assert engine.is_idle, "stuck"
    engine.check_integrity()
    for seq, request in zip(seqs, given_requests, strict=True):
        want = alone(request.prompt, request.sampling)
        assert seq.status is SequenceStatus.FINISHED
        if seq.finish_reason is FinishReason.CANCELLED:
            assert seq.samples == want.samples[: len(seq.samples)]
        else:
            assert (seq.samples, seq.finish_reason) == (want.samples, want.finish_reason)
            assert seq.num_output_tokens == len(seq.samples)


def test_right_guesses_save_steps() -> None:
    decoding = Decoding(30, 32, 6)
    engine = decoding.toy.engine
    seqs = [sequence(f"s{i}", [i + 1, 2, 3], sampling=GREEDY) for i in range(3)]
    for seq in seqs:
        engine.add(seq)
    while engine.has_work:
        decoding.step()
        running = engine._scheduler.running
        assert all(seq.num_tokens_to_compute == 1 for seq in running), "what was right is not computed again"
    load = engine.load()
    assert load.steps < 20, "forty tokens each"
    assert load.tokens_generated == 120
    assert 60 < load.accepted_tokens <= load.drafted_tokens
    for seq in seqs:
        assert seq.samples == alone(list(seq.prompt_token_ids), GREEDY).samples


def test_a_stop_among_right_guesses_ends_the_text_there() -> None:
    circle = alone([1, 2, 3], GREEDY).output_token_ids[:24]
    text = alone(circle, GREEDY).output_token_ids
    place = next(i for i in range(3, 9) if text[i] not in text[:i])
    stop = SamplingParams(max_tokens=40, temperature=0.0, stop_token_ids=frozenset({text[place]}))
    want = alone(circle, stop)
    assert len(want.samples) == place + 1
    toy = ToyEngine(MODEL, num_blocks=20, token_budget=32, speculative_tokens=8)
    toy.engine.add(seq := sequence("a", circle, sampling=stop))
    outputs = toy.run_until_idle()
    assert len(outputs) < len(seq.samples) == len(want.samples)
    assert (seq.output_token_ids, seq.finish_reason) == (want.output_token_ids, FinishReason.STOP)
    assert sum(len(output.samples) for output in outputs) == len(seq.samples)
    assert [output.finish_reason for output in outputs] == [None] * (len(outputs) - 1) + [FinishReason.STOP]


def test_what_is_sampled_behind_an_end_is_dropped() -> None:
    toy = ToyEngine(MODEL, num_blocks=8, speculative_tokens=4)
    toy.engine.add(seq := sequence("a", [1, 2, 3], max_tokens=2))
    schedule = toy.engine.schedule()
    samples = tuple(TokenSample(token) for token in (5, 6, 7))
    (output,) = toy.engine.publish(schedule, {"a": samples})
    assert (output.samples, output.finish_reason) == (samples[:2], FinishReason.LENGTH)
    assert seq.output_token_ids == [5, 6]
    assert toy.engine.load().tokens_generated == 2
    toy.engine.check_integrity()
    assert toy.engine.is_idle


@pytest.mark.parametrize("num_right", [0, 1, 3])
def test_a_guess_that_cannot_be_computed_fails_the_step_that_needs_it(num_right: int) -> None:
    """Logits that are not numbers behind a guess are those of a token that has not come yet."""
    toy = ToyEngine(MODEL, num_blocks=20, speculative_tokens=4)
    toy.engine.add(seq := sequence("a", [1, 2, 3], sampling=GREEDY))
    while not (schedule := toy.engine.schedule()).items[0].draft_token_ids:
        toy.engine.publish(schedule, toy.engine.run(schedule))
    broken = LedgerModel()
    rows = slice(num_right, None)

    def logits(hidden: object) -> object:
        values = MODEL.logits(hidden)  # type: ignore[arg-type]
        values[rows] = float("nan")
        return values

    broken.logits = logits  # type: ignore[method-assign,assignment]
    toy.engine._runner._model = broken
    before = seq.num_tokens
    (output,) = toy.engine.publish(schedule, toy.engine.run(schedule))
    toy.engine.check_integrity()
    assert seq.num_tokens - before == len(output.samples) == min(num_right, len(schedule.items[0].draft_token_ids) + 1)
    assert (output.error is not None) is (num_right == 0)

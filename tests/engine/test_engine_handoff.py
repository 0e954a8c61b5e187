"""The engine's part in a hand-off, on either side."""

import pytest

from engine.engine import SequenceOutput
from engine.sequence import FinishReason, SamplingParams, Sequence, SequenceStatus, TokenSample
from kv_cache.block_manager import UnknownQuarantineError
from tests.support.toy_engine import MODEL, PROMPT, ToyEngine, assert_greedy_text, sequence, solo, transfer


def hand_off(prefill: ToyEngine, decode: ToyEngine, seq: Sequence) -> SequenceOutput | None:
    """Prefill `seq` on one engine, move its blocks, admit it on the other. None = no room there now."""
    allocation = decode.engine.reserve(seq)
    if allocation is None:
        return None
    twin = sequence(seq.seq_id, seq.token_ids, sampling=seq.sampling)
    prefill.engine.add(twin)
    (output,) = prefill.run_until_idle()
    needed = -(-seq.num_tokens // 8)
    first = allocation.cached_blocks
    source = prefill.blocks.block_table(seq.seq_id)[first:needed]
    transfer(prefill.cache, decode.cache, source, allocation.block_table[first:needed])
    prefill.engine.finish(seq.seq_id)
    return decode.engine.admit_received(seq, seq.num_tokens, *output.samples)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 28])
def test_a_hand_off_gives_the_text_of_one_engine(length: int) -> None:
    sampling = SamplingParams(max_tokens=12, temperature=0.7, seed=length)
    prefill = ToyEngine(MODEL, num_blocks=12, prefill_only=True, token_budget=10)
    decode = ToyEngine(MODEL, num_blocks=12)
    seq = sequence("a", PROMPT[:length], sampling=sampling)
    assert hand_off(prefill, decode, seq) is not None
    decode.run_until_idle()
    assert seq.output_token_ids == solo(PROMPT[:length], sampling)
    assert (seq.arrival_tokens_computed, seq.preempted_tokens) == (0, 0)
    assert prefill.engine.is_idle
    assert decode.engine.is_idle


def test_received_sequences_that_are_preempted_come_back_with_the_same_text() -> None:
    prefill = ToyEngine(MODEL, num_blocks=40, prefill_only=True)
    decode = ToyEngine(MODEL, num_blocks=9, max_num_seqs=8)
    sampling = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.0)
    todo = [sequence(str(i), [i + 1, *PROMPT[: 5 + i]], sampling=sampling) for i in range(16)]
    seqs = list(todo)
    for _ in range(3000):
        if todo and hand_off(prefill, decode, todo[0]) is not None:
            del todo[0]
        if not todo and decode.engine.is_idle:
            break
        decode.step()
    assert [seq.finish_reason for seq in seqs] == [FinishReason.LENGTH] * 16
    assert decode.engine.load().preemptions > 0
    assert sum(seq.preempted_tokens for seq in seqs) > 0
    assert sum(seq.arrival_tokens_computed for seq in seqs) == 0
    for seq in seqs:
        assert_greedy_text(MODEL, seq)


# ---- hand-off, decode side ----


def test_a_repeated_prompt_needs_no_block_but_the_partial_one() -> None:
    prefill = ToyEngine(MODEL, num_blocks=12, prefill_only=True)
    decode = ToyEngine(MODEL, num_blocks=12)
    assert hand_off(prefill, decode, sequence("a", PROMPT[:16], max_tokens=3)) is not None
    decode.run_until_idle()
    allocation = decode.engine.reserve(again := sequence("b", PROMPT[:16], max_tokens=3))
    assert allocation is not None
    assert allocation.cached_blocks == 2
    assert again.num_cached_tokens == 16


def test_a_first_token_may_end_a_received_sequence_at_once() -> None:
    decode = ToyEngine(MODEL, num_blocks=12)
    seq = sequence("a", PROMPT[:8], max_tokens=5)
    decode.engine.reserve(seq)
    output = decode.engine.admit_received(seq, 8, TokenSample(0))
    assert output == SequenceOutput(seq, (TokenSample(0),), FinishReason.STOP)
    assert decode.engine.is_idle
    decode.engine.check_integrity()


def test_a_receiving_sequence_is_no_work_and_its_blocks_cannot_be_matched() -> None:
    decode = ToyEngine(MODEL, num_blocks=12)
    seq = sequence("a", PROMPT[:16])
    decode.engine.reserve(seq)
    assert not decode.engine.has_work
    assert not decode.engine.is_idle
    assert not decode.engine.schedule()
    other = sequence("b", PROMPT[:16])
    decode.engine.add(other)
    decode.run_until_idle()
    assert other.num_cached_tokens == 0
    assert_greedy_text(MODEL, other)


def test_a_failed_hand_off_keeps_its_blocks_until_the_writer_is_fenced() -> None:
    decode = ToyEngine(MODEL, num_blocks=4)
    seq = sequence("a", PROMPT[:16])
    decode.engine.reserve(seq)
    quarantine_id = decode.engine.abort_received(seq)
    assert quarantine_id is not None
    assert seq.finish_reason is FinishReason.CANCELLED
    assert decode.engine.usage().quarantined == 3
    assert not decode.engine.is_idle
    assert decode.engine.reserve(sequence("b", PROMPT[:16])) is None
    decode.engine.release_quarantine(quarantine_id)
    decode.engine.check_integrity()
    assert decode.engine.is_idle
    assert decode.engine.reserve(sequence("b", PROMPT[:16])) is not None
    with pytest.raises(UnknownQuarantineError):
        decode.engine.release_quarantine(quarantine_id)


def test_news_of_a_hand_off_that_was_cancelled_is_ignored() -> None:
    decode = ToyEngine(MODEL, num_blocks=4)
    seq = sequence("a", PROMPT[:16])
    decode.engine.reserve(seq)
    decode.engine.cancel("a")
    assert decode.engine.admit_received(seq, 16, TokenSample(1)) is None
    assert decode.engine.abort_received(seq) is None
    replacement = sequence("a", PROMPT[:8])
    decode.engine.reserve(replacement)
    assert decode.engine.admit_received(seq, 16, TokenSample(1)) is None
    assert replacement.status is SequenceStatus.RECEIVING


def test_a_hand_off_of_too_few_tokens_is_refused() -> None:
    decode = ToyEngine(MODEL, num_blocks=4)
    seq = sequence("a", PROMPT[:16])
    decode.engine.reserve(seq)
    with pytest.raises(ValueError, match="15 tokens received, 16 expected"):
        decode.engine.admit_received(seq, 15, TokenSample(1))
    assert seq.status is SequenceStatus.RECEIVING


# ---- hand-off, prefill side ----


def test_a_prefilled_sequence_keeps_its_blocks_until_they_are_sent() -> None:
    prefill = ToyEngine(MODEL, num_blocks=4, prefill_only=True)
    seq = sequence("a", PROMPT[:20], max_tokens=50)
    prefill.engine.add(seq)
    (output,) = prefill.run_until_idle()
    assert output.finish_reason is FinishReason.LENGTH
    table = list(prefill.blocks.block_table("a"))
    before = prefill.cache.k(1)[table].clone()
    quarantine_id = prefill.engine.quarantine("a")
    assert quarantine_id is not None
    prefill.engine.add(sharing := sequence("b", PROMPT[:17]))  # may read what is being sent
    prefill.step()
    assert sharing.num_cached_tokens == 16
    prefill.engine.finish("b")
    prefill.engine.add(other := sequence("c", [1, *PROMPT[:20]]))
    assert prefill.step() == []
    assert prefill.cache.k(1)[table].equal(before)
    prefill.engine.release_quarantine(quarantine_id)
    prefill.run_until_idle()
    prefill.engine.finish("c")
    for served in (seq, sharing, other):
        assert_greedy_text(MODEL, served)
    assert prefill.engine.is_idle


def test_a_prefill_worker_computes_only_the_first_token() -> None:
    prefill = ToyEngine(MODEL, num_blocks=8, prefill_only=True)
    prefill.engine.add(seq := sequence("a", PROMPT[:20], max_tokens=50))
    assert len(prefill.run_until_idle()) == 1
    assert not prefill.engine.schedule()
    assert prefill.engine.get("a") is seq
    prefill.engine.finish("a")
    prefill.engine.finish("a")
    assert prefill.engine.quarantine("a") is None
    prefill.engine.check_integrity()
    assert prefill.engine.is_idle

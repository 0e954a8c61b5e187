from dataclasses import replace

import pytest

from engine.sequence import FinishReason, SamplingParams, Sequence, SequenceStatus
from kv_cache.block_manager import IntegrityError
from kvferry_rpc.common_pb2 import ErrorCode
from runtime.errors import KvferryError
from tests.support.toy_engine import MODEL, PROMPT, ToyEngine, assert_greedy_text, sequence, solo
from tests.support.toy_model import ToyModel

# ---- the same text ----


@pytest.mark.parametrize("budget", [4, 5, 7, 8, 13, 64])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 15, 16, 17, 28])
def test_any_chunking_gives_the_same_text_cold_and_warm(budget: int, length: int) -> None:
    toy = ToyEngine(MODEL, num_blocks=20, token_budget=budget)
    cold, warm = (sequence(name, PROMPT[:length], max_tokens=9) for name in ("cold", "warm"))
    for seq in (cold, warm):
        toy.engine.add(seq)
        toy.run_until_idle()
        assert_greedy_text(MODEL, seq)
    assert cold.token_ids == warm.token_ids
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, (length - 1) // 8 * 8)
    assert toy.engine.is_idle


@pytest.mark.parametrize("seed", range(4))
def test_seeded_sampling_gives_the_same_text_in_any_company(seed: int) -> None:
    sampling = SamplingParams(max_tokens=24, temperature=1.0, top_p=0.9, seed=seed, ignore_eos=True)
    want = solo(PROMPT, sampling)
    toy = ToyEngine(MODEL, num_blocks=12, token_budget=6)
    seqs = [sequence(str(i), PROMPT, sampling=sampling) for i in range(3)]
    others = [sequence(f"o{i}", PROMPT[i:], sampling=replace(sampling, seed=99)) for i in range(3)]
    for pair in zip(seqs, others, strict=True):
        for seq in pair:
            toy.engine.add(seq)
    toy.run_until_idle()
    assert toy.engine.load().preemptions > 0
    assert all(seq.output_token_ids == want for seq in seqs)
    assert others[0].output_token_ids != want


@pytest.mark.parametrize("cut", [1, 5, 11])
def test_another_attempt_continues_the_text(cut: int) -> None:
    sampling = SamplingParams(max_tokens=12, temperature=0.8, seed=3, frequency_penalty=0.5, ignore_eos=True)
    want = solo(PROMPT[:10], sampling)
    toy = ToyEngine(MODEL, num_blocks=12)
    seq = sequence("again", PROMPT[:10], output=want[:cut], sampling=sampling)
    toy.engine.add(seq)
    toy.run_until_idle()
    assert seq.output_token_ids == want
    assert len(seq.samples) == 12 - cut


def test_a_corrupted_block_changes_the_text() -> None:
    """The control: if this passed unnoticed, the tests above would prove nothing."""
    toy = ToyEngine(MODEL, num_blocks=12)
    seq = sequence("a", PROMPT, max_tokens=12)
    toy.engine.add(seq)
    toy.step()
    toy.step()
    block = toy.blocks.block_table("a")[1]
    toy.cache.v(0)[block] = toy.cache.v(0)[block].flip(1)
    toy.run_until_idle()
    with pytest.raises(AssertionError, match="not the most likely"):
        assert_greedy_text(MODEL, seq)


# ---- cancelling ----


@pytest.mark.parametrize("steps", range(7))
@pytest.mark.parametrize("quarantine", [False, True])
def test_cancelling_at_any_step_gives_every_block_back(steps: int, quarantine: bool) -> None:
    toy = ToyEngine(MODEL, num_blocks=8, token_budget=8)
    toy.engine.add(seq := sequence("a", PROMPT, max_tokens=3))
    for _ in range(steps):
        toy.step()
    finished = seq.finish_reason
    quarantine_id = toy.engine.cancel("a", quarantine=quarantine)
    assert toy.engine.cancel("a") is None
    assert seq.finish_reason is (finished or FinishReason.CANCELLED)
    assert (quarantine_id is not None) is (quarantine and 0 < steps < 6)
    if quarantine_id is not None:
        toy.engine.release_quarantine(quarantine_id)
    toy.engine.check_integrity()
    assert toy.engine.is_idle
    assert not toy.engine.schedule()


def test_a_sequence_cancelled_inside_a_step_is_not_reported() -> None:
    toy = ToyEngine(MODEL, num_blocks=8)
    victim, other = sequence("a", PROMPT[:9]), sequence("b", PROMPT[9:14])
    toy.engine.add(victim)
    toy.engine.add(other)
    schedule = toy.engine.schedule()
    result = toy.engine.run(schedule, lambda layer: toy.engine.cancel("a"))
    outputs = toy.engine.publish(schedule, result)
    assert [output.seq for output in outputs] == [other]
    assert victim.finish_reason is FinishReason.CANCELLED
    toy.engine.check_integrity()
    toy.run_until_idle()
    assert_greedy_text(MODEL, other)


def test_a_namesake_added_inside_a_step_is_not_given_the_old_ones_token() -> None:
    toy = ToyEngine(MODEL, num_blocks=8)
    toy.engine.add(sequence("a", PROMPT[:9]))
    schedule = toy.engine.schedule()
    result = toy.engine.run(schedule)
    toy.engine.cancel("a")
    toy.engine.add(namesake := sequence("a", PROMPT[3:7]))
    assert toy.engine.publish(schedule, result) == []
    toy.run_until_idle()
    assert_greedy_text(MODEL, namesake)


# ---- failing ----


def test_not_a_number_ends_its_own_sequence_and_is_not_cached() -> None:
    model = ToyModel()
    toy = ToyEngine(model, num_blocks=8, token_budget=40)
    bad, good = sequence("bad", [7, *PROMPT[:10]]), sequence("good", PROMPT[11:16])
    model.nan_token_ids = frozenset({7})
    good.token_ids[:] = [token for token in good.token_ids if token != 7]
    toy.engine.add(bad)
    toy.engine.add(good)
    outputs = {output.seq.seq_id: output for output in toy.step()}
    assert outputs["bad"].finish_reason is FinishReason.FAILED
    assert outputs["bad"].samples == ()
    assert outputs["bad"].error is not None
    assert bad.status is SequenceStatus.FINISHED
    assert outputs["good"].error is None
    assert toy.blocks.match_prefix(bad.block_hashes, bad.token_ids) == 0


def test_a_failed_prefill_keeps_its_blocks_for_the_sender() -> None:
    model = ToyModel()
    model.nan_token_ids = frozenset({7})
    toy = ToyEngine(model, num_blocks=8, prefill_only=True)
    toy.engine.add(bad := sequence("bad", [7, 1, 2]))
    (output,) = toy.step()
    assert output.finish_reason is FinishReason.FAILED
    assert toy.engine.usage().used == 1
    assert toy.engine.cancel("bad") is None
    assert bad.finish_reason is FinishReason.FAILED
    toy.engine.check_integrity()
    assert toy.engine.is_idle


# ---- refusals ----


@pytest.mark.parametrize("door", ["add", "reserve"])
@pytest.mark.parametrize(
    ("seq", "code", "field"),
    [
        (sequence("a", [1] * 10, max_context_tokens=10), ErrorCode.CONTEXT_LENGTH_EXCEEDED, "prompt"),
        (sequence("a", [1] * 10, max_tokens=23), ErrorCode.CONTEXT_LENGTH_EXCEEDED, "prompt"),
        (sequence("a", [1] * 10, output=[1] * 3, max_tokens=3), ErrorCode.INVALID_REQUEST, "max_tokens"),
        (sequence("taken", [1] * 10), ErrorCode.INVALID_REQUEST, "request_id"),
    ],
)
def test_a_sequence_that_can_never_finish_is_refused(
    door: str, seq: Sequence, code: "ErrorCode.ValueType", field: str
) -> None:
    toy = ToyEngine(MODEL, num_blocks=4)
    toy.engine.add(sequence("taken", [1]))
    before = toy.engine.load()
    with pytest.raises(KvferryError) as caught:
        toy.engine.add(seq) if door == "add" else toy.engine.reserve(seq)
    assert (caught.value.code, caught.value.field) == (code, field)
    assert toy.engine.load() == before
    assert toy.engine.get("a") is None


def test_a_full_queue_is_an_overload_with_a_time_to_retry() -> None:
    toy = ToyEngine(MODEL, num_blocks=4, max_waiting=1)
    toy.engine.add(sequence("a", [1]))
    with pytest.raises(KvferryError) as caught:
        toy.engine.add(sequence("b", [1]))
    assert caught.value.code == ErrorCode.OVERLOADED
    assert caught.value.retry_after_ms > 0
    assert toy.engine.get("b") is None


def test_a_sequence_as_long_as_the_pool_finishes() -> None:
    toy = ToyEngine(MODEL, num_blocks=4)
    sampling = SamplingParams(max_tokens=22, ignore_eos=True, temperature=0.0)
    toy.engine.add(seq := sequence("a", PROMPT[:10], sampling=sampling))
    toy.run_until_idle()
    assert seq.num_tokens == toy.engine.pool_tokens == 32
    assert_greedy_text(MODEL, seq)


def test_steps_do_not_overlap() -> None:
    toy = ToyEngine(MODEL, num_blocks=4)
    toy.engine.add(sequence("a", [1, 2]))
    schedule = toy.engine.schedule()
    with pytest.raises(RuntimeError, match="before the last step was published"):
        toy.engine.schedule()
    with pytest.raises(RuntimeError, match="between schedule and publish"):
        toy.engine.reserve(sequence("b", [1]))
    toy.engine.publish(schedule, toy.engine.run(schedule))
    assert toy.engine.reserve(sequence("b", [1])) is not None


# ---- views ----


def test_the_load_counts_each_token_once() -> None:
    toy = ToyEngine(MODEL, num_blocks=12, token_budget=16)
    assert toy.engine.load().tokens_waiting == 0
    toy.engine.add(sequence("a", PROMPT, sampling=SamplingParams(max_tokens=4, ignore_eos=True)))
    toy.engine.reserve(sequence("b", PROMPT[:5]))
    load = toy.engine.load()
    assert (load.num_waiting, load.num_running, load.num_receiving, load.tokens_waiting) == (1, 0, 1, 28)
    toy.step()
    load = toy.engine.load()
    assert (load.num_waiting, load.num_running, load.tokens_waiting) == (0, 1, 12)
    assert (load.steps, load.prompt_tokens_computed, load.tokens_generated) == (1, 16, 0)
    toy.run_until_idle()
    load = toy.engine.load()
    assert (load.steps, load.prompt_tokens_computed, load.tokens_generated) == (5, 28, 4)
    assert load.blocks == toy.blocks.usage()


def test_the_audit_finds_a_leaked_block() -> None:
    toy = ToyEngine(MODEL, num_blocks=4)
    toy.engine.check_integrity()
    toy.blocks.allocate("ghost", 3, [], [])
    with pytest.raises(IntegrityError, match="idle, but blocks are still held"):
        toy.engine.check_integrity()


def test_the_audit_finds_a_sequence_that_lost_its_blocks() -> None:
    toy = ToyEngine(MODEL, num_blocks=4)
    toy.engine.reserve(sequence("a", [1, 2]))
    toy.blocks.free("a")
    with pytest.raises(IntegrityError, match="block table missing"):
        toy.engine.check_integrity()


def test_the_audit_finds_a_status_that_disagrees_with_the_queue() -> None:
    toy = ToyEngine(MODEL, num_blocks=4)
    toy.engine.add(seq := sequence("a", [1, 2]))
    seq.status = SequenceStatus.RUNNING
    with pytest.raises(IntegrityError, match="RUNNING"):
        toy.engine.check_integrity()

import pytest

from engine.scheduler import Schedule, SchedulerConfig
from engine.sequence import FinishReason, SamplingParams, Sequence, SequenceStatus, TokenSample
from tests.support.scheduler_world import BLOCK, World, make


def plan(schedule: Schedule) -> list[tuple[str, int, int, bool]]:
    return [(item.seq.seq_id, item.start, item.num_new_tokens, item.samples) for item in schedule.items]


def test_a_prompt_is_cut_at_the_budget_and_on_block_boundaries() -> None:
    world = World(20, token_budget=20)
    world.add("a", 45)
    assert plan(world.step()) == [("a", 0, 16, False)]
    assert plan(world.step()) == [("a", 16, 16, False)]
    assert plan(world.step()) == [("a", 32, 13, True)]
    assert plan(world.step()) == [("a", 45, 1, True)]


def test_a_budget_below_the_block_size_still_moves() -> None:
    world = World(20, token_budget=5, max_num_seqs=2)
    world.add("a", 19)
    assert [plan(world.step())[0][1:3] for _ in range(5)] == [(0, 5), (5, 3), (8, 5), (13, 3), (16, 3)]


def test_blocks_for_the_whole_prompt_are_taken_at_once() -> None:
    world = World(20, token_budget=8)
    world.add("a", 45)
    schedule = world.step()
    assert len(schedule.items[0].block_table) == 6


def test_decoding_goes_before_chunks_and_chunks_before_newcomers() -> None:
    world = World(40, token_budget=24)
    world.add("a", 20)
    world.step()
    world.add("b", 60, first=500)
    assert plan(world.step()) == [("a", 20, 1, True), ("b", 0, 16, False)]
    world.add("c", 3, first=900)
    assert plan(world.step()) == [("a", 21, 1, True), ("b", 16, 16, False), ("c", 0, 3, True)]
    assert plan(world.step()) == [("a", 22, 1, True), ("c", 3, 1, True), ("b", 32, 16, False)]


def test_newcomers_are_served_in_order_of_arrival_even_if_a_later_one_would_fit() -> None:
    world = World(6)
    world.add("a", 30)
    world.step()
    world.add("b", 30, first=100)
    world.add("c", 2, first=200)
    assert [item.seq.seq_id for item in world.step().items] == ["a"]
    assert [seq.seq_id for seq in world.scheduler.waiting] == ["b", "c"]


def test_no_more_sequences_run_than_allowed() -> None:
    world = World(40, max_num_seqs=2)
    for name in "abc":
        world.add(name, 4, max_tokens=3, first=ord(name))
    assert [item.seq.seq_id for item in world.step().items] == ["a", "b"]
    world.run()


def test_a_full_queue_refuses() -> None:
    world = World(40, max_waiting=2)
    world.add("a", 4)
    world.add("b", 4)
    assert not world.scheduler.add(make("c", 4))
    assert [seq.seq_id for seq in world.scheduler.waiting] == ["a", "b"]


@pytest.mark.parametrize("tokens", range(1, 3 * BLOCK + 1))
def test_a_cached_prompt_still_computes_its_last_token(tokens: int) -> None:
    world = World(20)
    world.add("a", tokens, max_tokens=1)
    world.run()
    seq = world.add("b", tokens, max_tokens=1)
    (item,) = world.scheduler.schedule().items
    assert seq.num_cached_tokens == (tokens - 1) // BLOCK * BLOCK
    assert (item.start, item.num_new_tokens, item.samples) == (
        seq.num_cached_tokens,
        tokens - seq.num_cached_tokens,
        True,
    )
    shared = world.blocks.block_table("b")[item.start // BLOCK]
    assert world.blocks.usage().used == len(world.blocks.block_table("b"))
    assert shared not in world.blocks.block_table("b")[: item.start // BLOCK]


def test_blocks_can_be_matched_only_after_they_are_computed() -> None:
    world = World(20, token_budget=16)
    first = world.add("a", 33)
    world.scheduler.schedule()
    assert world.blocks.match_prefix(first.block_hashes, first.token_ids) == 0
    world = World(20, token_budget=16)
    first = world.add("a", 33)
    world.step()
    assert world.blocks.match_prefix(first.block_hashes, first.token_ids) == 2


def test_the_prefix_cache_covers_generated_tokens_too() -> None:
    world = World(20)
    seq = world.add("a", 5, max_tokens=12)
    world.run()
    again = Sequence("b", seq.token_ids, SamplingParams(max_tokens=1), max_context_tokens=100)
    assert world.scheduler.add(again)
    world.step()
    assert again.num_cached_tokens == 16


def test_another_tenants_salt_finds_nothing() -> None:
    world = World(20)
    world.add("a", 20, max_tokens=1)
    world.run()
    other = Sequence("b", range(20), SamplingParams(max_tokens=1), max_context_tokens=99, cache_salt=b"other")
    world.scheduler.add(other)
    world.run()
    assert other.num_cached_tokens == 0


def test_the_youngest_is_preempted_and_comes_back_first() -> None:
    world = World(5, headroom=0.0)
    old = world.add("old", 16, max_tokens=20)
    young = world.add("young", 9, max_tokens=12, first=100)
    world.step()
    late = world.add("late", 3, max_tokens=2, first=200)
    schedule = world.step()
    assert schedule.preempted == ()
    while not (schedule := world.step()).preempted:
        assert world.steps < 50
    assert schedule.preempted == (young,)
    assert young.status is SequenceStatus.PREEMPTED
    assert [item.seq for item in schedule.items] == [old]
    assert world.scheduler.waiting == (young, late)
    world.run()
    assert young.finish_reason is FinishReason.LENGTH
    assert young.num_output_tokens == 12
    assert young.preempted_tokens > 0


def test_a_preempted_sequence_finds_its_blocks_again() -> None:
    world = World(12)
    seq = world.add("a", 33)
    world.step()
    world.step()
    victim = world.scheduler._preempt_youngest()
    assert victim is seq
    assert world.blocks.usage().used == 0
    assert seq.num_tokens_to_compute == seq.num_tokens == 35
    (item,) = world.step().items
    assert (item.start, item.num_new_tokens) == (32, 3)  # 33 of the prompt, two generated
    assert seq.preempted_tokens == 2
    assert seq.num_cached_tokens == 0  # of the first admission


def test_headroom_is_kept_beside_running_sequences_only() -> None:
    world = World(10, headroom=0.3, token_budget=128)
    alone = world.add("a", 79, max_tokens=1)
    world.step()
    assert alone.finish_reason is FinishReason.LENGTH
    world.add("b", 16, first=100)
    world.step()
    world.add("c", 56, first=200)  # 7 blocks of the 8 left: 3 must stay
    assert [item.seq.seq_id for item in world.step().items] == ["b"]


def test_cached_blocks_in_use_do_not_count_against_the_headroom() -> None:
    world = World(10, headroom=0.2)
    world.add("a", 50)
    world.step()
    world.add("b", 50)  # 7 blocks, of which it shares 6
    assert [item.seq.seq_id for item in world.step().items] == ["a", "b"]


def test_a_prefill_worker_fills_its_pool_to_the_last_block() -> None:
    world = World(10, prefill_only=True, headroom=0.5)
    world.add("a", 40)
    world.add("b", 40, first=100)
    assert len(world.step().items) == 2
    assert world.blocks.usage().used == 10


def test_fitting_alone_counts_the_whole_answer_where_it_is_generated() -> None:
    assert World(3).scheduler.fits_alone(make("a", 20, max_tokens=4))
    assert not World(3).scheduler.fits_alone(make("a", 20, max_tokens=5))
    assert World(3, prefill_only=True).scheduler.fits_alone(make("a", 20, max_tokens=500))
    assert not World(3, prefill_only=True).scheduler.fits_alone(make("a", 25))


def test_a_reservation_covers_the_prompt_and_the_first_decode_block() -> None:
    world = World(10)
    seq = make("a", 16)
    allocation = world.scheduler.reserve(seq)
    assert allocation is not None
    assert (allocation.cached_blocks, len(allocation.block_table)) == (0, 3)
    assert seq.status is SequenceStatus.RECEIVING
    assert not world.scheduler.schedule()


def test_a_reservation_may_match_every_full_block() -> None:
    world = World(10)
    world.add("a", 16, max_tokens=1)
    world.run()
    seq = make("b", 16)
    allocation = world.scheduler.reserve(seq)
    assert allocation is not None
    assert allocation.cached_blocks == 2
    assert seq.num_cached_tokens == 16


def test_blocks_being_received_cannot_be_matched_before_admission() -> None:
    world = World(20)
    first, second = make("a", 16), make("b", 16)
    world.scheduler.reserve(first)
    allocation = world.scheduler.reserve(second)
    assert allocation is not None
    assert allocation.cached_blocks == 0
    world.scheduler.admit_received(first, 16)
    assert world.blocks.match_prefix(second.block_hashes, second.token_ids) == 2


def test_a_received_sequence_decodes_at_once() -> None:
    world = World(20)
    seq = make("a", 16)
    world.scheduler.reserve(seq)
    world.scheduler.admit_received(seq, 16)
    seq.append_token(TokenSample(3))
    assert plan(world.step()) == [("a", 16, 1, True)]
    world.run()
    assert (seq.arrival_tokens_computed, seq.preempted_tokens) == (0, 0)


def test_reservations_leave_room_for_those_who_wait() -> None:
    world = World(10, token_budget=8)
    world.add("a", 40)  # 5 blocks, not yet admitted
    assert world.scheduler.reserve(make("b", 40, first=100)) is None
    assert world.scheduler.reserve(make("c", 31, first=200)) is not None
    world.step()
    assert [seq.seq_id for seq in world.scheduler.running] == ["a"]


def test_reservations_take_no_slot_from_those_who_wait() -> None:
    world = World(40, max_num_seqs=2)
    world.add("a", 4)
    assert world.scheduler.reserve(make("b", 4, first=100)) is not None
    assert world.scheduler.reserve(make("c", 4, first=200)) is None
    assert len(world.step().items) == 1


def test_a_refused_reservation_changes_nothing() -> None:
    world = World(4)
    before = world.blocks.usage()
    seq = make("a", 40)
    assert world.scheduler.reserve(seq) is None
    assert world.blocks.usage() == before
    assert seq.status is SequenceStatus.WAITING
    assert world.scheduler.receiving == ()


def test_alone_beside_a_reservation_a_sequence_waits_with_its_blocks_in_place() -> None:
    world = World(4, headroom=0.0)
    seq = world.add("a", 15, max_tokens=17)  # four blocks in the end
    world.step()
    received = make("b", 7, max_tokens=2, first=100)
    assert world.scheduler.reserve(received) is not None
    assert world.scheduler.reserve(make("c", 7, first=200)) is None
    while world.step().items:
        assert world.steps < 50
    assert seq.status is SequenceStatus.RUNNING
    assert seq.num_tokens == 25
    world.scheduler.remove(received)
    received.finish(FinishReason.CANCELLED)
    world.blocks.free("b")
    world.run()
    assert seq.preempted_tokens == 0


def test_removing_from_any_queue_is_final() -> None:
    world = World(20)
    waiting, running, receiving = world.add("a", 4), world.add("b", 4), make("c", 4)
    world.scheduler.reserve(receiving)
    world.scheduler._waiting.remove(waiting)
    world.step()
    world.scheduler.add(waiting)
    for seq in (waiting, running, receiving, make("d", 4)):
        world.scheduler.remove(seq)
    scheduler = world.scheduler
    assert (scheduler.waiting, scheduler.running, scheduler.receiving) == ((), (), ())


@pytest.mark.parametrize(
    "config",
    [
        {"token_budget": 3, "max_num_seqs": 4, "max_waiting": 1},
        {"token_budget": 3, "max_num_seqs": 0, "max_waiting": 1},
        {"token_budget": 3, "max_num_seqs": 1, "max_waiting": 0},
        {"token_budget": 3, "max_num_seqs": 1, "max_waiting": 1, "headroom": 1.0},
        {"token_budget": 3, "max_num_seqs": 1, "max_waiting": 1, "headroom": float("nan")},
    ],
)
def test_bounds_that_contradict_each_other_are_refused(config: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        SchedulerConfig(**config)  # type: ignore[arg-type]

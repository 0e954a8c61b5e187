"""The forecast of KV: equal to stepping through the future token by token, and to what workers do at admission."""

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scheduler import SchedulerConfig
from router.admission.forecast import Demand, PoolState, can_ever_hold, fits
from tests.support.scheduler_world import World, make

BLOCK = 4


@dataclass(frozen=True)
class Seq:
    num_tokens: int
    remaining: int
    shared_blocks: int = 0


def blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK)


def pool_of(available: int, seqs: list[Seq], num_blocks: int = 10_000, slots_free: int = 100) -> PoolState:
    growth = sum(blocks(seq.num_tokens + seq.remaining) - blocks(seq.num_tokens) for seq in seqs)
    return PoolState("decode-0", BLOCK, num_blocks, available, slots_free, 0, growth, seqs)


def steps_through(available: int, seqs: list[Seq], demand: Demand, shared: int, horizon: int) -> bool:
    """The dumb model: every sequence gets a token a step, and one that ends gives back what is its own."""
    if blocks(demand.num_tokens + 1) - shared > available:
        return False
    for step in range(min(horizon, demand.expected) + 1):
        taken = blocks(demand.num_tokens + step) - shared
        for seq in seqs:
            if step <= seq.remaining:
                taken += blocks(seq.num_tokens + step) - blocks(seq.num_tokens)
            else:
                taken -= max(0, blocks(seq.num_tokens) - seq.shared_blocks)
        if taken > available:
            return False
    return True


SEQS = st.lists(st.builds(Seq, st.integers(1, 40), st.integers(0, 40), st.integers(0, 3)), max_size=8)


@settings(deadline=None, max_examples=200)
@given(SEQS, st.integers(0, 60), st.integers(1, 60), st.integers(1, 60), st.integers(0, 5), st.integers(1, 50))
def test_it_says_what_stepping_through_the_future_says(
    seqs: list[Seq], available: int, num_tokens: int, expected: int, shared: int, horizon: int
) -> None:
    demand = Demand(num_tokens, expected, expected)
    assert fits(pool_of(available, seqs), demand, shared, horizon) == steps_through(
        available, seqs, demand, shared, horizon
    )


def test_a_sequence_that_ends_in_time_makes_room_for_the_growth_of_the_request() -> None:
    demand = Demand(num_tokens=8, expected=40, most=40)
    short, long = Seq(40, 3), Seq(40, 60)
    assert fits(pool_of(6, [short]), demand, 0, 512)
    assert not fits(pool_of(6, [long]), demand, 0, 512)
    # Beyond the horizon nothing is looked at.
    assert fits(pool_of(6, [long]), demand, 0, 4)


def test_without_a_slot_or_with_less_than_the_prompt_there_is_no_room() -> None:
    demand = Demand(8, 4, 4)
    assert fits(pool_of(3, []), demand, 0, 512)
    assert not fits(pool_of(2, []), demand, 0, 512)
    assert not fits(pool_of(3, [], slots_free=0), demand, 0, 512)
    assert fits(pool_of(2, []), demand, 1, 512)


def test_what_is_larger_than_the_pool_is_never_held() -> None:
    pool = pool_of(10, [], num_blocks=10)
    assert can_ever_hold(pool, Demand(30, 5, 10))
    assert not can_ever_hold(pool, Demand(30, 5, 11))
    assert not fits(pool, Demand(30, 1, 11), 0, 512)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 60), max_size=6), st.integers(1, 80), st.integers(8, 24))
def test_for_the_moment_of_admission_it_agrees_with_the_workers_scheduler(
    others: list[int], num_tokens: int, num_blocks: int
) -> None:
    world = World(num_blocks, token_budget=64, max_num_seqs=4)
    taken = sum(world.scheduler.reserve(make(f"other-{i}", n)) is not None for i, n in enumerate(others))
    size = world.blocks.block_size
    pool = PoolState(
        worker_id="decode-0",
        block_size=size,
        num_blocks=num_blocks,
        available=world.blocks.num_free,
        slots_free=4 - taken,
        growing=taken,
        most_growth=0,
        sequences=(),
    )
    forecast = fits(pool, Demand(num_tokens, 1, 1), 0, 1)
    if can_ever_hold(pool, Demand(num_tokens, 1, 1)):
        assert forecast == (world.scheduler.reserve(make("new", num_tokens)) is not None)


def test_the_headroom_is_that_of_the_workers() -> None:
    default = SchedulerConfig(token_budget=1, max_num_seqs=1, max_waiting=1).headroom
    pool = pool_of(100, [], num_blocks=1000)._replace(growing=1)
    spare = round(default * 1000)
    assert fits(pool, Demand(4 * (100 - spare) - 1, 1, 1), 0, 1)
    assert not fits(pool, Demand(4 * (100 - spare) + 1, 1, 1), 0, 1)

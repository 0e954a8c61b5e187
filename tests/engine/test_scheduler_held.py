"""Sequences held back from a step: they keep their place and their blocks, and cost the others nothing."""

import random

from engine.sequence import SequenceStatus
from tests.support.scheduler_world import World


def scheduled(world: World, held: set[str]) -> dict[str, int]:
    """Tokens by sequence of a step with these held back; the step is then carried out."""
    schedule = world.scheduler.schedule(held)
    for item in schedule.items:
        world.scheduler.complete(item.seq, item.num_new_tokens)
    for item in schedule.items:
        if item.samples:
            world.end(item.seq)
    world.blocks.check_integrity()
    return {item.seq.seq_id: item.num_new_tokens for item in schedule.items}


def test_a_held_sequence_that_waits_is_passed_and_is_next_once_it_is_free() -> None:
    world = World(32, token_budget=16, max_num_seqs=1, prefill_only=True)
    for index, name in enumerate(("a", "b", "c")):
        world.add(name, 16, first=100 * index)
    assert scheduled(world, {"a"}) == {"b": 16}
    assert scheduled(world, set()) == {"a": 16}
    assert scheduled(world, set()) == {"c": 16}


def test_a_held_sequence_that_runs_keeps_its_blocks_and_leaves_budget_and_slot_to_others() -> None:
    world = World(32, token_budget=16, max_num_seqs=1, prefill_only=True)
    first = world.add("a", 40)
    world.add("b", 20, first=100)
    assert scheduled(world, set()) == {"a": 16}
    assert scheduled(world, {"a"}) == {"b": 16}
    assert first.status is SequenceStatus.RUNNING
    assert first.num_computed_tokens == 16
    assert len(world.blocks.block_table("a")) == 5


def test_sequences_that_come_back_together_do_not_take_more_slots_than_there_are() -> None:
    world = World(64, token_budget=16, max_num_seqs=2, prefill_only=True)
    names = [f"s{index}" for index in range(5)]
    held: set[str] = set()
    for index, name in enumerate(names):
        world.add(name, 18, first=100 * index)
        assert scheduled(world, held)[name] == 16
        held.add(name)
    assert scheduled(world, held) == {}
    for _ in names:
        assert len(scheduled(world, set())) <= 2
    assert not world.scheduler.running


def test_with_everybody_held_nothing_is_scheduled_and_nobody_is_lost() -> None:
    world = World(32, token_budget=16, prefill_only=True)
    world.add("a", 40)
    world.add("b", 8, first=100)
    scheduled(world, {"b"})
    assert not world.scheduler.schedule({"a", "b"})
    assert [seq.seq_id for seq in world.scheduler.waiting + world.scheduler.running] == ["b", "a"]
    assert scheduled(world, set()) == {"a": 16}


def test_whoever_is_held_at_random_all_finish_when_no_one_is_held_for_good() -> None:
    rng = random.Random(5)
    world = World(24, token_budget=24, max_num_seqs=3, prefill_only=True)
    waiting = {f"s{index}" for index in range(20)}
    for name in sorted(waiting):
        world.add(name, rng.randrange(1, 60), first=rng.randrange(3))
    for _ in range(400):
        alive = {seq.seq_id for seq in world.scheduler.waiting + world.scheduler.running}
        if not alive:
            break
        held = {name for name in alive if rng.random() < 0.5}
        got = scheduled(world, held)
        assert not held & set(got)
    assert not world.scheduler.waiting
    assert not world.scheduler.running
    assert world.blocks.usage().available == 24

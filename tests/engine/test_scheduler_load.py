"""Many sequences on a small pool: nothing is stuck, and little is computed twice."""

import random

import pytest

from tests.support.scheduler_world import BLOCK, World, make


def mixed_lengths(draw: random.Random, count: int) -> list[tuple[int, int]]:
    return [(draw.randint(1, 200), draw.randint(1, 100)) for _ in range(count)]


def test_sixteen_long_answers_in_room_for_four_all_finish() -> None:
    world = World(4 * 15, max_num_seqs=16, headroom=0.0)
    draw = random.Random(3)
    seqs = [world.add(str(i), 20, max_tokens=100, first=1000 * i) for i in range(16)]
    world.run(draw=draw)
    assert all(seq.num_output_tokens == 100 for seq in seqs)
    assert world.scheduler.preemptions > 0
    assert world.blocks.usage().available == world.blocks.num_blocks


@pytest.mark.parametrize("seed", range(2))
def test_a_pool_for_a_third_of_the_worst_case_preempts_little_and_loses_little(seed: int) -> None:
    lengths = mixed_lengths(random.Random(seed), 100)
    num_blocks = int(0.3 * 16 * 300 / BLOCK)
    world = World(num_blocks, max_num_seqs=16)
    for i, (prompt, answer) in enumerate(lengths):
        world.add(str(i), prompt, max_tokens=answer, first=1000 * i)
    world.run(draw=random.Random(seed))
    assert world.scheduler.preemptions < 0.1 * len(lengths)
    # An oracle that knows all lengths and reserves each whole: the classic way never to preempt.
    oracle = World(num_blocks, max_num_seqs=16)
    todo = [make(str(i), p, max_tokens=a, first=1000 * i) for i, (p, a) in enumerate(lengths)]
    draw = random.Random(seed)
    while todo or oracle.scheduler.running:
        held = sum(-(-seq.max_total_tokens // BLOCK) for seq in oracle.scheduler.running)
        while todo and len(oracle.scheduler.running) + len(oracle.scheduler.waiting) < 16:
            held += -(-todo[0].max_total_tokens // BLOCK)
            if held > num_blocks:
                break
            oracle.scheduler.add(todo.pop(0))
        oracle.step(draw)
    assert world.steps <= oracle.steps / 0.8

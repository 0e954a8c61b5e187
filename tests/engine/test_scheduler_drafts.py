"""Guessing ahead takes what nobody needs: budget left over, and free blocks."""

from collections.abc import Iterator

import pytest

from engine.scheduler import Schedule, SchedulerConfig
from engine.sequence import SamplingParams, Sequence, TokenSample
from tests.support.scheduler_world import BLOCK, World


def repeating(seq_id: str, tokens: int, max_tokens: int = 50, period: int = 4) -> Sequence:
    """A sequence whose prompt goes round in a circle, so that it has guesses."""
    prompt = [i % period + 1 for i in range(tokens)]
    return Sequence(seq_id, prompt, SamplingParams(max_tokens=max_tokens), max_context_tokens=1000)


def drafts(schedule: Schedule) -> dict[str, int]:
    return {item.seq.seq_id: len(item.draft_token_ids) for item in schedule.items if item.draft_token_ids}


def decoding(world: World, *seqs: Sequence) -> None:
    """Bring sequences to where each has one token to compute, the one that their circle goes on with."""
    for seq in seqs:
        world.scheduler.add(seq)
    while any(seq.num_tokens_to_compute != 1 for seq in seqs):
        for item in world.scheduler.schedule().items:
            if item.samples:
                item.seq.append_token(TokenSample(item.seq.token_ids[-4]))
            world.scheduler.complete(item.seq, item.num_new_tokens - len(item.draft_token_ids))


def test_a_decoding_sequence_covers_its_token_and_its_guesses() -> None:
    world = World(20, speculative_tokens=3)
    decoding(world, seq := repeating("a", 12))
    (item,) = world.scheduler.schedule().items
    assert (item.start, item.num_new_tokens, item.end, item.samples) == (12, 4, 16, True)
    assert item.draft_token_ids == (2, 3, 4)
    assert len(item.block_table) == 2
    assert seq.num_tokens == 13


def test_without_the_option_nobody_guesses() -> None:
    world = World(20)
    decoding(world, seq := repeating("a", 12))
    (item,) = world.scheduler.schedule().items
    assert (item.num_new_tokens, item.draft_token_ids, seq.drafter) == (1, (), None)


def test_a_prompt_is_never_guessed_at() -> None:
    world = World(20, token_budget=10, max_num_seqs=2, speculative_tokens=3)
    world.scheduler.add(repeating("a", 17))
    assert drafts(world.scheduler.schedule()) == {}


def test_guesses_get_the_budget_that_chunks_and_newcomers_leave() -> None:
    world = World(60, token_budget=24, max_num_seqs=3, speculative_tokens=8)
    decoding(world, repeating("a", 8), repeating("b", 8))
    world.add("c", 60, first=500)
    schedule = world.scheduler.schedule()
    assert [(item.seq.seq_id, item.num_new_tokens) for item in schedule.items] == [("a", 7), ("b", 1), ("c", 16)]
    assert schedule.num_tokens == 24


@pytest.mark.parametrize(("max_tokens", "context", "drafted"), [(2, 1000, 0), (3, 1000, 1), (50, 15, 1), (50, 14, 0)])
def test_no_guess_goes_beyond_the_last_token_that_may_be_sampled(max_tokens: int, context: int, drafted: int) -> None:
    world = World(20, speculative_tokens=8)
    seq = Sequence("a", [1, 2, 3, 4] * 3, SamplingParams(max_tokens=max_tokens), max_context_tokens=context)
    decoding(world, seq)
    assert sum(drafts(world.scheduler.schedule()).values()) == drafted


def test_blocks_taken_for_wrong_guesses_go_back_with_the_step() -> None:
    world = World(20, speculative_tokens=8)
    decoding(world, seq := repeating("a", BLOCK - 1))
    free = world.blocks.num_free
    (item,) = world.scheduler.schedule().items
    assert item.draft_token_ids
    assert world.blocks.num_free == free - 1
    seq.append_token(TokenSample(99))
    world.scheduler.complete(seq, 1)
    # The sequence has nine tokens now, so the block is its own.
    assert (seq.num_tokens, list(seq.block_table)) == (BLOCK + 1, world.blocks.block_table("a"))
    assert world.blocks.num_free == free - 1
    world = World(20, speculative_tokens=8)
    decoding(world, seq := repeating("a", BLOCK - 2))
    free = world.blocks.num_free
    world.scheduler.schedule()
    assert world.blocks.num_free == free - 1
    seq.append_token(TokenSample(99))
    world.scheduler.complete(seq, 1)
    assert world.blocks.num_free == free
    assert list(seq.block_table) == world.blocks.block_table("a")
    world.blocks.check_integrity()


def test_right_guesses_count_and_fill_blocks_that_can_be_shared() -> None:
    world = World(20, speculative_tokens=5)
    decoding(world, seq := repeating("a", 12))
    (item,) = world.scheduler.schedule().items
    for token in (*item.draft_token_ids, 77):
        seq.append_token(TokenSample(token))
    world.scheduler.complete(seq, item.num_new_tokens)
    assert seq.num_computed_tokens == seq.num_tokens - 1 == 12 + item.num_new_tokens
    assert world.blocks.match_prefix(seq.block_hashes, seq.token_ids) == 2


def test_a_block_with_a_wrong_guess_is_not_offered_before_it_is_overwritten() -> None:
    world = World(20, speculative_tokens=5)
    decoding(world, seq := repeating("a", 12))
    (item,) = world.scheduler.schedule().items
    assert item.end >= 2 * BLOCK, "the step fills the block"
    seq.append_token(TokenSample(77))
    world.scheduler.complete(seq, 1)
    seq.extend_hashes(world.scheduler._hasher)
    assert world.blocks.match_prefix(seq.block_hashes, seq.token_ids) == 1
    assert seq.num_stored_blocks == 1


def test_nothing_cached_is_evicted_for_a_guess() -> None:
    world = World(4, speculative_tokens=8)
    world.add("old", 2 * BLOCK, max_tokens=1, first=500)
    world.run()
    assert world.blocks.usage().cached == 2
    decoding(world, seq := repeating("a", BLOCK - 3, max_tokens=20), other := repeating("b", 4, max_tokens=2))
    assert (world.blocks.num_free, world.blocks.usage().cached) == (0, 2)
    world.blocks.take_events()
    (item, _) = world.scheduler.schedule().items
    assert len(item.draft_token_ids) == BLOCK - seq.num_tokens, "guesses fit into the block it has"
    assert world.blocks.take_events() == []
    assert other.num_tokens == 5


def always_new() -> Iterator[int]:
    """A text that looks like repeating itself at each third token and never does: 7 7 101 7 7 102 ..."""
    number = 100
    while True:
        number += 1
        yield from (7, 7, number)


def test_wrong_guesses_change_no_decision() -> None:
    """The same crowd on the same small pool with and without: same steps, preemptions, cached blocks."""
    told = []
    num_drafted = 0
    for speculative_tokens in (0, 4):
        world = World(14, token_budget=24, max_num_seqs=5, headroom=0.0, speculative_tokens=speculative_tokens)
        voices = {}
        for i in range(8):
            voice = voices[f"s{i}"] = always_new()
            prompt = [300 + i, *(next(voice) for _ in range(5 + 3 * i))]
            world.scheduler.add(Sequence(f"s{i}", prompt, SamplingParams(max_tokens=30), max_context_tokens=1000))
        story = []
        while world.scheduler.running or world.scheduler.waiting:
            schedule = world.scheduler.schedule()
            num_drafted += sum(drafts(schedule).values())
            ended = []
            for item in schedule.items:
                if item.samples and item.seq.append_token(TokenSample(next(voices[item.seq.seq_id]))):
                    ended.append(item.seq)
                world.scheduler.complete(item.seq, item.num_new_tokens - len(item.draft_token_ids))
                assert list(item.seq.block_table) == world.blocks.block_table(item.seq.seq_id)
            for seq in ended:
                world.end(seq)
            world.blocks.check_integrity()
            starts = [(item.seq.seq_id, item.start) for item in schedule.items]
            preempted = [seq.seq_id for seq in schedule.preempted]
            story.append((starts, preempted, world.blocks.take_events()))
        told.append(story)
        assert world.scheduler.preemptions > 3
    assert num_drafted > 20
    assert told[0] == told[1]


def test_a_prefill_worker_cannot_be_told_to_guess() -> None:
    with pytest.raises(ValueError, match="speculative_tokens"):
        SchedulerConfig(8, 4, 4, prefill_only=True, speculative_tokens=2)
    with pytest.raises(ValueError, match="speculative_tokens"):
        SchedulerConfig(8, 4, 4, speculative_tokens=-1)

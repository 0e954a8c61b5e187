"""The prefix cache behind the block manager: what is matched, what is evicted, and the events that tell of it."""

import pytest

from kv_cache.block_manager import BlockEvent, BlockManager, BlockStateError, Resync
from tests.support.blocks import SIZE, names, open_sequence, usage


def test_a_stored_prefix_is_found_after_its_sequence_ended() -> None:
    manager = BlockManager(8, SIZE)
    tokens = list(range(10))
    first = open_sequence(manager, "a", tokens)
    manager.free("a")
    assert usage(manager) == (6, 2, 0, 0)
    assert manager.match_prefix(names(tokens), tokens) == 2
    second = manager.allocate("b", 10, names(tokens), tokens)
    assert second is not None
    assert second.cached_blocks == 2
    assert second.block_table[:2] == first.block_table[:2]
    assert usage(manager) == (5, 0, 3, 0)


def test_a_block_that_others_match_while_it_is_held_counts_as_used_once() -> None:
    manager = BlockManager(8, SIZE)
    tokens = list(range(8))
    open_sequence(manager, "a", tokens)
    manager.allocate("b", 8, names(tokens), tokens)
    assert usage(manager) == (6, 0, 2, 0)
    manager.free("a")
    assert usage(manager) == (6, 0, 2, 0)
    manager.free("b")
    assert usage(manager) == (6, 2, 0, 0)


def test_a_match_is_never_longer_than_the_full_blocks_of_the_prompt() -> None:
    manager = BlockManager(8, SIZE)
    tokens = list(range(3 * SIZE))
    open_sequence(manager, "a", tokens)
    for length in range(1, 3 * SIZE + 1):
        prompt = tokens[:length]
        # Even with the names of blocks that lie past the prompt's end.
        assert manager.match_prefix(names(tokens), prompt) == length // SIZE
        allocation = manager.allocate("b", length, names(tokens), prompt, max_cached_blocks=(length - 1) // SIZE)
        assert allocation is not None
        assert allocation.cached_blocks * SIZE < length
        manager.free("b")


def test_an_allocation_never_has_more_cached_blocks_than_its_tokens_fill() -> None:
    manager = BlockManager(8, SIZE)
    tokens = list(range(3 * SIZE))
    open_sequence(manager, "a", tokens)
    allocation = manager.allocate("b", 6, names(tokens), tokens)
    assert allocation is not None
    assert (allocation.cached_blocks, len(allocation.block_table)) == (1, 2)


def test_nothing_matches_when_prefix_caching_is_off() -> None:
    manager = BlockManager(4, SIZE, prefix_caching=False)
    tokens = list(range(8))
    manager.allocate("a", 8, names(tokens), tokens)
    assert not manager.store("a", 0, names(tokens)[0], tokens[:4])
    assert manager.match_prefix(names(tokens), tokens) == 0
    manager.free("a")
    assert usage(manager) == (4, 0, 0, 0)


def test_a_colliding_hash_never_yields_another_block() -> None:
    manager = BlockManager(8, SIZE)
    same = [b"x", b"x"]
    manager.allocate("a", 8, same, [1] * 8)
    assert manager.store("a", 0, b"x", [1] * 4)
    assert not manager.store("a", 1, b"x", [2] * 4)
    assert manager.match_prefix(same, [2] * 8) == 0
    assert manager.match_prefix(same, [1] * 8) == 1  # The child's name leads to a block with another parent.
    allocation = manager.allocate("b", 8, same, [2] * 8)
    assert allocation is not None
    assert allocation.cached_blocks == 0
    assert not manager.store("b", 0, b"x", [2] * 4)
    assert not manager.store("b", 1, b"y", [3] * 4)  # Its parent is not in the index.
    assert usage(manager) == (4, 0, 4, 0)


def test_equal_tokens_under_another_parent_do_not_match_even_with_the_same_hash() -> None:
    manager = BlockManager(8, SIZE)
    manager.allocate("a", 8, [], [])
    manager.store("a", 0, b"p", [1] * 4)
    manager.store("a", 1, b"c", [7] * 4)
    manager.allocate("b", 8, [], [])
    manager.store("b", 0, b"q", [2] * 4)
    assert not manager.store("b", 1, b"c", [7] * 4)
    assert manager.match_prefix([b"q", b"c"], [2] * 4 + [7] * 4) == 1
    assert manager.match_prefix([b"p", b"c"], [1] * 4 + [7] * 4) == 2
    assert manager.match_prefix([b"c"], [7] * 4) == 0


def test_the_oldest_leaf_is_evicted_first() -> None:
    manager = BlockManager(6, SIZE)
    old, young = list(range(12)), list(range(100, 112))
    open_sequence(manager, "old", old)
    open_sequence(manager, "young", young)
    manager.free("old")
    manager.free("young")
    assert usage(manager) == (0, 6, 0, 0)
    for seq_id, left in (("x", 2), ("y", 1), ("z", 0)):
        manager.allocate(seq_id, 1, [], [])
        assert manager.match_prefix(names(old), old) == left
        assert manager.match_prefix(names(young), young) == 3
        manager.check_integrity()


def test_use_makes_a_prefix_young_again() -> None:
    manager = BlockManager(4, SIZE)
    first, second = list(range(8)), list(range(100, 108))
    open_sequence(manager, "first", first)
    open_sequence(manager, "second", second)
    manager.free("first")
    manager.free("second")
    manager.allocate("again", 8, names(first), first)
    manager.free("again")
    manager.allocate("other", 8, [], [])
    assert manager.match_prefix(names(first), first) == 2
    assert manager.match_prefix(names(second), second) == 0


def test_a_shared_parent_outlives_its_children_whoever_is_freed_last() -> None:
    system, tails = list(range(4)), ([10] * 4, [20] * 4)
    for order in (("a", "b"), ("b", "a")):
        manager = BlockManager(3, SIZE)
        for seq_id, tail in zip("ab", tails, strict=True):
            open_sequence(manager, seq_id, system + tail)
        for seq_id in order:
            manager.free(seq_id)
        manager.allocate("x", 8, [], [])
        assert manager.match_prefix(names(system), system) == 1
        manager.check_integrity()


def test_allocation_does_not_evict_the_prefix_it_matched() -> None:
    manager = BlockManager(5, SIZE)
    old, young = list(range(8)), list(range(100, 108))
    first = open_sequence(manager, "old", old)
    open_sequence(manager, "young", young)
    manager.free("old")
    manager.free("young")
    longer = [*old, *[9] * 8]
    # One block is free and one must be evicted; the matched prefix is the oldest in the cache.
    allocation = manager.allocate("b", 16, names(longer), longer)
    assert allocation is not None
    assert allocation.cached_blocks == 2
    assert allocation.block_table[:2] == first.block_table
    assert len(set(allocation.block_table)) == 4
    assert manager.match_prefix(names(young), young) == 1
    assert usage(manager) == (0, 1, 4, 0)


def test_a_refused_allocation_changes_nothing_at_all() -> None:
    manager = BlockManager(4, SIZE)
    tokens = list(range(12))
    open_sequence(manager, "a", tokens)
    manager.free("a")
    manager.allocate("b", 4, [], [])
    manager.take_events()
    longer = tokens + [9] * 8
    assert manager.allocate("c", 20, names(longer), longer) is None
    assert "c" not in manager
    assert usage(manager) == (0, 3, 1, 0)
    assert manager.take_events() == []
    # The order of eviction is as before too: the leaf goes first.
    manager.allocate("d", 1, [], [])
    assert manager.match_prefix(names(tokens), tokens) == 2


def test_a_prefix_evicted_between_the_look_and_the_allocation_only_shortens_the_hit() -> None:
    manager = BlockManager(6, SIZE)
    tokens = list(range(16))
    open_sequence(manager, "a", tokens)
    manager.free("a")
    assert manager.match_prefix(names(tokens), tokens) == 4
    manager.allocate("thief", 16, [], [])
    allocation = manager.allocate("b", 16, names(tokens), tokens)
    assert allocation is None
    allocation = manager.allocate("c", 8, names(tokens), tokens)
    assert allocation is not None
    assert allocation.cached_blocks == 2


def test_two_sequences_that_compute_the_same_prompt_at_once_leave_one_copy() -> None:
    manager = BlockManager(8, SIZE)
    tokens = list(range(8))
    for seq_id in ("a", "b"):
        manager.allocate(seq_id, 8, names(tokens), tokens)
    for seq_id in ("a", "b"):
        for index in (0, 1):
            assert manager.store(seq_id, index, names(tokens)[index], tokens[index * 4 : index * 4 + 4])
    assert usage(manager) == (4, 0, 4, 0)
    # The one that is matched goes first: the other one takes its place, and its blocks are free at once.
    kept = manager.block_table("b").copy()
    manager.free("a")
    assert usage(manager) == (6, 0, 2, 0)
    allocation = manager.allocate("c", 8, names(tokens), tokens)
    assert allocation is not None
    assert list(allocation.block_table) == kept
    manager.free("b")
    manager.free("c")
    assert usage(manager) == (6, 2, 0, 0)


def test_a_sequence_whose_prompt_was_also_computed_elsewhere_still_caches_what_follows() -> None:
    manager = BlockManager(8, SIZE)
    shared = list(range(4))
    for seq_id in ("a", "b"):
        manager.allocate(seq_id, 8, names(shared), shared)
        manager.store(seq_id, 0, names(shared)[0], shared)
    answer = shared + [50] * 4
    assert manager.store("b", 1, names(answer)[1], [50] * 4)
    manager.free("a")
    manager.free("b")
    assert manager.match_prefix(names(answer), answer) == 2
    assert usage(manager) == (6, 2, 0, 0)


def test_recomputed_blocks_replace_the_cached_ones() -> None:
    manager = BlockManager(4, SIZE)
    tokens = list(range(8))
    old = open_sequence(manager, "a", tokens).block_table
    manager.free("a")
    manager.take_events()
    allocation = manager.allocate("b", 8, names(tokens), tokens, max_cached_blocks=0)
    assert allocation is not None
    assert allocation.cached_blocks == 0
    assert not set(allocation.block_table) & set(old)
    assert usage(manager) == (0, 2, 2, 0)
    for index, left in ((0, 1), (1, 0)):
        assert manager.store("b", index, names(tokens)[index], tokens[index * SIZE : (index + 1) * SIZE])
        assert usage(manager) == (2 - left, left, 2, 0)
    assert manager.match_prefix(names(tokens), tokens) == 2
    assert manager.take_events() == []


def test_storing_a_block_again_is_harmless_and_with_another_content_an_error() -> None:
    manager = BlockManager(4, SIZE)
    open_sequence(manager, "a", list(range(4)))
    assert manager.store("a", 0, names(list(range(4)))[0], list(range(4)))
    with pytest.raises(BlockStateError, match="already stored with another content"):
        manager.store("a", 0, b"other", list(range(4)))
    with pytest.raises(BlockStateError, match="has 1 blocks, no block 1"):
        manager.store("a", 1, b"other", list(range(4)))
    with pytest.raises(BlockStateError, match="no block -1"):
        manager.store("a", -1, b"other", list(range(4)))
    with pytest.raises(ValueError, match="4 tokens, not 3"):
        manager.store("a", 0, b"other", [1, 2, 3])
    assert usage(manager) == (3, 0, 1, 0)


def test_events_tell_what_was_stored_and_removed_in_order() -> None:
    manager = BlockManager(2, SIZE)
    tokens = list(range(8))
    open_sequence(manager, "a", tokens)
    parent, child = names(tokens)
    assert manager.take_events() == [BlockEvent(parent, removed=False), BlockEvent(child, removed=False)]
    assert manager.take_events() == []
    manager.free("a")
    manager.allocate("b", 8, [], [])
    assert manager.take_events() == [BlockEvent(child, removed=True), BlockEvent(parent, removed=True)]


def test_the_snapshot_names_parents_before_children() -> None:
    manager = BlockManager(8, SIZE)
    tokens = list(range(12))
    open_sequence(manager, "a", tokens)
    assert manager.snapshot_hashes() == names(tokens)
    manager.free("a")
    assert manager.snapshot_hashes() == names(tokens)


def test_events_that_nobody_takes_are_bounded_and_leave_a_marker() -> None:
    manager = BlockManager(4, SIZE, max_events=3)
    for start in range(0, 4000, 100):
        open_sequence(manager, "a", list(range(start, start + 8)))
        manager.free("a")
    assert len(manager._index._events) <= 3
    assert manager.take_events() is Resync.NEEDED
    known = set(manager.snapshot_hashes())
    # Events go on from the snapshot.
    open_sequence(manager, "b", list(range(4)))
    events = manager.take_events()
    assert isinstance(events, list)
    for name, removed in events:
        (known.discard if removed else known.add)(name)
    assert known == set(manager.snapshot_hashes())


def test_a_full_event_log_without_loss_is_delivered() -> None:
    manager = BlockManager(4, SIZE, max_events=2)
    open_sequence(manager, "a", list(range(8)))
    events = manager.take_events()
    assert isinstance(events, list)
    assert len(events) == 2

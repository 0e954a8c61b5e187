"""The block manager's tables, forks and quarantine. test_block_manager_model.py looks for what these cases miss."""

import pytest

from kv_cache.block_manager import (
    BlockCopy,
    BlockManager,
    BlockStateError,
    PoolUsage,
    SequenceExistsError,
    UnknownQuarantineError,
    UnknownSequenceError,
    WritableBlock,
)
from tests.support.blocks import SIZE, names, open_sequence, usage


def test_a_fresh_pool_is_free() -> None:
    manager = BlockManager(8, SIZE)
    assert manager.usage() == PoolUsage(total=8, free=8, cached=0, used=0, quarantined=0)
    assert manager.usage().available == 8
    assert manager.can_allocate(8)
    assert not manager.can_allocate(9)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 4), (4, 0), (-1, 4)])
def test_a_pool_without_blocks_or_tokens_is_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match=f"{num_blocks} blocks of {block_size} tokens"):
        BlockManager(num_blocks, block_size)


def test_a_table_covers_its_tokens_and_no_more() -> None:
    manager = BlockManager(8, SIZE)
    for seq_id, num_tokens, num_blocks in (("a", 1, 1), ("b", 4, 1), ("c", 5, 2)):
        allocation = manager.allocate(seq_id, num_tokens, [], [])
        assert allocation is not None
        assert len(allocation.block_table) == num_blocks
        assert manager.block_table(seq_id) == list(allocation.block_table)
    assert usage(manager) == (4, 0, 4, 0)


def test_append_grows_the_live_table_only_when_a_block_is_full() -> None:
    manager = BlockManager(3, SIZE)
    manager.allocate("a", 3, [], [])
    table = manager.block_table("a")
    assert manager.append("a", 4)
    assert len(table) == 1
    assert manager.append("a", 5)
    assert len(table) == 2
    assert manager.append("a", 1)
    assert len(table) == 2
    assert not manager.append("a", 13)
    assert len(table) == 2
    assert manager.append("a", 12)
    assert usage(manager) == (0, 0, 3, 0)


def test_append_evicts_when_nothing_is_free() -> None:
    manager = BlockManager(3, SIZE)
    tokens = list(range(8))
    open_sequence(manager, "a", tokens)
    manager.free("a")
    manager.allocate("b", 4, [], [])
    assert not manager.append("b", 13)
    assert manager.append("b", 12)
    assert usage(manager) == (0, 0, 3, 0)
    assert manager.match_prefix(names(tokens), tokens) == 0


def test_trim_gives_back_the_blocks_behind_its_tokens() -> None:
    manager = BlockManager(6, SIZE)
    tokens = list(range(6))
    open_sequence(manager, "a", tokens)
    table = manager.block_table("a")
    kept = table.copy()
    assert manager.append("a", 17)
    assert (len(table), manager.num_free) == (5, 1)
    manager.trim("a", 6)
    assert table == kept
    assert manager.num_free == 4
    manager.trim("a", 8)
    assert table == kept
    manager.check_integrity()
    manager.free("a")
    assert manager.num_free == 5, "the full block stays cached"
    manager.check_integrity()


def test_a_block_that_somebody_counts_on_is_not_trimmed() -> None:
    manager = BlockManager(6, SIZE)
    open_sequence(manager, "a", list(range(9)))
    for shared in (False, True):
        if shared:
            manager.fork("a", "b")
        before = usage(manager)
        with pytest.raises(BlockStateError, match="stored or shared"):
            manager.trim("a", 8 if shared else 4)
        assert usage(manager) == before
        assert len(manager.block_table("a")) == 3


def test_a_fork_shares_every_block_until_it_writes() -> None:
    manager = BlockManager(4, SIZE)
    tokens = list(range(6))
    allocation = open_sequence(manager, "a", tokens)
    manager.fork("a", "b")
    assert manager.block_table("b") == list(allocation.block_table)
    assert usage(manager) == (2, 0, 2, 0)
    written = manager.make_writable("b", 1)
    assert written is not None
    assert written.copy == BlockCopy(source=allocation.block_table[1], destination=written.block_id)
    assert manager.block_table("b") == [allocation.block_table[0], written.block_id]
    assert manager.block_table("a") == list(allocation.block_table)
    assert manager.make_writable("a", 1) == WritableBlock(allocation.block_table[1], None)
    assert usage(manager) == (1, 0, 3, 0)
    manager.free("a")
    manager.free("b")
    assert usage(manager) == (3, 1, 0, 0)


def test_growth_of_a_fork_leaves_the_other_table_alone() -> None:
    manager = BlockManager(4, SIZE)
    manager.allocate("a", 4, [], [])
    manager.fork("a", "b")
    assert manager.append("b", 5)
    assert len(manager.block_table("a")) == 1


def test_copy_on_write_waits_when_the_pool_is_full() -> None:
    manager = BlockManager(1, SIZE)
    manager.allocate("a", 2, [], [])
    manager.fork("a", "b")
    assert manager.make_writable("b", 0) is None
    assert manager.block_table("b") == manager.block_table("a")
    manager.free("a")
    assert manager.make_writable("b", 0) == WritableBlock(0, None)


def test_writing_into_a_stored_block_keeps_the_stored_content() -> None:
    manager = BlockManager(2, SIZE)
    tokens = list(range(4))
    allocation = open_sequence(manager, "a", tokens)
    written = manager.make_writable("a", 0)
    assert written is not None
    assert written.copy == BlockCopy(allocation.block_table[0], written.block_id)
    assert usage(manager) == (0, 1, 1, 0)
    assert manager.match_prefix(names(tokens), tokens) == 1


def test_writing_before_a_stored_or_shared_block_is_refused() -> None:
    manager = BlockManager(8, SIZE)
    open_sequence(manager, "a", list(range(8)))
    with pytest.raises(BlockStateError, match="rests on block"):
        manager.make_writable("a", 0)
    manager.allocate("b", 8, [], [])
    manager.fork("b", "c")
    with pytest.raises(BlockStateError, match="rests on block"):
        manager.make_writable("c", 0)
    assert usage(manager) == (4, 0, 4, 0)


def test_quarantined_blocks_are_untouchable_until_released() -> None:
    manager = BlockManager(4, SIZE)
    allocation = manager.allocate("receiving", 12, [], [])
    assert allocation is not None
    quarantine_id = manager.quarantine("receiving")
    assert "receiving" not in manager
    assert usage(manager) == (1, 0, 0, 3)
    assert not manager.can_allocate(2)
    assert manager.allocate("b", 8, [], []) is None
    other = manager.allocate("c", 4, [], [])
    assert other is not None
    assert not set(other.block_table) & set(allocation.block_table)
    manager.release_quarantine(quarantine_id)
    assert usage(manager) == (3, 0, 1, 0)
    with pytest.raises(UnknownQuarantineError, match=f"no quarantine {quarantine_id}"):
        manager.release_quarantine(quarantine_id)


def test_a_cached_prefix_of_a_quarantined_sequence_can_be_matched_and_returns_to_the_cache() -> None:
    manager = BlockManager(5, SIZE)
    tokens = list(range(8))
    open_sequence(manager, "a", tokens)
    manager.free("a")
    manager.allocate("receiving", 16, names(tokens), tokens)
    quarantine_id = manager.quarantine("receiving")
    assert usage(manager) == (1, 0, 0, 4)
    allocation = manager.allocate("b", 8, names(tokens), tokens)
    assert allocation is not None
    assert allocation.cached_blocks == 2
    assert usage(manager) == (1, 0, 2, 2)
    manager.free("b")
    assert usage(manager) == (1, 0, 0, 4)
    manager.release_quarantine(quarantine_id)
    assert usage(manager) == (3, 2, 0, 0)


def test_a_quarantined_block_that_another_sequence_shares_stays_out_of_reach_when_that_one_ends() -> None:
    manager = BlockManager(4, SIZE)
    manager.allocate("a", 8, [], [])
    manager.fork("a", "b")
    quarantine_id = manager.quarantine("a")
    assert usage(manager) == (2, 0, 2, 0)
    manager.free("b")
    assert usage(manager) == (2, 0, 0, 2)
    manager.release_quarantine(quarantine_id)
    assert usage(manager) == (4, 0, 0, 0)


def test_releasing_a_quarantine_leaves_a_block_to_the_sequence_that_shares_it() -> None:
    manager = BlockManager(4, SIZE)
    manager.allocate("a", 8, [], [])
    manager.fork("a", "b")
    quarantine_id = manager.quarantine("a")
    manager.release_quarantine(quarantine_id)
    assert usage(manager) == (2, 0, 2, 0)
    manager.free("b")
    assert usage(manager) == (4, 0, 0, 0)


def test_a_block_that_is_also_in_quarantine_is_copied_before_it_is_written() -> None:
    manager = BlockManager(4, SIZE)
    manager.allocate("a", 2, [], [])
    manager.fork("a", "b")
    (shared,) = manager.block_table("b")
    quarantine_id = manager.quarantine("a")
    written = manager.make_writable("b", 0)
    assert written is not None
    assert written.copy == BlockCopy(shared, written.block_id)
    assert usage(manager) == (2, 0, 1, 1)
    manager.release_quarantine(quarantine_id)
    assert usage(manager) == (3, 0, 1, 0)


def test_a_block_may_be_in_two_quarantines() -> None:
    manager = BlockManager(2, SIZE)
    manager.allocate("a", 4, [], [])
    manager.fork("a", "b")
    first, second = manager.quarantine("a"), manager.quarantine("b")
    assert usage(manager) == (1, 0, 0, 1)
    manager.release_quarantine(second)
    assert usage(manager) == (1, 0, 0, 1)
    manager.release_quarantine(first)
    assert usage(manager) == (2, 0, 0, 0)


def test_calls_that_make_no_sense_raise_and_change_nothing() -> None:
    manager = BlockManager(4, SIZE)
    manager.allocate("a", 4, [], [])
    with pytest.raises(SequenceExistsError, match="'a'"):
        manager.allocate("a", 4, [], [])
    with pytest.raises(SequenceExistsError, match="'a'"):
        manager.fork("a", "a")
    with pytest.raises(ValueError, match="at least one token, not 0"):
        manager.allocate("b", 0, [], [])
    assert usage(manager) == (3, 0, 1, 0)
    manager.free("a")
    for call in (manager.free, manager.quarantine, manager.block_table, lambda seq_id: manager.trim(seq_id, 1)):
        with pytest.raises(UnknownSequenceError, match="'a'"):
            call("a")
    with pytest.raises(UnknownSequenceError):
        manager.append("a", 5)
    with pytest.raises(UnknownSequenceError):
        manager.fork("a", "b")
    assert usage(manager) == (4, 0, 0, 0)

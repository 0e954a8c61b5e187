"""Shorthand for tests of the block manager: sequences computed in one call, usage as a tuple."""

from kv_cache.block_hash import BlockHash, hash_blocks
from kv_cache.block_manager import Allocation, BlockManager

SIZE = 4
ROOT = b"root"


def names(tokens: list[int]) -> list[BlockHash]:
    """The chain of hashes of these tokens, in blocks of `SIZE`."""
    return hash_blocks(ROOT, tokens, SIZE)


def open_sequence(manager: BlockManager, seq_id: str, tokens: list[int]) -> Allocation:
    """Allocate for all tokens and store every full block, as a worker does after it computed them."""
    allocation = manager.allocate(seq_id, len(tokens), names(tokens), tokens)
    assert allocation is not None
    for index, name in enumerate(names(tokens)):
        assert manager.store(seq_id, index, name, tokens[index * SIZE : (index + 1) * SIZE])
    return allocation


def usage(manager: BlockManager) -> tuple[int, int, int, int]:
    """(free, cached, used, quarantined), audited."""
    manager.check_integrity()
    now = manager.usage()
    return now.free, now.cached, now.used, now.quarantined

"""Who holds each block of the pool: free list, reference counts, quarantine, and the cache behind them.

A block is in exactly one state:

    FREE --take--> USED (in one or more block tables) --drop--> FREE, or CACHED when its content is indexed
                    |  ^                                          CACHED --hold--> USED, --take (evicted)--> USED
           quarantine  hold
                    v  |
                  QUARANTINED (only a quarantine holds it) --release--> FREE or CACHED

Tables and quarantines are counted apart. A block that both hold counts as used, and falls back to quarantined when the
last table drops it: a remote side may still touch it, whoever else has stopped using it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kv_cache.prefix_index import PrefixIndex


@dataclass(frozen=True, slots=True)
class PoolUsage:
    """Blocks by state; `free + cached + used + quarantined == total`."""

    total: int
    free: int
    cached: int
    used: int
    quarantined: int

    @property
    def available(self) -> int:
        """Blocks that can be taken now, counting those that would be evicted."""
        return self.free + self.cached


class BlockPool:
    """The blocks 0..num_blocks-1. Not thread-safe; owned by a `BlockManager`.

    Callers check `num_available` before `take` and pass only blocks that they hold. That is not checked here (these
    loops are the hot path); `integrity.check` finds it.
    """

    def __init__(self, num_blocks: int, index: PrefixIndex) -> None:
        self.num_blocks = num_blocks
        self.index = index
        # A stack that hands out ascending ids: neighbours in a table are neighbours in memory while the pool is fresh.
        self.free_list = list(range(num_blocks - 1, -1, -1))
        self.table_refs = [0] * num_blocks
        self.quarantine_refs = [0] * num_blocks
        self.num_used = 0
        self.num_quarantined = 0

    @property
    def num_available(self) -> int:
        """Blocks that `take` can deliver now: free ones and cached ones."""
        return len(self.free_list) + self.index.num_cached

    def usage(self) -> PoolUsage:
        """Blocks by state, now."""
        return PoolUsage(
            total=self.num_blocks,
            free=len(self.free_list),
            cached=self.index.num_cached,
            used=self.num_used,
            quarantined=self.num_quarantined,
        )

    def take(self, count: int) -> list[int]:
        """`count` blocks with one table reference each: free ones first, then evicted ones, oldest first."""
        free, refs = self.free_list, self.table_refs
        blocks = [free.pop() if free else self.index.evict() for _ in range(count)]
        for block in blocks:
            refs[block] = 1
        self.num_used += count
        return blocks

    def is_shared(self, block: int) -> bool:
        """Whether more than one table or quarantine holds the block."""
        return self.table_refs[block] + self.quarantine_refs[block] > 1

    def num_unheld(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` are cached, so that `hold` would make them unavailable."""
        unheld = self.index.unheld
        return sum(block in unheld for block in blocks)

    def hold(self, blocks: Iterable[int]) -> None:
        """One more table reference to each block; none of them is free."""
        refs, quarantined = self.table_refs, self.quarantine_refs
        for block in blocks:
            if not refs[block]:
                self.num_used += 1
                if quarantined[block]:
                    self.num_quarantined -= 1
                else:
                    self.index.hold(block)
            refs[block] += 1

    def drop(self, blocks: Sequence[int]) -> None:
        """One table reference less to each block of a table, last to first, so that leaves are evicted first."""
        refs, quarantined, free, let_go = self.table_refs, self.quarantine_refs, self.free_list, self.index.let_go
        for block in reversed(blocks):
            refs[block] -= 1
            if refs[block]:
                continue
            self.num_used -= 1
            if quarantined[block]:
                self.num_quarantined += 1
            elif not let_go(block):
                free.append(block)

    def quarantine(self, blocks: Sequence[int]) -> None:
        """Turn one table reference to each block into a quarantine reference."""
        refs, quarantined = self.table_refs, self.quarantine_refs
        for block in blocks:
            quarantined[block] += 1
            refs[block] -= 1
            if not refs[block]:
                self.num_used -= 1
                self.num_quarantined += 1

    def release_quarantine(self, blocks: Sequence[int]) -> None:
        """One quarantine reference less to each block, last to first as in `drop`."""
        refs, quarantined, free = self.table_refs, self.quarantine_refs, self.free_list
        for block in reversed(blocks):
            quarantined[block] -= 1
            if quarantined[block] or refs[block]:
                continue
            self.num_quarantined -= 1
            if not self.index.let_go(block):
                free.append(block)

    def reclaim(self, block: int) -> None:
        """Put a block that the index displaced on the free list; nobody holds it."""
        self.free_list.append(block)

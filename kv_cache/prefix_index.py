"""Which content is in which block, and which block goes next when room is needed.

The index is a forest of entries: an entry is a full block's content (hash, token ids, parent entry) and the block that
holds it, its home. Only the parent link and the token ids are believed, never the hash alone, so two contents with one
hash cannot be mixed up: the second one is not indexed.

Two sequences may compute the same content side by side. The second block is then noted as a *twin* of the entry: not
found by matching, but it takes over as home when the home is released first. Hence the rule that everything here rests
on: **an entry whose block somebody holds has a parent whose block somebody holds.** From it follows that

* every cached (unheld) entry can be evicted, so `num_cached` is an honest number;
* a released sequence lets go of its blocks last to first, so in order of release every cached entry comes after its
  cached children, and the oldest one is always a leaf: eviction is O(1) and keeps the forest closed.
"""

from collections import OrderedDict
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from kv_cache.block_hash import BlockHash


class BlockEvent(NamedTuple):
    """One change of the index: `hash` can now be matched here, or (`removed`) no longer."""

    hash: BlockHash
    removed: bool


class Resync(Enum):
    """Marker in place of events: some were dropped, only a snapshot tells the content now."""

    NEEDED = "needed"


class CachedBlock:
    """An entry of the index. Owned and changed by `PrefixIndex` alone; others read."""

    __slots__ = ("block_id", "hash", "num_children", "parent", "token_ids", "twins")

    def __init__(
        self, block_hash: BlockHash, token_ids: tuple[int, ...], parent: "CachedBlock | None", block_id: int
    ) -> None:
        self.hash = block_hash
        self.token_ids = token_ids
        self.parent = parent
        self.block_id = block_id
        self.num_children = 0
        self.twins: dict[int, None] = {}  # Held blocks with the same content, oldest first.


class PrefixIndex:
    """Content of `num_blocks` blocks. Not thread-safe; owned by a `BlockPool`, which says what is held."""

    def __init__(self, num_blocks: int, block_size: int, max_events: int) -> None:
        self.block_size = block_size
        self.entries: dict[BlockHash, CachedBlock] = {}
        self.entry_at: list[CachedBlock | None] = [None] * num_blocks  # By block id; twins too.
        self.unheld: OrderedDict[int, None] = OrderedDict()  # Homes nobody holds, next to evict first.
        self._events: list[BlockEvent] = []
        self._max_events = max_events
        self._events_lost = False

    @property
    def num_cached(self) -> int:
        """Blocks nobody holds whose content can still be matched."""
        return len(self.unheld)

    def match(self, hashes: Sequence[BlockHash], token_ids: Sequence[int], max_blocks: int) -> list[int]:
        """Homes of the longest indexed prefix, at most `max_blocks`, of the full blocks of `token_ids`.

        Believes the token ids and the parents, so wrong or colliding `hashes` only shorten the result. Pins nothing.
        """
        size = self.block_size
        blocks: list[int] = []
        parent: CachedBlock | None = None
        for index in range(min(max_blocks, len(hashes), len(token_ids) // size)):
            entry = self.entries.get(hashes[index])
            if entry is None or entry.parent is not parent:
                break
            if entry.token_ids != tuple(token_ids[index * size : (index + 1) * size]):
                break
            blocks.append(entry.block_id)
            parent = entry
        return blocks

    def add(
        self, block_id: int, block_hash: BlockHash, token_ids: tuple[int, ...], parent: CachedBlock | None
    ) -> int | None:
        """Index the content of a held, not yet indexed block. Returns a block that became free by it, if any.

        A new content makes the block its home. A known content makes it a twin, or, when nobody holds the present
        home, the home instead of it: the old home is returned. A colliding hash changes nothing.
        """
        entry = self.entries.get(block_hash)
        if entry is None:
            entry = CachedBlock(block_hash, token_ids, parent, block_id)
            self.entries[block_hash] = entry
            if parent is not None:
                parent.num_children += 1
            self._record(block_hash, removed=False)
        elif entry.token_ids != token_ids or entry.parent is not parent:
            return None
        elif entry.block_id not in self.unheld:
            entry.twins[block_id] = None
        else:
            displaced = entry.block_id
            del self.unheld[displaced]
            self.entry_at[displaced] = None
            entry.block_id = block_id
            self.entry_at[block_id] = entry
            return displaced
        self.entry_at[block_id] = entry
        return None

    def hold(self, block_id: int) -> None:
        """Somebody holds this block again: it cannot be evicted."""
        del self.unheld[block_id]

    def let_go(self, block_id: int) -> bool:
        """Nobody holds this block any more. True: it stays, cached. False: it is free and forgotten here.

        Call for a sequence's blocks last to first: that order is the order of eviction.
        """
        if self.detach(block_id):
            return False
        self.unheld[block_id] = None
        return True

    def detach(self, block_id: int) -> bool:
        """Make this held block an ordinary one, its content left to a twin if it had any.

        False, with nothing changed, when it is the only held block with its content.
        """
        entry = self.entry_at[block_id]
        if entry is None:
            return True
        if entry.block_id != block_id:
            del entry.twins[block_id]
        elif entry.twins:
            entry.block_id = next(iter(entry.twins))
            del entry.twins[entry.block_id]
        else:
            return False
        self.entry_at[block_id] = None
        return True

    def evict(self) -> int:
        """Forget the cached block released longest ago, always one without children. Returns it.

        Raises KeyError when nothing is cached.
        """
        block_id, _ = self.unheld.popitem(last=False)
        entry = self.entry_at[block_id]
        assert entry is not None, f"block {block_id} is cached but not indexed"
        assert entry.num_children == 0, f"block {block_id} would be evicted before its {entry.num_children} children"
        del self.entries[entry.hash]
        self.entry_at[block_id] = None
        if entry.parent is not None:
            entry.parent.num_children -= 1
        self._record(entry.hash, removed=True)
        return block_id

    def take_events(self) -> list[BlockEvent] | Resync:
        """Changes since the last call, in order, or `Resync.NEEDED` when more than the bound piled up."""
        events, self._events = self._events, []
        if self._events_lost:
            self._events_lost = False
            return Resync.NEEDED
        return events

    def _record(self, block_hash: BlockHash, *, removed: bool) -> None:
        if self._events_lost:
            return
        if len(self._events) >= self._max_events:
            # Nobody drains. A snapshot is shorter than the backlog by now, so the backlog has no use.
            self._events = []
            self._events_lost = True
            return
        self._events.append(BlockEvent(block_hash, removed))

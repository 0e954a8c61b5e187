"""Sequences and their block tables over one pool with a prefix cache.

Life of a sequence: `allocate` pins the longest cached prefix and takes fresh blocks for the rest, `append` grows the
table (`trim` takes back), `store` names each block whose KV is complete so that others can match it, and exactly one of
`free` and `quarantine` ends it. A call that cannot be met now returns None or False and has changed nothing; a call
that makes no sense (unknown sequence, second free) raises, because it means that the caller has lost track.

    block_table(seq)   [ 7 ][ 2 ][ 9 ][ 4 ]    slot of token t = table[t // block_size] * block_size + t % block_size
                         |    |    |    +- last block, partly filled: never indexed
                         +----+----+------ full and stored: shared with every sequence of the same prefix

Pure and synchronous; one owner thread. Nothing here moves bytes: `make_writable` says what the caller must copy.
"""

from collections.abc import Sequence
from typing import NamedTuple

from kv_cache import integrity
from kv_cache.block_hash import BlockHash
from kv_cache.block_pool import BlockPool, PoolUsage
from kv_cache.integrity import IntegrityError
from kv_cache.prefix_index import BlockEvent, PrefixIndex, Resync

__all__ = [
    "Allocation",
    "BlockCopy",
    "BlockEvent",
    "BlockManager",
    "BlockManagerError",
    "BlockStateError",
    "IntegrityError",
    "PoolUsage",
    "Resync",
    "SequenceExistsError",
    "UnknownQuarantineError",
    "UnknownSequenceError",
    "WritableBlock",
]

_MIN_EVENT_BOUND = 4096


class BlockManagerError(Exception):
    """A call that makes no sense: a defect in the caller. The pool is unchanged."""


class UnknownSequenceError(BlockManagerError):
    """No table for this sequence: never allocated, or freed or quarantined already."""


class SequenceExistsError(BlockManagerError):
    """The sequence has a table already."""


class UnknownQuarantineError(BlockManagerError):
    """No such quarantine: never opened, or released already."""


class BlockStateError(BlockManagerError):
    """The block cannot do that: no such place in the table, another content, or content that later blocks rest on."""


class Allocation(NamedTuple):
    """Result of `allocate`: the whole block table, of which the first `cached_blocks` hold valid KV already."""

    cached_blocks: int
    block_table: tuple[int, ...]


class BlockCopy(NamedTuple):
    """Copy all layers of block `source` to block `destination` before anything else is written to the pool."""

    source: int
    destination: int


class WritableBlock(NamedTuple):
    """Result of `make_writable`: the private block now in the table, and the copy to do first, if any."""

    block_id: int
    copy: BlockCopy | None


class BlockManager:
    """Owns `num_blocks` blocks of `block_size` tokens. See the module's docstring for the life of a sequence.

    `max_events` bounds the undrained `take_events` log (default: the number of blocks, at least 4,096).
    Raises ValueError for sizes below 1.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, prefix_caching: bool = True, max_events: int | None = None
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs blocks of tokens, not {num_blocks} blocks of {block_size} tokens")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        bound = max(_MIN_EVENT_BOUND, num_blocks) if max_events is None else max_events
        self._index = PrefixIndex(num_blocks, block_size, bound)
        self._pool = BlockPool(num_blocks, self._index)
        self._tables: dict[str, list[int]] = {}
        self._quarantines: dict[int, list[int]] = {}
        self._next_quarantine_id = 1

    def __contains__(self, seq_id: str) -> bool:
        """Whether the sequence has a block table."""
        return seq_id in self._tables

    def match_prefix(self, hashes: Sequence[BlockHash], tokens: Sequence[int]) -> int:
        """Leading full blocks of `tokens` whose KV is here; never more than `len(tokens) // block_size`.

        Checked against the token ids and the parent of each block, so colliding hashes cannot lengthen it. A hint:
        nothing is pinned, and `allocate` looks again.
        """
        return len(self._index.match(hashes, tokens, self.num_blocks))

    def allocate(
        self,
        seq_id: str,
        num_tokens: int,
        hashes: Sequence[BlockHash],
        tokens: Sequence[int],
        max_cached_blocks: int | None = None,
    ) -> Allocation | None:
        """Open a table for `num_tokens` tokens: the longest cached prefix, pinned, then fresh blocks.

        `hashes` name the full blocks of `tokens`. `max_cached_blocks` limits the prefix; a caller that must compute at
        least one token passes `(num_tokens - 1) // block_size`. Returns None, with nothing changed at all, when the
        pool has too few blocks now. Raises SequenceExistsError, and ValueError for less than one token.
        """
        if seq_id in self._tables:
            raise SequenceExistsError(f"sequence {seq_id!r} has a block table already")
        if num_tokens < 1:
            raise ValueError(f"a sequence needs at least one token, not {num_tokens}")
        limit = num_tokens // self.block_size
        if max_cached_blocks is not None:
            limit = min(limit, max_cached_blocks)
        cached = self._index.match(hashes, tokens, limit)
        num_fresh = self._blocks_for(num_tokens) - len(cached)
        if num_fresh > self._pool.num_available - self._pool.num_unheld(cached):
            return None
        # Pin before taking: taking may evict, and must not evict what was just matched.
        self._pool.hold(cached)
        table = cached + self._pool.take(num_fresh)
        self._tables[seq_id] = table
        return Allocation(len(cached), tuple(table))

    def append(self, seq_id: str, num_tokens_total: int) -> bool:
        """Grow the table until it covers that many tokens; only `trim` makes it shorter.

        False, with nothing changed, when the pool has too few blocks now. Raises UnknownSequenceError.
        """
        table = self._table(seq_id)
        missing = self._blocks_for(num_tokens_total) - len(table)
        if missing <= 0:
            return True
        if missing > self._pool.num_available:
            return False
        table.extend(self._pool.take(missing))
        return True

    def trim(self, seq_id: str, num_tokens_total: int) -> None:
        """Give back the blocks behind that many tokens: what is in them does not count, and nobody was shown it.

        Raises UnknownSequenceError, and BlockStateError when one of them is stored or shared: somebody counts on it.
        """
        table = self._table(seq_id)
        spare = table[self._blocks_for(num_tokens_total) :]
        for block in spare:
            if self._index.entry_at[block] is not None or self._pool.is_shared(block):
                raise BlockStateError(f"block {block} of sequence {seq_id!r} is stored or shared: it cannot be trimmed")
        self._pool.drop(spare)
        del table[len(table) - len(spare) :]

    def block_table(self, seq_id: str) -> list[int]:
        """The live table: `append` and `trim` change it, and nobody else may. Raises UnknownSequenceError."""
        return self._table(seq_id)

    def store(self, seq_id: str, block_index: int, block_hash: BlockHash, tokens: Sequence[int]) -> bool:
        """The KV of this full block is complete and valid: name it, so that other sequences can match it.

        Call in order, first block to last. Returns whether the block is now in the index. It stays out, silently,
        when prefix caching is off, when the block before it is not in the index, or when its hash collides with
        another content. Known content makes the block a spare for the one that is matched; when nobody holds that
        one, this block takes its place and the other one becomes free. Storing a block twice is harmless.

        Raises UnknownSequenceError, ValueError when `tokens` is not one full block, and BlockStateError when the table
        has no such block or the block is stored with another content.
        """
        table = self._table(seq_id)
        block = self._block(seq_id, block_index)
        if len(tokens) != self.block_size:
            raise ValueError(f"a full block has {self.block_size} tokens, not {len(tokens)}")
        if not self.prefix_caching:
            return False
        parent = None
        if block_index:
            parent = self._index.entry_at[table[block_index - 1]]
            if parent is None:
                return False
        token_ids = tuple(tokens)
        known = self._index.entry_at[block]
        if known is not None:
            if known.hash != block_hash or known.token_ids != token_ids or known.parent is not parent:
                raise BlockStateError(f"block {block} of sequence {seq_id!r} is already stored with another content")
            return True
        displaced = self._index.add(block, block_hash, token_ids, parent)
        if displaced is not None:
            self._pool.reclaim(displaced)
        return self._index.entry_at[block] is not None

    def fork(self, parent_seq_id: str, child_seq_id: str) -> None:
        """Open a table for the child that shares every block of the parent's, the partly filled one too.

        Whoever writes into a shared block first calls `make_writable`. Raises UnknownSequenceError and
        SequenceExistsError.
        """
        table = self._table(parent_seq_id)
        if child_seq_id in self._tables:
            raise SequenceExistsError(f"sequence {child_seq_id!r} has a block table already")
        self._pool.hold(table)
        self._tables[child_seq_id] = table.copy()

    def make_writable(self, seq_id: str, block_index: int) -> WritableBlock | None:
        """Make sure that only this sequence sees what is written into this block from now on.

        A block that another table or a quarantine also holds, or whose content the index has nowhere else, is replaced
        in the table by a fresh one, to which the caller first copies the old one's KV. None, with nothing changed,
        when no block is available now. Raises UnknownSequenceError, and BlockStateError when the table has no such
        block or a later block of it is stored or shared: that content rests on this one.
        """
        table = self._table(seq_id)
        block = self._block(seq_id, block_index)
        for later in table[block_index + 1 :]:
            if self._index.entry_at[later] is not None or self._pool.is_shared(later):
                raise BlockStateError(f"block {later} of sequence {seq_id!r} rests on block {block}")
        if not self._pool.is_shared(block) and self._index.detach(block):
            return WritableBlock(block, None)
        if not self._pool.num_available:
            return None
        (fresh,) = self._pool.take(1)
        table[block_index] = fresh
        self._pool.drop((block,))
        return WritableBlock(fresh, BlockCopy(block, fresh))

    def free(self, seq_id: str) -> None:
        """End the sequence: blocks that nobody else holds become cached if stored, otherwise free.

        Raises UnknownSequenceError, also for a second free.
        """
        self._pool.drop(self._table(seq_id))
        del self._tables[seq_id]

    def quarantine(self, seq_id: str) -> int:
        """End the sequence, but keep every block it holds from being taken, because a remote side may still touch it.

        Returns the id for `release_quarantine`. Stored blocks can still be matched: their content is final. Raises
        UnknownSequenceError.
        """
        table = self._table(seq_id)
        self._pool.quarantine(table)
        del self._tables[seq_id]
        quarantine_id = self._next_quarantine_id
        self._next_quarantine_id += 1
        self._quarantines[quarantine_id] = table
        return quarantine_id

    def release_quarantine(self, quarantine_id: int) -> None:
        """Nobody remote touches these blocks any more: what `free` does to a table happens to them now.

        Raises UnknownQuarantineError, also for a second release.
        """
        table = self._quarantines.pop(quarantine_id, None)
        if table is None:
            raise UnknownQuarantineError(f"no quarantine {quarantine_id}")
        self._pool.release_quarantine(table)

    def can_allocate(self, num_blocks: int) -> bool:
        """Whether that many fresh blocks can be taken now, evicting cached ones if need be."""
        return num_blocks <= self._pool.num_available

    @property
    def num_free(self) -> int:
        """Blocks that can be taken without evicting a cached one."""
        return len(self._pool.free_list)

    def usage(self) -> PoolUsage:
        """Blocks by state, now. A frozen value; may be handed to other threads."""
        return self._pool.usage()

    def take_events(self) -> list[BlockEvent] | Resync:
        """Changes of the prefix index since the last call, in order.

        `Resync.NEEDED` when more than the bound piled up undrained: `snapshot_hashes`, called next, is the content
        then, and the events after it follow on from there.
        """
        return self._index.take_events()

    def snapshot_hashes(self) -> list[BlockHash]:
        """Every hash that can be matched now, parents before children. Events not yet taken are part of it."""
        return list(self._index.entries)

    def check_integrity(self) -> None:
        """Audit the whole state: O(blocks held and cached). Raises IntegrityError with everything found wrong."""
        integrity.check(self._pool, self._tables, self._quarantines)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _table(self, seq_id: str) -> list[int]:
        table = self._tables.get(seq_id)
        if table is None:
            raise UnknownSequenceError(f"sequence {seq_id!r} has no block table")
        return table

    def _block(self, seq_id: str, block_index: int) -> int:
        table = self._table(seq_id)
        if not 0 <= block_index < len(table):
            raise BlockStateError(f"sequence {seq_id!r} has {len(table)} blocks, no block {block_index}")
        return table[block_index]

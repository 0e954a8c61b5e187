"""The beginning of a prompt, held in the pool by itself: no sequence computes it, a hand-off reads or fills it.

    pin(name, ...)      it is all cached here: nothing evicts it while it is sent      -> release
    reserve(name, ...)  what is cached is pinned, room is taken for the rest           -> keep, once it is verified
                                                                                       -> release, once nobody writes it

A hold has whole blocks only, and a name of the caller's that no sequence has. Everything belongs to the engine's owner
thread.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kv_cache.block_hash import BlockHash, BlockHasher
from kv_cache.block_manager import BlockManager


class PoolCopies(Protocol):
    """Between the pool that hand-offs see and the engine's own, where these are two. See PoolMirror."""

    def to_host(self, block_ids: Iterable[int]) -> None:
        """A hand-off is going to read these blocks."""
        ...

    def to_device(self, block_ids: Iterable[int]) -> None:
        """A hand-off has filled these blocks, and the engine is going to read them."""
        ...


@dataclass(frozen=True, slots=True)
class HeldPrefix:
    """Blocks `block_table` for `token_ids`, in order; the KV of the first `cached_blocks` was here before."""

    token_ids: tuple[int, ...]
    block_hashes: tuple[BlockHash, ...]
    block_table: tuple[int, ...]
    cached_blocks: int

    @property
    def content_name(self) -> BlockHash:
        """Names all of it: model, salt, and every token up to the last."""
        return self.block_hashes[-1]


class PrefixHolds:
    """All holds of one engine. Falsy when there are none."""

    def __init__(self, block_manager: BlockManager, hasher: BlockHasher, copies: PoolCopies | None = None) -> None:
        """`copies`: None where hand-offs and engine use one pool."""
        self._block_manager = block_manager
        self._hasher = hasher
        self._copies = copies
        self._held: dict[str, HeldPrefix] = {}

    def __len__(self) -> int:
        return len(self._held)

    def pin(self, name: str, token_ids: Sequence[int], salt: bytes) -> HeldPrefix | None:
        """Hold a prefix that is cached here whole. None = it is not (any more): nothing changed.

        Raises ValueError unless `token_ids` fill whole blocks, and SequenceExistsError for a name in use.
        """
        hashes = self._hashes(token_ids, salt)
        if self._block_manager.match_prefix(hashes, token_ids) < len(hashes):
            return None
        held = self._hold(name, token_ids, hashes)
        if held is not None and self._copies is not None:
            self._copies.to_host(held.block_table)
        return held

    def reserve(self, name: str, token_ids: Sequence[int], salt: bytes) -> HeldPrefix | None:
        """Hold a prefix that is not all here, with room for what is missing. Nobody can match that room before `keep`.

        None = nothing is missing, there is no room, or nothing would be found again. Raises as `pin` does.
        """
        hashes = self._hashes(token_ids, salt)
        if not self._block_manager.prefix_caching:
            return None
        if self._block_manager.match_prefix(hashes, token_ids) >= len(hashes):
            return None
        return self._hold(name, token_ids, hashes)

    def keep(self, name: str) -> None:
        """The KV of a reserved prefix is all here and verified: anybody may match it. The hold ends: it is cached.

        Raises KeyError for a name that holds nothing.
        """
        held, size = self._held[name], self._block_manager.block_size
        if self._copies is not None:
            self._copies.to_device(held.block_table[held.cached_blocks :])
        for index in range(held.cached_blocks, len(held.block_table)):
            tokens = held.token_ids[index * size : (index + 1) * size]
            self._block_manager.store(name, index, held.block_hashes[index], tokens)
        self.release(name)

    def release(self, name: str) -> None:
        """No remote side touches the prefix any more: the hold ends. Idempotent."""
        if self._held.pop(name, None) is not None:
            self._block_manager.free(name)

    def _hold(self, name: str, token_ids: Sequence[int], hashes: list[BlockHash]) -> HeldPrefix | None:
        allocation = self._block_manager.allocate(name, len(token_ids), hashes, token_ids)
        if allocation is None:
            return None
        held = HeldPrefix(tuple(token_ids), tuple(hashes), allocation.block_table, allocation.cached_blocks)
        self._held[name] = held
        return held

    def _hashes(self, token_ids: Sequence[int], salt: bytes) -> list[BlockHash]:
        size = self._block_manager.block_size
        if not token_ids or len(token_ids) % size:
            raise ValueError(f"{len(token_ids)} tokens are not whole blocks of {size}")
        return self._hasher.hash_blocks(token_ids, salt)

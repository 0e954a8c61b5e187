"""Content names of KV blocks: a chain of 128-bit BLAKE2b digests over token ids.

The KV of a block depends on every token before it, so a block's name is the digest of its parent's name and its own
token ids; the chain starts at a root that binds the model, the block size, the dtype and the tenant's salt. Names are
equal on every worker, in every process, on every machine, and nobody who lacks the salt can build a prompt that meets
another tenant's blocks. All functions are pure; any thread may call.
"""

import struct
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from kv_cache.layout import KVCacheLayout, KVDtype

BlockHash: TypeAlias = bytes
"""Name of a block's content: `HASH_BYTES` bytes."""

HASH_VERSION = 1
"""Changes whenever the same content would get another name; workers of different versions refuse each other."""

HASH_BYTES = 16

# BLAKE2 personalisation keeps the two uses of the function apart: no block can be taken for a root.
_ROOT_PERSON = b"kvferry-root"
_BLOCK_PERSON = b"kvferry-block"


@lru_cache(maxsize=256)  # Asked for with every request, for a few salts.
def root_hash(model_id: str, model_revision: str, block_size: int, dtype: str, salt: bytes) -> BlockHash:
    """The parent of every first block of this model, block size (tokens), dtype name and tenant salt."""
    digest = blake2b(digest_size=HASH_BYTES, person=_ROOT_PERSON)
    head = struct.pack("<IQ", HASH_VERSION, block_size)
    for part in (head, model_id.encode(), model_revision.encode(), dtype.encode(), salt):
        # The length before each part: ("ab", "c") and ("a", "bc") are different models.
        digest.update(struct.pack("<Q", len(part)))
        digest.update(part)
    return digest.digest()


def hash_block(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """Name of the full block `token_ids` that follows `parent`.

    Raises ValueError for a token id outside 0..2**32-1.
    """
    try:
        encoded = struct.pack(f"<{len(token_ids)}I", *token_ids)
    except struct.error as error:
        raise ValueError(f"token ids are whole numbers from 0 to 2**32 - 1: {error}") from error
    return blake2b(parent + encoded, digest_size=HASH_BYTES, person=_BLOCK_PERSON).digest()


def hash_blocks(root: BlockHash, token_ids: Sequence[int], block_size: int) -> list[BlockHash]:
    """Names of the full blocks of `token_ids`, first to last; tokens after the last full block name nothing."""
    hashes: list[BlockHash] = []
    _extend(hashes, root, token_ids, block_size)
    return hashes


class BlockHasher:
    """The hash chain of one model: binds model identity, block size (tokens) and dtype.

    Immutable; any thread may call. Raises ValueError for a block size below 1.
    """

    __slots__ = ("block_size", "dtype", "model_id", "model_revision")

    def __init__(self, model_id: str, model_revision: str, block_size: int, dtype: "KVDtype") -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, not {block_size}")
        self.model_id = model_id
        self.model_revision = model_revision
        self.block_size = block_size
        self.dtype = dtype

    @classmethod
    def for_layout(cls, layout: "KVCacheLayout") -> "BlockHasher":
        """The hasher of a pool with this layout. The head shard is no part of a name: all shards share it."""
        return cls(layout.model_id, layout.model_revision, layout.block_size, layout.dtype)

    def root(self, salt: bytes = b"") -> BlockHash:
        """The parent of every first block under this tenant salt."""
        return root_hash(self.model_id, self.model_revision, self.block_size, self.dtype.value, salt)

    def hash_blocks(self, token_ids: Sequence[int], salt: bytes = b"") -> list[BlockHash]:
        """Names of the full blocks of `token_ids`, first to last."""
        return hash_blocks(self.root(salt), token_ids, self.block_size)

    def extend(self, hashes: list[BlockHash], token_ids: Sequence[int], salt: bytes = b"") -> None:
        """Append to `hashes` the names of the full blocks of `token_ids` that it does not cover yet.

        `hashes` holds the chain of a prefix of `token_ids` under the same salt (or is empty): a sequence calls this
        after it grew and pays only for new full blocks. Mutates `hashes` and nothing else.
        """
        if len(token_ids) // self.block_size <= len(hashes):
            return
        _extend(hashes, hashes[-1] if hashes else self.root(salt), token_ids, self.block_size)


def _extend(hashes: list[BlockHash], parent: BlockHash, token_ids: Sequence[int], block_size: int) -> None:
    for start in range(len(hashes) * block_size, len(token_ids) - block_size + 1, block_size):
        parent = hash_block(parent, token_ids[start : start + block_size])
        hashes.append(parent)

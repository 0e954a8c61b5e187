"""Fingerprints of KV content, bound to the hand-off, its attempt, the block's place in the prompt, and the layer.

A page's fingerprint is xxh3-64 of its bytes under a seed made of all four, so the right bytes in the wrong place do
not match. A block's folds its layers; the digest of a hand-off folds its blocks. Both ends compute the same.
"""

import hashlib
from collections.abc import Iterable, Sequence

import xxhash

from kv_cache.layout import KVCacheLayout

_MASK = (1 << 64) - 1


def seed(handoff_id: str, attempt: int) -> int:
    """64 bits that differ for every attempt of every hand-off."""
    name = f"{handoff_id}\0{attempt}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")


def page(content: memoryview, base_seed: int, block_index: int, layer: int) -> int:
    """Fingerprint of one page. `block_index` counts from the start of the prompt, `layer` from 0."""
    return int(xxhash.xxh3_64_intdigest(content, _place(base_seed, block_index, layer)))


def fold_block(page_fingerprints: Iterable[int], base_seed: int) -> int:
    """Fingerprint of one block from those of its pages, in layer order."""
    return int(xxhash.xxh3_64_intdigest(_packed(page_fingerprints), base_seed))


def digest(block_fingerprints: Iterable[int]) -> bytes:
    """16 bytes over the fingerprints of all blocks sent, in prompt order."""
    return hashlib.blake2b(_packed(block_fingerprints), digest_size=16).digest()


def block(pool: memoryview, layout: KVCacheLayout, block_id: int, base_seed: int, block_index: int) -> int:
    """Fingerprint of one block as it lies in a pool."""
    size = layout.page_bytes
    start = layout.page_offset(block_id, 0)
    pages = (
        page(pool[start + layer * size : start + (layer + 1) * size], base_seed, block_index, layer)
        for layer in range(layout.num_layers)
    )
    return fold_block(pages, base_seed)


def fold_blocks(page_fingerprints: Sequence[int], num_layers: int, base_seed: int) -> tuple[int, ...]:
    """Fingerprints of all blocks from those of all their pages, block by block."""
    return tuple(
        fold_block(page_fingerprints[start : start + num_layers], base_seed)
        for start in range(0, len(page_fingerprints), num_layers)
    )


def _packed(values: Iterable[int]) -> bytes:
    return b"".join(value.to_bytes(8, "little") for value in values)


def _place(base_seed: int, block_index: int, layer: int) -> int:
    """The seed of one page: splitmix64 of the base seed and the place, so that neighbours share no pattern."""
    mixed = (base_seed + (block_index << 16 | layer) * 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & _MASK
    return mixed ^ mixed >> 31


def check_blocks(
    pool: memoryview,
    layout: KVCacheLayout,
    block_ids: Sequence[int],
    *,
    base_seed: int,
    first_block: int,
    expected: Sequence[int],
) -> tuple[bytes, str]:
    """(digest, mismatch) of blocks as they lie in a pool. `mismatch` names the first block not as expected, if any."""
    found = []
    for index, (block_id, claim) in enumerate(zip(block_ids, expected, strict=True), start=first_block):
        fingerprint = block(pool, layout, block_id, base_seed, index)
        if fingerprint != claim:
            return (
                b"",
                f"prompt block {index} does not hold what was sent (checksum {fingerprint:016x}, not {claim:016x})",
            )
        found.append(fingerprint)
    return digest(found), ""

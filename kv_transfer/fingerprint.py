"""Fingerprints of KV content, bound to the hand-off, its attempt, the block's place in the prompt, and the layer.

A page's fingerprint is xxh3-64 of its bytes under a seed made of all four, so the right bytes in the wrong place do
not match. A block's folds its layers; the digest of a hand-off folds its blocks. Both ends compute the same. Pure; any
thread.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

Fingerprints = Sequence[int] | npt.NDArray[np.uint64]
"""64-bit values, as Python or numpy integers."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def seed(handoff_id: str, attempt: int) -> int:
    """64 bits that differ for every attempt of every hand-off."""
    name = f"{handoff_id}\0{attempt}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")


def page_seeds(base_seed: int, blocks: range, layers: range) -> list[int]:
    """The seeds of these pages, block by block: splitmix64 of the base seed and the place.

    `blocks` count from the start of the prompt, `layers` from 0. So neighbours share no pattern.
    """
    rows = np.arange(blocks.start, blocks.stop, dtype=np.uint64)[:, None] << np.uint64(16)
    mixed = (rows | np.arange(layers.start, layers.stop, dtype=np.uint64)) * _GOLDEN + np.uint64(base_seed)
    mixed = (mixed ^ mixed >> np.uint64(30)) * _MIX_1
    mixed = (mixed ^ mixed >> np.uint64(27)) * _MIX_2
    seeds: list[int] = (mixed ^ mixed >> np.uint64(31)).ravel().tolist()
    return seeds


def pages(views: Sequence[memoryview], page_bytes: int, seeds: Sequence[int]) -> list[int]:
    """Fingerprints of the consecutive pages in `views`, each of whole pages, under their seeds.

    Raises ValueError when there are more or fewer pages than seeds.
    """
    if sum(view.nbytes for view in views) != len(seeds) * page_bytes:
        raise ValueError(f"{len(seeds)} seeds for views of {[view.nbytes for view in views]} bytes")
    hashed = xxhash.xxh3_64_intdigest
    found: list[int] = []
    for view in views:
        stops = range(page_bytes, view.nbytes + 1, page_bytes)
        under = seeds[len(found) : len(found) + len(stops)]
        found += [hashed(view[stop - page_bytes : stop], one) for stop, one in zip(stops, under, strict=True)]
    return found


def page(content: memoryview, base_seed: int, block_index: int, layer: int) -> int:
    """Fingerprint of one page."""
    seeds = page_seeds(base_seed, range(block_index, block_index + 1), range(layer, layer + 1))
    return pages([content], content.nbytes, seeds)[0]


def fold_blocks(page_fingerprints: Fingerprints, num_layers: int, base_seed: int) -> tuple[int, ...]:
    """Fingerprints of all blocks from those of all their pages, block by block."""
    packed, size = memoryview(_packed(page_fingerprints)), 8 * num_layers
    hashed = xxhash.xxh3_64_intdigest
    return tuple([hashed(packed[start : start + size], base_seed) for start in range(0, len(packed), size)])


def digest(block_fingerprints: Fingerprints) -> bytes:
    """16 bytes over the fingerprints of all blocks sent, in prompt order."""
    return hashlib.blake2b(_packed(block_fingerprints), digest_size=16).digest()


def _packed(values: Fingerprints) -> bytes:
    return np.asarray(values, dtype="<u8").tobytes()

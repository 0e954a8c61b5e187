"""Runs of pages: what one write names, how big it may be, and where its bytes lie. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kv_cache.layout import KVCacheLayout

MAX_WRITE_BYTES = 4 * 1024 * 1024
"""Largest payload of one write, unless a single page is larger. Bounds how long a write can hold a link or a fence."""


@dataclass(frozen=True, slots=True)
class PageRun:
    """The pages of some consecutive prompt blocks in some consecutive layers."""

    blocks: range
    layers: range

    @property
    def num_pages(self) -> int:
        """Pages in the run."""
        return len(self.blocks) * len(self.layers)

    def joined(self, other: "PageRun") -> "PageRun | None":
        """The one run that covers exactly both, if `other` continues this one in layers or in blocks; else None."""
        if self.blocks == other.blocks and self.layers.stop == other.layers.start:
            return PageRun(self.blocks, range(self.layers.start, other.layers.stop))
        if self.layers == other.layers and self.blocks.stop == other.blocks.start:
            return PageRun(range(self.blocks.start, other.blocks.stop), self.layers)
        return None


def max_write_bytes(layout: KVCacheLayout) -> int:
    """The bound on a payload that both ends of a link with this layout keep."""
    return max(MAX_WRITE_BYTES, layout.page_bytes)


def split(run: PageRun, layout: KVCacheLayout) -> Iterator[PageRun]:
    """Pieces of the run that fit one write, in order: several blocks a piece, or a part of the layers of one block."""
    pages = max(1, MAX_WRITE_BYTES // layout.page_bytes)
    blocks_a_piece = max(1, pages // len(run.layers))
    for first in range(run.blocks.start, run.blocks.stop, blocks_a_piece):
        blocks = range(first, min(first + blocks_a_piece, run.blocks.stop))
        for layer in range(run.layers.start, run.layers.stop, pages):
            yield PageRun(blocks, range(layer, min(layer + pages, run.layers.stop)))


def spans(layout: KVCacheLayout, block_ids: Sequence[int], layers: range) -> list[tuple[int, int]]:
    """(offset, size) in bytes of the run's pages in a pool, neighbours merged. All ids must be in range."""
    # Worked out once: this is asked for thousands of blocks at a time.
    block_bytes, start = layout.block_bytes, layout.page_offset(0, layers.start)
    starts = [layout.page_offset(block_id, layers.start) for block_id in block_ids]
    return _merged(starts, len(layers) * layout.page_bytes)


def views(pool: memoryview, layout: KVCacheLayout, block_ids: Sequence[int], layers: range) -> list[memoryview]:
    """The run's bytes in a pool, as few slices as possible, in order."""
    return [pool[offset : offset + size] for offset, size in spans(layout, block_ids, layers)]


@dataclass(frozen=True, slots=True)
class PagesAt:
    """Where the pages of a run lie: at each of `offsets` (int64, bytes, [block]) in `memory` begin those of one block.

    They are `size_each` bytes, layer behind layer. Valid as long as whoever made it says.
    """

    memory: memoryview
    offsets: npt.NDArray[np.int64]
    size_each: int

    @classmethod
    def in_pool(cls, pool: memoryview, layout: KVCacheLayout, block_ids: Sequence[int], layers: range) -> "PagesAt":
        """These blocks of a pool."""
        offsets = np.array(block_ids, np.int64) * layout.block_bytes + layers.start * layout.page_bytes
        return cls(pool, offsets, len(layers) * layout.page_bytes)

    @classmethod
    def in_order(cls, memory: memoryview, num_blocks: int) -> "PagesAt":
        """Block behind block, filling `memory`."""
        size_each = memory.nbytes // num_blocks
        return cls(memory, np.arange(num_blocks, dtype=np.int64) * size_each, size_each)

    @property
    def size_bytes(self) -> int:
        """Of all pages."""
        return len(self.offsets) * self.size_each

    def views(self) -> list[memoryview]:
        """The bytes in order, as few slices as possible."""
        spans = _merged(self.offsets.tolist(), self.size_each)
        return [self.memory[offset : offset + size] for offset, size in spans]


def _merged(starts: Sequence[int], size_each: int) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start in starts:
        if merged and merged[-1][0] + merged[-1][1] == start:
            merged[-1] = (merged[-1][0], merged[-1][1] + size_each)
        else:
            merged.append((start, size_each))
    return merged

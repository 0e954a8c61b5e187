"""Runs of pages: what one write names, how big it may be, and where its bytes lie. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kv_cache.layout import KVCacheLayout
from kv_transfer.messages import Write

MAX_WRITE_BYTES = 16 * 1024 * 1024
"""Largest payload of one write, unless a single page is larger. Bounds how long a write can hold a link or a fence:
messages wait for it, so it must pass well within a lease and the I/O timeout, which a link of 5 MB/s still does."""

USUAL_WRITE_BYTES = 4 * 1024 * 1024
"""Large enough where a write costs no more than a frame; larger, the receiver's look at it would begin later."""


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


def run_of(message: Write) -> PageRun:
    """The pages that a Write names."""
    blocks = range(message.block_index, message.block_index + len(message.block_ids))
    return PageRun(blocks, range(message.layer, message.layer + message.num_layers))


def max_write_bytes(layout: KVCacheLayout) -> int:
    """The bound on a payload that both ends of a link with this layout keep."""
    return max(MAX_WRITE_BYTES, layout.page_bytes)


def split(run: PageRun, layout: KVCacheLayout, write_bytes: int) -> Iterator[PageRun]:
    """Pieces of the run of at most one write, in order: several blocks a piece, or a part of the layers of one block.

    A write has at most `write_bytes`, unless a single page is larger.
    """
    return _pieces(run, write_bytes // layout.page_bytes)


def spans(layout: KVCacheLayout, block_ids: Sequence[int], layers: range) -> list[tuple[int, int]]:
    """(offset, size) in bytes of the run's pages in a pool, neighbours merged. All ids must be in range."""
    # Worked out once: this is asked for thousands of blocks at a time.
    block_bytes, start = layout.block_bytes, layout.page_offset(0, layers.start)
    starts = [block_id * block_bytes + start for block_id in block_ids]
    return _merged(starts, len(layers) * layout.page_bytes)


def views(pool: memoryview, layout: KVCacheLayout, block_ids: Sequence[int], layers: range) -> list[memoryview]:
    """The run's bytes in a pool, as few slices as possible, in order."""
    return [pool[offset : offset + size] for offset, size in spans(layout, block_ids, layers)]


@dataclass(frozen=True, slots=True)
class PagesAt:
    """The pages of a run and where they lie: those of its n-th block at `offsets[n]` in `memory`, layer behind layer.

    `offsets` are int64, in bytes, [block]. Valid as long as whoever made it says.
    """

    run: PageRun
    page_bytes: int
    memory: memoryview
    offsets: npt.NDArray[np.int64]

    @classmethod
    def in_pool(cls, run: PageRun, layout: KVCacheLayout, pool: memoryview, block_ids: Sequence[int]) -> "PagesAt":
        """In these blocks of a pool. All ids must be in range."""
        offsets = np.array(block_ids, np.int64) * layout.block_bytes + run.layers.start * layout.page_bytes
        return cls(run, layout.page_bytes, pool, offsets)

    @classmethod
    def in_order(cls, run: PageRun, layout: KVCacheLayout, memory: memoryview) -> "PagesAt":
        """Block behind block from the start of `memory`."""
        offsets = np.arange(len(run.blocks), dtype=np.int64) * (len(run.layers) * layout.page_bytes)
        return cls(run, layout.page_bytes, memory, offsets)

    @property
    def size_bytes(self) -> int:
        """Of all pages."""
        return self.run.num_pages * self.page_bytes

    def views(self) -> list[memoryview]:
        """The bytes in order, as few slices as possible."""
        spans = _merged(self.offsets.tolist(), len(self.run.layers) * self.page_bytes)
        return [self.memory[offset : offset + size] for offset, size in spans]

    def parts(self, max_bytes: int) -> "Iterator[PagesAt]":
        """The same pages in the same order, in parts of at most this size, unless a single page is larger."""
        for run in _pieces(self.run, max_bytes // self.page_bytes):
            first = run.blocks.start - self.run.blocks.start
            skipped = (run.layers.start - self.run.layers.start) * self.page_bytes
            offsets = self.offsets[first : first + len(run.blocks)]
            yield PagesAt(run, self.page_bytes, self.memory, offsets + skipped if skipped else offsets)


def _pieces(run: PageRun, max_pages: int) -> Iterator[PageRun]:
    pages = max(1, max_pages)
    blocks_a_piece = max(1, pages // len(run.layers))
    for first in range(run.blocks.start, run.blocks.stop, blocks_a_piece):
        blocks = range(first, min(first + blocks_a_piece, run.blocks.stop))
        for layer in range(run.layers.start, run.layers.stop, pages):
            yield PageRun(blocks, range(layer, min(layer + pages, run.layers.stop)))


def _merged(starts: Sequence[int], size_each: int) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start in starts:
        if merged and merged[-1][0] + merged[-1][1] == start:
            merged[-1] = (merged[-1][0], merged[-1][1] + size_each)
        else:
            merged.append((start, size_each))
    return merged

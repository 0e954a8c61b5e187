"""Runs of pages: what one write names, how big it may be, and where its bytes lie."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
    size = len(layers) * layout.page_bytes
    merged: list[tuple[int, int]] = []
    for block_id in block_ids:
        offset = layout.page_offset(block_id, layers.start)
        if merged and merged[-1][0] + merged[-1][1] == offset:
            merged[-1] = (merged[-1][0], merged[-1][1] + size)
        else:
            merged.append((offset, size))
    return merged


def views(pool: memoryview, layout: KVCacheLayout, block_ids: Sequence[int], layers: range) -> list[memoryview]:
    """The run's bytes in a pool, as few slices as possible, in order."""
    return [pool[offset : offset + size] for offset, size in spans(layout, block_ids, layers)]

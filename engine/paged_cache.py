"""The KV pool as tensors: strided views over one buffer [num_blocks][num_layers][page].

block 0                                   block 1
| page of layer 0 | page of layer 1 | ... | page of layer 0 | ...
  K tiles, one a kv head; V tiles, one a kv head; padding          a tile is [block_size, head_dim], contiguous
"""

import math
import mmap
from collections.abc import Iterable

import torch
from torch import Tensor

from kv_cache.layout import KVCacheLayout, KVDtype

_TORCH_DTYPES = {KVDtype.FP32: torch.float32, KVDtype.FP16: torch.float16, KVDtype.BF16: torch.bfloat16}


class PagedCache:
    """Views of a pool for the engine's owner thread. The bytes may also be read and written by the transfer layer,
    block by block, under the block manager's rules."""

    def __init__(self, layout: KVCacheLayout, num_blocks: int, buffer: memoryview | None = None) -> None:
        """`buffer`: writable, contiguous, at least `layout.pool_bytes(num_blocks)` bytes, best page-aligned; it must
        outlive the cache. None allocates one. Raises ValueError for a buffer that does not do or a quantised dtype.
        """
        if layout.dtype not in _TORCH_DTYPES:
            raise ValueError(f"a pool of {layout.dtype.value} is not supported by this engine")
        size_bytes = layout.pool_bytes(num_blocks)
        if buffer is None:
            buffer = memoryview(mmap.mmap(-1, size_bytes))  # anonymous, zeroed, page-aligned
        if buffer.readonly or not buffer.contiguous or buffer.nbytes < size_bytes:
            raise ValueError(f"a pool of {num_blocks} blocks needs {size_bytes} writable bytes, got {buffer.nbytes}")
        self.layout = layout
        self.num_blocks = num_blocks
        self.dtype = _TORCH_DTYPES[layout.dtype]
        self._heads = layout.num_kv_heads
        self._tile = layout.block_size * layout.head_dim  # sizes and offsets are in elements from here on
        self._page = layout.page_bytes // layout.dtype.itemsize
        self._v_offset = layout.v_offset // layout.dtype.itemsize
        self._pool = torch.frombuffer(buffer, dtype=self.dtype, count=num_blocks * layout.num_layers * self._page)
        self._layers = tuple((self._view(i, 0), self._view(i, self._v_offset)) for i in range(layout.num_layers))
        # Every tile as a row of one matrix, so that gathering is a plain copy of rows. Pages are padded, so a row may
        # have to start within what would be the row before: rows are `unit` apart, and overlap when that is less
        # than a tile.
        self._unit = math.gcd(self._page, self._tile)
        num_rows = (self._pool.numel() - self._tile) // self._unit + 1
        self._rows = self._pool.as_strided((num_rows, self._tile), (self._unit, 1))
        self._scratch = torch.empty((2, 0, self._tile), dtype=self.dtype)
        self._head_units = torch.arange(self._heads) * (self._tile // self._unit)

    def k(self, layer: int) -> Tensor:
        """K of one layer: a view [num_blocks, num_kv_heads, block_size, head_dim] of the pool, not contiguous."""
        return self._layers[layer][0]

    def v(self, layer: int) -> Tensor:
        """V of one layer, like `k`."""
        return self._layers[layer][1]

    def tile_index(self, block_tables: Tensor) -> Tensor:
        """What `gather` needs to know of block tables [S, B] (any integer dtype): int64 [S * num_kv_heads * B].

        Compute it once a step; it serves every layer.
        """
        first = block_tables.to(torch.int64) * (self.layout.num_layers * self._page // self._unit)
        return (first[:, None, :] + self._head_units[:, None]).reshape(-1)

    def gather(self, layer: int, tile_index: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
        """Copies of K and V of S = `num_rows` sequences: each [S * num_kv_heads, B * block_size, head_dim]
        in the pool's dtype, contiguous, valid until the next call."""
        num_tiles = len(tile_index)
        if self._scratch.shape[1] < num_tiles:
            # Fresh memory costs more than the copy itself (a page fault every 4 KiB), so it is kept.
            with torch.inference_mode(False):  # an ordinary tensor serves callers in either mode
                self._scratch = torch.empty((2, num_tiles, self._tile), dtype=self.dtype)
        index = tile_index + layer * self._page // self._unit
        shape = (num_rows * self._heads, -1, self.layout.head_dim)
        k = torch.index_select(self._rows, 0, index, out=self._scratch[0, :num_tiles])
        index += self._v_offset // self._unit
        v = torch.index_select(self._rows, 0, index, out=self._scratch[1, :num_tiles])
        return k.view(shape), v.view(shape)

    def copy_blocks(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy whole blocks, all layers: (source, destination) ids. No block may be on both sides."""
        sources, destinations = zip(*pairs, strict=True)
        blocks = self._pool.view(self.num_blocks, -1)
        blocks[list(destinations)] = blocks[list(sources)]

    def _view(self, layer: int, offset: int) -> Tensor:
        layout = self.layout
        return self._pool.as_strided(
            (self.num_blocks, self._heads, layout.block_size, layout.head_dim),
            (layout.num_layers * self._page, self._tile, layout.head_dim, 1),
            layer * self._page + offset,
        )

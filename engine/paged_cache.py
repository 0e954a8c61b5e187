"""The KV pool as tensors: strided views over one buffer [num_blocks][num_layers][page].

block 0                                   block 1
| page of layer 0 | page of layer 1 | ... | page of layer 0 | ...
  K tiles, one a kv head; V tiles; scales of K, of V (if quantised); padding
                                                                   a tile is [block_size, head_dim], contiguous
"""

import math
import mmap
from collections.abc import Iterable
from contextlib import suppress

import torch
from torch import Tensor

from engine.attention.quantised import dequantised
from kv_cache.layout import SCALE_BYTES, KVCacheLayout, KVDtype

_TORCH_DTYPES = {
    KVDtype.FP32: torch.float32,
    KVDtype.FP16: torch.float16,
    KVDtype.BF16: torch.bfloat16,
    KVDtype.INT8: torch.int8,
    KVDtype.FP8_E4M3: torch.uint8,  # the bits: torch can copy, index and fill few of its float8 tensors
}


class PagedCache:
    """Views of a pool for the engine's owner thread. The bytes may also be read and written by the transfer layer,
    block by block, under the block manager's rules."""

    def __init__(
        self,
        layout: KVCacheLayout,
        num_blocks: int,
        buffer: memoryview | None = None,
        heads: range | None = None,
    ) -> None:
        """`buffer`: writable, contiguous, at least `layout.pool_bytes(num_blocks)` bytes, best page-aligned; it must
        outlive the cache. None allocates one. `heads`: the kv heads of each page that all views show, neighbours (a
        rank of a tensor parallel worker sees its own); None = all. Raises ValueError for a buffer that does not do, or
        heads that the pages lack.
        """
        size_bytes = layout.pool_bytes(num_blocks)
        if buffer is None:
            # Zeroed, and in huge pages if the system has any: pages of the pool are read in no order, and looking up
            # small ones costs attention up to a third of its time.
            memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(OSError):
                memory.madvise(mmap.MADV_HUGEPAGE)
            buffer = memoryview(memory)
        if buffer.readonly or not buffer.contiguous or buffer.nbytes < size_bytes:
            raise ValueError(f"a pool of {num_blocks} blocks needs {size_bytes} writable bytes, got {buffer.nbytes}")
        self.layout = layout
        self.num_blocks = num_blocks
        self.dtype = _TORCH_DTYPES[layout.dtype]
        heads = range(layout.num_kv_heads) if heads is None else heads
        if heads.step != 1 or not 0 <= heads.start < heads.stop <= layout.num_kv_heads:
            raise ValueError(f"pages of {layout.num_kv_heads} kv heads have no {heads}")
        self.heads = heads
        self.num_kv_heads = len(heads)
        self._tile = layout.block_size * layout.head_dim  # sizes and offsets are in elements from here on
        self._page = layout.page_bytes // layout.dtype.itemsize
        # Of the first head that is shown.
        self._k_offset = heads.start * self._tile
        self._v_offset = self._k_offset + layout.v_offset // layout.dtype.itemsize
        self._pool = torch.frombuffer(buffer, dtype=self.dtype, count=num_blocks * layout.num_layers * self._page)
        self._layers = tuple(
            (self._view(i, self._k_offset), self._view(i, self._v_offset)) for i in range(layout.num_layers)
        )
        self._scales = tuple(
            (self._scale_view(i, layout.k_scale_offset), self._scale_view(i, layout.v_scale_offset))
            for i in range(layout.num_layers if layout.dtype.has_scales else 0)
        )
        # Every tile as a row of one matrix, so that gathering is a plain copy of rows. Pages are padded, so a row may
        # have to start within what would be the row before: rows are `unit` apart, and overlap when that is less
        # than a tile.
        self._unit = math.gcd(self._page, self._tile)
        num_rows = (self._pool.numel() - self._tile) // self._unit + 1
        self._rows = self._pool.as_strided((num_rows, self._tile), (self._unit, 1))
        self._scratch = torch.empty((2, 0, self._tile), dtype=self.dtype)
        self._head_units = (torch.arange(self.num_kv_heads) + heads.start) * (self._tile // self._unit)

    def k(self, layer: int) -> Tensor:
        """K of one layer: a view [num_blocks, num_kv_heads, block_size, head_dim] of the pool, not contiguous."""
        return self._layers[layer][0]

    def v(self, layer: int) -> Tensor:
        """V of one layer, like `k`."""
        return self._layers[layer][1]

    def k_scales(self, layer: int) -> Tensor:
        """Scales of K of one layer: a view fp16 [num_blocks, num_kv_heads, block_size]. Quantised pools have some."""
        return self._scales[layer][0]

    def v_scales(self, layer: int) -> Tensor:
        """Scales of V of one layer, like `k_scales`."""
        return self._scales[layer][1]

    @property
    def address(self) -> int:
        """Where the pool begins in this process's memory."""
        return self._pool.data_ptr()

    def tile_index(self, block_tables: Tensor) -> Tensor:
        """What `gather` needs to know of block tables [S, B] (any integer dtype): int64 [S * num_kv_heads * B].

        Compute it once a step; it serves every layer.
        """
        first = block_tables.to(torch.int64) * (self.layout.num_layers * self._page // self._unit)
        return (first[:, None, :] + self._head_units[:, None]).reshape(-1)

    def gather(self, layer: int, tile_index: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
        """Copies of K and V of S = `num_rows` sequences: each [S * num_kv_heads, B * block_size, head_dim],
        contiguous, valid until the next call: in the pool's dtype, or dequantised to fp32."""
        num_tiles = len(tile_index)
        if self._scratch.shape[1] < num_tiles:
            # Fresh memory costs more than the copy itself (a page fault every 4 KiB), so it is kept.
            with torch.inference_mode(False):  # an ordinary tensor serves callers in either mode
                self._scratch = torch.empty((2, num_tiles, self._tile), dtype=self.dtype)
        index = tile_index + layer * self._page // self._unit
        shape = (num_rows * self.num_kv_heads, -1, self.layout.head_dim)
        k = torch.index_select(self._rows, 0, index, out=self._scratch[0, :num_tiles])
        index += (self._v_offset - self._k_offset) // self._unit
        v = torch.index_select(self._rows, 0, index, out=self._scratch[1, :num_tiles])
        if not self._scales:
            return k.view(shape), v.view(shape)
        units = self.layout.num_layers * self._page // self._unit
        blocks, heads = tile_index // units, tile_index % units // (self._tile // self._unit) - self.heads.start
        k_scales, v_scales = (scales[blocks, heads].view(shape[0], -1) for scales in self._scales[layer])
        return dequantised(k.view(shape), k_scales), dequantised(v.view(shape), v_scales)

    def copy_blocks(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy whole blocks, all layers: (source, destination) ids. No block may be on both sides."""
        sources, destinations = zip(*pairs, strict=True)
        blocks = self._pool.view(self.num_blocks, -1)
        blocks[list(destinations)] = blocks[list(sources)]

    def _scale_view(self, layer: int, offset_bytes: int) -> Tensor:
        layout = self.layout
        page, size = layout.page_bytes // SCALE_BYTES, layout.block_size
        return self._pool.view(torch.float16).as_strided(
            (self.num_blocks, self.num_kv_heads, size),
            (layout.num_layers * page, size, 1),
            layer * page + offset_bytes // SCALE_BYTES + self.heads.start * size,
        )

    def _view(self, layer: int, offset: int) -> Tensor:
        layout = self.layout
        return self._pool.as_strided(
            (self.num_blocks, self.num_kv_heads, layout.block_size, layout.head_dim),
            (layout.num_layers * self._page, self._tile, layout.head_dim, 1),
            layer * self._page + offset,
        )

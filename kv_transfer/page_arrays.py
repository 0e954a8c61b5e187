"""Pages seen as arrays: [block][layer] and then, within a page, K and V, head, token, dim (see kv_cache/layout.py)."""

import numpy as np

from kv_cache.layout import SCALE_BYTES, KVCacheLayout
from kv_transfer.quantise import Array, Tiles, storage


class PageArrays:
    """The pages of `num_layers` layers of consecutive blocks in `memory`, which is exactly those pages long.

    They alias the memory and keep it mapped, so make them where they are used. Raises ValueError for another size.

    values    storage(dtype)  [blocks, layers, 2 (K, V), kv_heads, block_size, head_dim]
    scales    fp16            [blocks, layers, 2,        kv_heads, block_size], or None for a dtype without
    padding   uint8           [blocks, layers, bytes]
    """

    def __init__(self, layout: KVCacheLayout, memory: memoryview, num_layers: int) -> None:
        size = layout.page_bytes
        blocks, rest = divmod(memory.nbytes, num_layers * size)
        if rest:
            raise ValueError(f"{memory.nbytes} bytes are not blocks of {num_layers} pages of {size} bytes")
        heads, tokens, dim, item = layout.num_kv_heads, layout.block_size, layout.head_dim, layout.dtype.itemsize
        pages, page_strides = (blocks, num_layers), (num_layers * size, size)
        self.layout = layout
        self.values: Array = np.ndarray(
            (*pages, 2, heads, tokens, dim),
            storage(layout.dtype),
            memory,
            layout.k_offset,
            (*page_strides, layout.v_offset - layout.k_offset, tokens * dim * item, dim * item, item),
        )
        self.scales: Array | None = None
        if layout.dtype.has_scales:
            self.scales = np.ndarray(
                (*pages, 2, heads, tokens),
                np.float16,
                memory,
                layout.k_scale_offset,
                (*page_strides, layout.v_scale_offset - layout.k_scale_offset, tokens * SCALE_BYTES, SCALE_BYTES),
            )
        used = layout.v_scale_offset + (layout.v_scale_offset - layout.k_scale_offset)
        self.padding: Array = np.ndarray((*pages, size - used), np.uint8, memory, used, (*page_strides, 1))

    def tiles(self, blocks: slice, layers: slice, heads: slice) -> Tiles:
        """Some of the pages, and of them some heads."""
        part = (blocks, layers, slice(None), heads)
        return Tiles(self.layout.dtype, self.values[part], None if self.scales is None else self.scales[part])

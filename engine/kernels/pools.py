"""A pool of KV pages as kernels see it: elements of its dtype, and beside them its scales."""

from typing import Final

import torch
from torch import Tensor

from kv_cache.layout import SCALE_BYTES, KVCacheLayout, KVDtype

STORAGE: Final = {
    KVDtype.FP32: torch.float32,
    KVDtype.FP16: torch.float16,
    KVDtype.BF16: torch.bfloat16,
    KVDtype.FP8_E4M3: torch.uint8,
    KVDtype.INT8: torch.int8,
}
"""What a kernel loads and stores. By it kernels know the KV dtype: uint8 are the bits of fp8 e4m3, which not every
GPU has instructions for."""

_ALIGNMENT_BYTES = 16


def pool_views(pool: Tensor, layout: KVCacheLayout) -> tuple[Tensor, Tensor]:
    """A pool (uint8, one dimension) as (elements of STORAGE[layout.dtype], int16: the bits of its fp16 scales).

    Raises ValueError for memory that is not contiguous, not aligned to 16 bytes or not of whole pages.
    """
    if pool.dtype != torch.uint8 or pool.dim() != 1 or not pool.is_contiguous():
        raise ValueError(f"a pool must be a contiguous uint8 vector, not {pool.dtype} {list(pool.shape)}")
    if pool.numel() % layout.page_bytes or pool.data_ptr() % _ALIGNMENT_BYTES:
        raise ValueError(f"a pool must be of whole pages and aligned to 16 bytes, not {pool.numel()} bytes")
    return pool.view(STORAGE[layout.dtype]), pool.view(torch.int16)


def page_elements(layout: KVCacheLayout) -> int:
    """Elements from one page to the next."""
    return layout.page_bytes // layout.dtype.itemsize


def page_scales(layout: KVCacheLayout) -> int:
    """The same, counted in scales."""
    return layout.page_bytes // SCALE_BYTES


def first_scale(layout: KVCacheLayout) -> int:
    """Scales that would fit into a page before its first one; those of V follow those of K."""
    return layout.k_scale_offset // SCALE_BYTES

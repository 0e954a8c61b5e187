import mmap

import pytest
import torch

from engine.attention.quantised import dequantised, quantised
from engine.paged_cache import PagedCache
from kv_cache.layout import KVCacheLayout, KVDtype


def layout(dtype: KVDtype = KVDtype.FP32, head_dim: int = 16, block_size: int = 8) -> KVCacheLayout:
    return KVCacheLayout("m", "r", 3, 2, head_dim, block_size, dtype)


def numbered_cache(of: KVCacheLayout, num_blocks: int) -> PagedCache:
    cache = PagedCache(of, num_blocks)
    for layer in range(of.num_layers):
        for index, pages in enumerate((cache.k(layer), cache.v(layer))):
            pages.copy_(torch.arange(pages.numel()).view(pages.shape) % 199 + layer + 7 * index)
    return cache


@pytest.mark.parametrize("dtype", [KVDtype.FP32, KVDtype.FP16, KVDtype.BF16])
def test_the_views_lie_where_the_layout_says(dtype: KVDtype) -> None:
    of = layout(dtype)
    buffer = memoryview(mmap.mmap(-1, of.pool_bytes(4)))
    cache = PagedCache(of, 4, buffer)
    cache.k(1)[2, 1, 3, 5] = 1.0
    cache.v(2)[3, 0, 7, 15] = 1.0
    one = torch.tensor([1.0], dtype=cache.dtype).view(torch.uint8).numpy().tobytes()
    k_at = of.page_offset(2, 1) + of.k_offset + ((1 * 8 + 3) * 16 + 5) * dtype.itemsize
    v_at = of.page_offset(3, 2) + of.v_offset + (7 * 16 + 15) * dtype.itemsize
    assert bytes(buffer[k_at : k_at + dtype.itemsize]) == one
    assert bytes(buffer[v_at : v_at + dtype.itemsize]) == one
    assert bytes(buffer).count(0) == len(buffer) - 2 * (dtype.itemsize - one.count(0))


def test_an_own_pool_is_page_aligned_and_zero() -> None:
    cache = PagedCache(layout(), 3)
    assert cache.k(0).data_ptr() % 4096 == 0
    assert not cache.v(2).any()


@pytest.mark.parametrize("head_dim", [4, 16, 20, 5])  # 20 and 5: pages are padded, tiles do not divide them
@pytest.mark.parametrize("dtype", [KVDtype.FP32, KVDtype.BF16])
def test_gathering_copies_the_blocks_in_order(head_dim: int, dtype: KVDtype) -> None:
    of = layout(dtype, head_dim)
    cache = numbered_cache(of, 6)
    tables = torch.tensor([[4, 0, 5], [1, 4, 2]], dtype=torch.int32)
    index = cache.tile_index(tables)
    for layer in range(of.num_layers):
        k, v = cache.gather(layer, index, 2)
        for got, pages in ((k, cache.k(layer)), (v, cache.v(layer))):
            want = pages[tables.long()].permute(0, 2, 1, 3, 4).reshape(2 * 2, 3 * 8, head_dim)
            assert torch.equal(got, want)


def test_gathering_again_with_fewer_blocks_reuses_the_room() -> None:
    cache = numbered_cache(layout(), 6)
    big, _ = cache.gather(0, cache.tile_index(torch.tensor([[0, 1, 2, 3]])), 1)
    small, _ = cache.gather(0, cache.tile_index(torch.tensor([[5]])), 1)
    assert small.data_ptr() == big.data_ptr()
    assert torch.equal(small, cache.k(0)[5])


def test_copying_a_block_copies_all_its_layers_and_nothing_else() -> None:
    cache = numbered_cache(layout(), 5)
    before = [(cache.k(i).clone(), cache.v(i).clone()) for i in range(3)]
    cache.copy_blocks([(0, 3), (1, 4)])
    for i, (k, v) in enumerate(before):
        assert torch.equal(cache.k(i), k[[0, 1, 2, 0, 1]])
        assert torch.equal(cache.v(i), v[[0, 1, 2, 0, 1]])


def test_a_buffer_that_is_too_small_or_read_only_is_refused() -> None:
    size = layout().pool_bytes(2)
    with pytest.raises(ValueError, match=f"needs {size}"):
        PagedCache(layout(), 2, memoryview(bytearray(size - 1)))
    with pytest.raises(ValueError, match="writable"):
        PagedCache(layout(), 2, memoryview(bytes(size)))


@pytest.mark.parametrize("dtype", [KVDtype.INT8, KVDtype.FP8_E4M3])
def test_values_and_scales_lie_where_the_layout_says(dtype: KVDtype) -> None:
    of = layout(dtype)
    buffer = memoryview(mmap.mmap(-1, of.pool_bytes(4)))
    cache = PagedCache(of, 4, buffer)
    cache.v(1)[2, 1, 3, 5] = 7
    cache.k_scales(1)[2, 1, 3] = 1.5
    cache.v_scales(2)[3, 0, 7] = 1.5
    page = of.page_offset(2, 1)
    assert buffer[page + of.v_offset + (1 * 8 + 3) * 16 + 5] == 7
    assert bytes(buffer[page + of.k_scale_offset + 2 * (8 + 3) :][:2]) == b"\x00\x3e"
    assert bytes(buffer[of.page_offset(3, 2) + of.v_scale_offset + 2 * 7 :][:2]) == b"\x00\x3e"
    assert bytes(buffer).count(0) == len(buffer) - 3


@pytest.mark.parametrize("heads", [None, range(1, 2)])
@pytest.mark.parametrize("dtype", [KVDtype.INT8, KVDtype.FP8_E4M3])
def test_gathering_dequantises(dtype: KVDtype, heads: range | None) -> None:
    of = layout(dtype, head_dim=20)
    cache = PagedCache(of, 6, heads=heads)
    rows = torch.randn((2, 6, cache.num_kv_heads, 8, 20), generator=torch.Generator().manual_seed(1))
    stored = []
    for values, pages, scale_pages in zip(
        rows, (cache.k(1), cache.v(1)), (cache.k_scales(1), cache.v_scales(1)), strict=True
    ):
        codes, scales = quantised(values, cache.dtype)
        pages.copy_(codes)
        scale_pages.copy_(scales)
        stored.append(dequantised(codes, scales))
    tables = torch.tensor([[4, 0, 5], [1, 4, 2]])
    for got, values in zip(cache.gather(1, cache.tile_index(tables), 2), stored, strict=True):
        want = values[tables].permute(0, 2, 1, 3, 4).reshape(2 * cache.num_kv_heads, 3 * 8, 20)
        assert torch.equal(got, want)

"""The C kernels against the textbook, the torch backend and misuse; each instruction set that this machine has."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import engine.attention.native
from engine.attention.interface import AttentionBackend, LayerAttention
from engine.attention.native import NativeAttention, best_cpu_attention
from engine.attention.torch_paged import TorchAttention
from engine.batch import BatchRow, build_batch
from engine.native import Level, NativeKernels, NativeUnavailable, kernels
from engine.paged_cache import PagedCache
from kv_cache.layout import KVCacheLayout, KVDtype
from tests.support.paged_rows import Backend, PagedRows
from tests.support.toy_engine import poisoned_cache
from tests.support.toy_model import dense_attention


def usable_levels() -> list[Level]:
    try:
        best = kernels().level
    except NativeUnavailable:
        return []
    return [level for level in Level if level <= best]


LEVELS = usable_levels()
needs_library = pytest.mark.skipif(not LEVELS, reason="the C kernels are not built here")
each_level = pytest.mark.parametrize("level", LEVELS)
# Single tokens and chunks, at and around the edges of blocks, of 8, 16 and 64 keys, and of tiles of 96 query rows.
MIXED = [(0, 1), (7, 1), (15, 1), (64, 1), (150, 1), (0, 5), (63, 2), (60, 9), (0, 64), (131, 40)]


def at(level: Level) -> Backend:
    def backend(cache: PagedCache, layers: Sequence[LayerAttention]) -> AttentionBackend:
        return NativeAttention(cache, layers, level=level)

    return backend


@each_level
@pytest.mark.parametrize("dtype", list(KVDtype))
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (7, 1), (16, 1)])
def test_a_mixed_batch_attends_as_the_textbook_says(level: Level, dtype: KVDtype, heads: tuple[int, int]) -> None:
    PagedRows(heads, 16, MIXED, dtype, head_dim=64, backend=at(level)).check()


@each_level
@pytest.mark.parametrize("head_dim", [2, 6, 20, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [KVDtype.FP32, KVDtype.BF16, KVDtype.FP8_E4M3, KVDtype.INT8])
def test_any_even_head_dim(level: Level, head_dim: int, dtype: KVDtype) -> None:
    PagedRows((6, 2), 8, [(70, 1), (9, 1), (60, 9)], dtype, head_dim=head_dim, backend=at(level)).check()


@each_level
@pytest.mark.parametrize("window", [None, 1, 5, 64, 100])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize(("dtype", "head_dim"), [(KVDtype.INT8, 32), (KVDtype.INT8, 64), (KVDtype.BF16, 64)])
def test_windows_and_soft_caps(
    level: Level, window: int | None, soft_cap: float | None, dtype: KVDtype, head_dim: int
) -> None:
    look = LayerAttention(0.3, window, soft_cap)
    PagedRows((6, 2), 32, MIXED, dtype, head_dim=head_dim, look=look, backend=at(level)).check()


@each_level
@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("heads", [(2, 2), (3, 1), (5, 1), (7, 1)])
def test_int8_loses_no_more_than_sums_in_fp32_do(level: Level, head_dim: int, heads: tuple[int, int]) -> None:
    paged = PagedRows(heads, 16, [(0, 40), (0, 300)], KVDtype.INT8, head_dim=head_dim, backend=at(level))
    for q, v in zip(paged.q, paged.v, strict=True):
        # One element far above the others, and values of very different sizes.
        q[..., 5] *= 40
        v *= 10 ** torch.linspace(-3, 1, len(v))[:, None, None]
    paged.attend()
    for i, (_, length) in enumerate(paged.work):
        batch = build_batch([BatchRow([0], length - 1, paged.tables[i])], 16)
        got = paged.attention.attend(1, paged.q[i][-1:], batch).view(1, heads[0], head_dim)
        k, v = paged.as_stored(paged.k[i]).double(), paged.as_stored(paged.v[i]).double()
        want = dense_attention(paged.q[i][-1:].double(), k, v, length - 1, paged.look)
        assert (got - want).abs().max() < 1e-5 * v.abs().max()


@needs_library
@settings(deadline=None, max_examples=60)
@given(
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1), (14, 2), (12, 1)]),
    block_size=st.sampled_from([8, 16, 32, 64, 128]),
    dtype=st.sampled_from(list(KVDtype)),
    head_dim=st.sampled_from([8, 16, 18, 64]),
    window=st.none() | st.integers(1, 90),
    soft_cap=st.sampled_from([None, 1.0, 30.0]),
    level=st.sampled_from(LEVELS or [Level.PLAIN_C]),
    work=st.lists(st.tuples(st.integers(0, 140), st.integers(1, 50) | st.just(1)), min_size=1, max_size=5),
)
def test_any_batch_attends_as_the_textbook_says(
    heads: tuple[int, int],
    block_size: int,
    dtype: KVDtype,
    head_dim: int,
    window: int | None,
    soft_cap: float | None,
    level: Level,
    work: list[tuple[int, int]],
) -> None:
    look = LayerAttention(head_dim**-0.5, window, soft_cap)
    PagedRows(heads, block_size, work, dtype, head_dim=head_dim, look=look, backend=at(level)).check()


@each_level
@pytest.mark.parametrize("dtype", list(KVDtype))
@pytest.mark.parametrize("head_dim", [18, 64])
def test_the_pool_has_the_bytes_that_torch_stores(level: Level, dtype: KVDtype, head_dim: int) -> None:
    layout = KVCacheLayout("m", "r", 2, 3, head_dim, 8, dtype)
    caches = [poisoned_cache(layout, 5) for _ in range(2)]
    draw = torch.Generator().manual_seed(5)
    # Magnitudes from far below what fp16 can hold to far above it; a zero; an infinity and a NaN.
    k = torch.randn((29, 3, head_dim), generator=draw) * 10 ** torch.linspace(-9, 9, 29)[:, None, None]
    k[3, 1], k[4, 0, 7], k[5, 2, 9], v = 0.0, torch.inf, torch.nan, k.flip(0)
    batch = build_batch([BatchRow([0] * 18, 0, [3, 0, 4]), BatchRow([0] * 11, 5, [2, 1])], 8)
    looks = (LayerAttention(1.0),) * 2
    TorchAttention(caches[0], looks).store(1, k, v, batch)
    NativeAttention(caches[1], looks, level=level).store(1, k, v, batch)
    for block in range(5):
        for view in ("k", "v", "k_scales", "v_scales")[: 4 if dtype.has_scales else 2]:
            want, got = (getattr(cache, view)(1)[block] for cache in caches)
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
            if dtype is not KVDtype.FP32:
                assert got.isnan().any() or torch.equal(got.view(torch.uint8), want.view(torch.uint8))


@each_level
@pytest.mark.parametrize("head_dim", [2, 18, 64])
def test_heads_are_turned_in_place_within_a_wider_matrix(level: Level, head_dim: int) -> None:
    layout = KVCacheLayout("m", "r", 2, 2, head_dim, 8, KVDtype.FP32)
    caches = [poisoned_cache(layout, 3) for _ in range(2)]
    draw = torch.Generator().manual_seed(6)
    both = [torch.randn((20, 8, head_dim), generator=draw)]
    both.append(both[0].clone())
    angles = torch.rand((20, head_dim // 2), generator=draw) * 7
    rotation = torch.stack([angles.cos(), angles.sin()], dim=-1).flatten(1)
    batch = build_batch([BatchRow([0] * 20, 0, [2, 0, 1])], 8)
    looks = (LayerAttention(1.0),) * 2
    reference, native = TorchAttention(caches[0], looks), NativeAttention(caches[1], looks, level=level)
    for attention, qkv in zip((reference, native), both, strict=True):
        attention.rotate_and_store(0, qkv[:, :6], qkv[:, 6:], rotation, batch)
    torch.testing.assert_close(both[1], both[0], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(caches[1].k(0), caches[0].k(0), atol=1e-6, rtol=1e-6)
    assert torch.equal(caches[1].v(0), caches[0].v(0))


@each_level
def test_only_the_heads_of_the_cache_are_written_and_wiped(level: Level) -> None:
    layout = KVCacheLayout("m", "r", 2, 3, 16, 8, KVDtype.INT8)
    pools = [bytearray(b"\xff" * layout.pool_bytes(3)) for _ in range(2)]
    draw = torch.Generator().manual_seed(7)
    k, v = torch.randn((2, 11, 1, 16), generator=draw)
    batch = build_batch([BatchRow([0] * 11, 0, [2, 0])], 8)
    looks = (LayerAttention(1.0),) * 2
    for pool, backend in zip(pools, (TorchAttention, at(level)), strict=True):
        backend(PagedCache(layout, 3, memoryview(pool), range(1, 2)), looks).store(1, k, v, batch)
    assert pools[0] == pools[1]
    assert pools[0].count(0xFF) > len(pools[0]) // 2


@each_level
def test_rows_of_a_batch_do_not_influence_each_other(level: Level) -> None:
    together = PagedRows((6, 2), 16, MIXED, head_dim=64, backend=at(level))
    outputs = together.attend()
    for (start, new), table, q, got in zip(MIXED, together.tables, together.q, outputs, strict=True):
        alone = build_batch([BatchRow([0] * new, start, table)], 16)
        assert torch.equal(together.attention.attend(1, q, alone).view_as(got), got)


@each_level
@pytest.mark.parametrize("dtype", [KVDtype.FP32, KVDtype.BF16, KVDtype.FP8_E4M3, KVDtype.INT8])
@pytest.mark.parametrize("head_dim", [16, 64])
def test_a_nan_stays_in_its_sequence_and_is_not_hidden(level: Level, dtype: KVDtype, head_dim: int) -> None:
    paged = PagedRows((6, 2), 8, [(70, 1), (30, 1), (5, 40)], dtype, head_dim=head_dim, backend=at(level))
    paged.k[1][30, 0, 3] = torch.nan
    paged.v[2][44, 1, 3] = torch.nan
    first, second, third = paged.attend()
    assert not first.isnan().any()
    assert second[:, :3].isnan().all()
    assert not second[:, 3:].isnan().any()
    assert third[-1, 3:].isnan().any()
    assert not third[:, :3].isnan().any()


@each_level
@pytest.mark.parametrize("dtype", [KVDtype.FP32, KVDtype.BF16, KVDtype.INT8])
@pytest.mark.parametrize("of", ["q", "v"])
def test_a_nan_of_a_query_or_a_value_is_not_hidden_from_one_token(level: Level, dtype: KVDtype, of: str) -> None:
    paged = PagedRows((6, 2), 8, [(70, 1), (30, 1)], dtype, head_dim=64, backend=at(level))
    if of == "q":
        paged.q[1][0, 4, 3] = torch.nan
    else:
        paged.v[1][30, 1, 3] = torch.nan
    first, second = paged.attend()
    assert not first.isnan().any()
    assert not second[:, :3].isnan().any()
    assert second[:, 4, 3].isnan().all()


@needs_library
def test_a_plan_serves_all_layers_and_not_the_next_batch() -> None:
    paged = PagedRows((4, 2), 8, [(9, 1), (12, 5)], backend=NativeAttention)
    paged.check()
    paged.check()
    other = build_batch([BatchRow([0], 0, paged.tables[0])], 8)
    v = paged.random(1, 2)
    paged.attention.store(1, paged.random(1, 2), v, other)
    got = paged.attention.attend(1, paged.random(1, 4), other)
    torch.testing.assert_close(got.view(4, 8), v[0].repeat_interleave(2, dim=0))


@needs_library
def test_misuse_is_refused_before_c_is_entered() -> None:
    paged = PagedRows((4, 2), 8, [(0, 3)], backend=NativeAttention)
    attention, batch = paged.attention, paged.batch
    q, k = paged.random(3, 4), paged.random(3, 2)
    rotation = torch.zeros((3, 8))
    for wrong in (q.double(), q[:2], q[:, :, :6], q.transpose(0, 1).contiguous().transpose(0, 1), q[0]):
        with pytest.raises(ValueError, match="q "):
            attention.attend(1, wrong, batch)
        with pytest.raises(ValueError, match="k "):
            attention.rotate_and_store(1, wrong, k, rotation, batch)
    with pytest.raises(ValueError, match="3 q heads over 2"):
        attention.attend(1, q[:, :3], batch)
    for layer in (-1, 2):
        with pytest.raises(ValueError, match="no layer"):
            attention.attend(layer, q, batch)
    for wrong in (rotation[:2], rotation.double(), torch.zeros((3, 16))[:, ::2]):
        with pytest.raises(ValueError, match="rotation"):
            attention.rotate_and_store(1, q, k, wrong, batch)
    for wrong_k, wrong_v in ((q, k), (k, q), (k[:, :1], k[:, :1])):
        with pytest.raises(ValueError, match="2 kv heads"):
            attention.store(1, wrong_k, wrong_v, batch)


@needs_library
def test_layers_that_do_not_fit_the_pool_are_refused() -> None:
    cache = PagedCache(KVCacheLayout("m", "r", 2, 2, 8, 8, KVDtype.FP32), 2)
    with pytest.raises(ValueError, match="1 layers given for a pool of 2"):
        NativeAttention(cache, (LayerAttention(1.0),))
    with pytest.raises(ValueError, match="window of 0"):
        NativeAttention(cache, (LayerAttention(1.0, 0),) * 2)


def test_the_best_backend_is_native_where_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = PagedCache(KVCacheLayout("m", "r", 2, 2, 8, 8, KVDtype.FP32), 2)
    looks = (LayerAttention(1.0),) * 2
    assert isinstance(best_cpu_attention(cache, looks), NativeAttention if LEVELS else TorchAttention)

    def missing() -> NativeKernels:
        raise NativeUnavailable("no compiler")

    monkeypatch.setattr(engine.attention.native, "kernels", missing)
    assert isinstance(best_cpu_attention(cache, looks), TorchAttention)


def test_a_library_that_is_missing_or_no_library_is_named_so(tmp_path: Path) -> None:
    with pytest.raises(NativeUnavailable, match="not built"):
        NativeKernels(tmp_path / "kernels.so")
    (tmp_path / "kernels.so").write_text("no library")
    with pytest.raises(NativeUnavailable, match="not built"):
        NativeKernels(tmp_path / "kernels.so")

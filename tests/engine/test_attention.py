import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import engine.attention.torch_paged
from engine.attention.interface import LayerAttention
from engine.attention.torch_paged import TorchAttention
from engine.batch import Batch, BatchRow, build_batch
from kv_cache.layout import KVDtype
from tests.support.paged_rows import PagedRows
from tests.support.toy_model import dense_attention

HEAD_DIM = 8

HEADS = [(4, 4), (8, 2), (6, 3), (4, 1)]


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_a_mixed_batch_attends_as_the_textbook_says(heads: tuple[int, int], block_size: int) -> None:
    size = block_size
    PagedRows(
        heads, size, [(0, 1), (0, 5), (size, 1), (size - 1, 1), (size - 1, 2), (0, size), (3 * size + 2, 7)]
    ).check()


@settings(deadline=None, max_examples=25)
@given(
    heads=st.sampled_from(HEADS),
    block_size=st.sampled_from([8, 16, 32]),
    work=st.lists(st.tuples(st.integers(0, 70), st.integers(1, 20) | st.just(1)), min_size=1, max_size=7),
)
def test_any_batch_attends_as_the_textbook_says(
    heads: tuple[int, int], block_size: int, work: list[tuple[int, int]]
) -> None:
    PagedRows(heads, block_size, work).check()


def test_rows_of_very_different_lengths_are_read_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.attention.torch_paged, "_GROUP_TOKENS", 64)
    PagedRows((4, 2), 8, [(n, 1) for n in (1, 300, 3, 40, 41, 42, 43, 0, 17, 299)]).check()


@pytest.mark.parametrize("dtype", [KVDtype.FP16, KVDtype.BF16, KVDtype.INT8, KVDtype.FP8_E4M3])
def test_a_smaller_pool_is_read_in_fp32(dtype: KVDtype) -> None:
    PagedRows((4, 2), 8, [(9, 1), (0, 6), (12, 5)], dtype).check()


@pytest.mark.parametrize("window", [None, 1, 3, 8, 11, 40])
@pytest.mark.parametrize("soft_cap", [None, 1.5])
def test_windows_and_soft_caps_are_the_textbooks(window: int | None, soft_cap: float | None) -> None:
    look = LayerAttention(0.7, window, soft_cap)
    PagedRows((6, 2), 8, [(9, 1), (0, 6), (12, 5), (30, 1), (33, 1), (21, 13), (0, 1)], look=look).check()


def test_each_layer_looks_back_in_its_own_way() -> None:
    paged = PagedRows((4, 2), 8, [(20, 1), (3, 9)])
    near, far = LayerAttention(0.5, 4), LayerAttention(0.5)
    attention = TorchAttention(paged.cache, (near, far))
    k, v, q = paged.random(10, 2), paged.random(10, 2), paged.random(10, 4)
    batch = build_batch([BatchRow([0] * 10, 0, paged.tables[0])], 8)
    for layer, look in enumerate((near, far)):
        attention.store(layer, k, v, batch)
        got = attention.attend(layer, q, batch)
        torch.testing.assert_close(got.view_as(q), dense_attention(q, k, v, 0, look))


def test_the_rest_of_an_opened_block_has_scales_of_zero() -> None:
    paged = PagedRows((4, 2), 8, [(0, 3)], KVDtype.INT8)
    paged.attend()
    block = paged.tables[0][0]
    for scales in (paged.cache.k_scales(1), paged.cache.v_scales(1)):
        assert scales[block, :, :3].all()
        assert not scales[block, :, 3:].any()


def test_one_plan_serves_all_layers_and_not_the_next_batch() -> None:
    paged = PagedRows((4, 2), 8, [(9, 1), (12, 5)])
    paged.check()
    paged.check()
    other = build_batch([BatchRow([0], 0, paged.tables[0])], 8)
    k = paged.random(1, 2)
    v = paged.random(1, 2)
    paged.attention.store(1, k, v, other)
    got = paged.attention.attend(1, paged.random(1, 4), other)
    torch.testing.assert_close(got.view(4, HEAD_DIM), v[0].repeat_interleave(2, dim=0))


def test_what_a_former_owner_left_behind_the_context_is_wiped() -> None:
    paged = PagedRows((4, 2), 8, [(0, 3)])
    paged.attend()
    block = paged.tables[0][0]
    for pages in (paged.cache.k(1), paged.cache.v(1)):
        assert not pages[block, :, :3].isnan().any()
        assert not pages[block, :, 3:].any()


def test_only_the_blocks_of_the_batch_are_written() -> None:
    paged = PagedRows((4, 2), 8, [(0, 3), (5, 9)])
    paged.attend()
    written = {block for table in paged.tables for block in table}
    (untouched,) = set(range(paged.cache.num_blocks)) - written
    assert paged.cache.k(1)[untouched].isnan().all()
    assert paged.cache.k(0).isnan().all()


def test_attention_over_a_swapped_block_differs() -> None:
    paged = PagedRows((4, 2), 8, [(24, 1)])
    (right,) = paged.attend()
    table = paged.tables[0]
    swapped: Batch = build_batch([BatchRow([0], 24, [table[1], table[0], *table[2:]])], 8)
    # The same keys in another order give the same sum: K alone is swapped, as in a hand-off gone wrong.
    paged.cache.k(1)[[table[0], table[1]]] = paged.cache.k(1)[[table[1], table[0]]]
    wrong = paged.attention.attend(1, paged.q[0], build_batch([BatchRow([0], 24, table)], 8))
    assert not torch.allclose(wrong.view_as(right), right, atol=1e-2)
    paged.cache.v(1)[[table[0], table[1]]] = paged.cache.v(1)[[table[1], table[0]]]
    torch.testing.assert_close(paged.attention.attend(1, paged.q[0], swapped).view_as(right), right)


def test_heads_that_do_not_divide_are_refused() -> None:
    paged = PagedRows((4, 2), 8, [(0, 1)])
    with pytest.raises(ValueError, match="3 q heads"):
        paged.attention.attend(1, paged.random(1, 3), paged.batch)

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import engine.attention.torch_paged
from engine.attention.interface import LayerAttention
from engine.attention.torch_paged import TorchAttention
from engine.batch import Batch, BatchRow, build_batch
from engine.paged_cache import PagedCache
from kv_cache.layout import KVCacheLayout, KVDtype
from tests.support.toy_engine import poisoned_cache
from tests.support.toy_model import dense_attention

HEAD_DIM = 8


class Paged:
    """Sequences with random K and V in a poisoned pool; the first tokens of each are stored by a step of its own."""

    def __init__(
        self, heads: tuple[int, int], block_size: int, work: list[tuple[int, int]], dtype: KVDtype = KVDtype.FP32
    ) -> None:
        self.num_q_heads, self.num_kv_heads = heads
        self.work = work  # (start, new tokens) a sequence
        self.draw = torch.Generator().manual_seed(len(work) * 1000 + block_size)
        layout = KVCacheLayout("m", "r", 2, self.num_kv_heads, HEAD_DIM, block_size, dtype)
        needs = [layout.blocks_for(start + new) for start, new in work]
        self.cache: PagedCache = poisoned_cache(layout, sum(needs) + 1)
        blocks = torch.randperm(sum(needs) + 1, generator=self.draw).tolist()
        self.tables = [[blocks.pop() for _ in range(need)] for need in needs]
        self.attention = TorchAttention(self.cache, (LayerAttention(HEAD_DIM**-0.5),) * 2)
        self.k = [self.random(start + new, self.num_kv_heads) for start, new in work]
        self.v = [self.random(start + new, self.num_kv_heads) for start, new in work]
        self.q = [self.random(new, self.num_q_heads) for _, new in work]
        for i, (start, _) in enumerate(work):
            if start:
                batch = build_batch([BatchRow([0] * start, 0, self.tables[i])], block_size)
                self.attention.store(1, self.k[i][:start], self.v[i][:start], batch)
        self.batch = build_batch(
            [BatchRow([0] * n, s, t) for (s, n), t in zip(work, self.tables, strict=True)], block_size
        )

    def random(self, tokens: int, heads: int) -> Tensor:
        return torch.randn((tokens, heads, HEAD_DIM), generator=self.draw)

    def new_tokens(self, tensors: list[Tensor], whole: bool) -> Tensor:
        """The new tokens' part of each sequence's tensor, in the order of the batch's rows."""
        return torch.cat([tensors[i][self.work[i][0] :] if whole else tensors[i] for i in self.batch.row_order])

    def attend(self) -> list[Tensor]:
        """Outputs a sequence, in the order of `work`."""
        self.attention.store(1, self.new_tokens(self.k, True), self.new_tokens(self.v, True), self.batch)
        out = self.attention.attend(1, self.new_tokens(self.q, False), self.batch)
        assert out.shape == (self.batch.num_tokens, self.num_q_heads * HEAD_DIM)
        parts = out.view(-1, self.num_q_heads, HEAD_DIM).split(list(self.batch.query_lens))
        ordered = dict(zip(self.batch.row_order, parts, strict=True))
        return [ordered[i] for i in range(len(self.work))]

    def check(self, tolerance: float = 1e-5) -> None:
        for i, got in enumerate(self.attend()):
            want = dense_attention(self.q[i], self.k[i], self.v[i], self.work[i][0])
            torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


HEADS = [(4, 4), (8, 2), (6, 3), (4, 1)]


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_a_mixed_batch_attends_as_the_textbook_says(heads: tuple[int, int], block_size: int) -> None:
    size = block_size
    Paged(heads, size, [(0, 1), (0, 5), (size, 1), (size - 1, 1), (size - 1, 2), (0, size), (3 * size + 2, 7)]).check()


@settings(deadline=None, max_examples=25)
@given(
    heads=st.sampled_from(HEADS),
    block_size=st.sampled_from([8, 16, 32]),
    work=st.lists(st.tuples(st.integers(0, 70), st.integers(1, 20) | st.just(1)), min_size=1, max_size=7),
)
def test_any_batch_attends_as_the_textbook_says(
    heads: tuple[int, int], block_size: int, work: list[tuple[int, int]]
) -> None:
    Paged(heads, block_size, work).check()


def test_rows_of_very_different_lengths_are_read_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.attention.torch_paged, "_GROUP_TOKENS", 64)
    Paged((4, 2), 8, [(n, 1) for n in (1, 300, 3, 40, 41, 42, 43, 0, 17, 299)]).check()


@pytest.mark.parametrize(("dtype", "tolerance"), [(KVDtype.FP16, 5e-3), (KVDtype.BF16, 4e-2)])
def test_a_half_precision_pool_is_read_in_fp32(dtype: KVDtype, tolerance: float) -> None:
    Paged((4, 2), 8, [(9, 1), (0, 6), (12, 5)], dtype).check(tolerance)


def test_one_plan_serves_all_layers_and_not_the_next_batch() -> None:
    paged = Paged((4, 2), 8, [(9, 1), (12, 5)])
    paged.check()
    paged.check()
    other = build_batch([BatchRow([0], 0, paged.tables[0])], 8)
    k = paged.random(1, 2)
    v = paged.random(1, 2)
    paged.attention.store(1, k, v, other)
    got = paged.attention.attend(1, paged.random(1, 4), other)
    torch.testing.assert_close(got.view(4, HEAD_DIM), v[0].repeat_interleave(2, dim=0))


def test_what_a_former_owner_left_behind_the_context_is_wiped() -> None:
    paged = Paged((4, 2), 8, [(0, 3)])
    paged.attend()
    block = paged.tables[0][0]
    for pages in (paged.cache.k(1), paged.cache.v(1)):
        assert not pages[block, :, :3].isnan().any()
        assert not pages[block, :, 3:].any()


def test_only_the_blocks_of_the_batch_are_written() -> None:
    paged = Paged((4, 2), 8, [(0, 3), (5, 9)])
    paged.attend()
    written = {block for table in paged.tables for block in table}
    (untouched,) = set(range(paged.cache.num_blocks)) - written
    assert paged.cache.k(1)[untouched].isnan().all()
    assert paged.cache.k(0).isnan().all()


def test_attention_over_a_swapped_block_differs() -> None:
    paged = Paged((4, 2), 8, [(24, 1)])
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
    paged = Paged((4, 2), 8, [(0, 1)])
    with pytest.raises(ValueError, match="3 q heads"):
        paged.attention.attend(1, paged.random(1, 3), paged.batch)

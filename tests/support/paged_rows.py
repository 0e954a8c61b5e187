"""Sequences in a poisoned pool, attended by a backend and by the textbook."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.attention.interface import AttentionBackend, LayerAttention
from engine.attention.quantised import dequantised, quantised
from engine.attention.torch_paged import TorchAttention
from engine.batch import BatchRow, build_batch
from engine.paged_cache import PagedCache
from kv_cache.layout import KVCacheLayout, KVDtype
from tests.support.toy_engine import poisoned_cache
from tests.support.toy_model import dense_attention

Backend = Callable[[PagedCache, Sequence[LayerAttention]], AttentionBackend]


class PagedRows:
    """Sequences with random K and V in a pool of NaN; the first tokens of each are stored by a step of its own."""

    def __init__(
        self,
        heads: tuple[int, int],
        block_size: int,
        work: list[tuple[int, int]],
        dtype: KVDtype = KVDtype.FP32,
        *,
        head_dim: int = 8,
        look: LayerAttention | None = None,
        backend: Backend = TorchAttention,
    ) -> None:
        """heads: of q and of kv. work: (tokens stored before, new tokens) a sequence."""
        self.num_q_heads, self.num_kv_heads = heads
        self.work = work
        self.head_dim = head_dim
        self.look = look or LayerAttention(head_dim**-0.5)
        self.draw = torch.Generator().manual_seed(len(work) * 1000 + block_size)
        layout = KVCacheLayout("m", "r", 2, self.num_kv_heads, head_dim, block_size, dtype)
        needs = [layout.blocks_for(start + new) for start, new in work]
        self.cache: PagedCache = poisoned_cache(layout, sum(needs) + 1)
        blocks = torch.randperm(sum(needs) + 1, generator=self.draw).tolist()
        self.tables = [[blocks.pop() for _ in range(need)] for need in needs]
        self.attention = backend(self.cache, (self.look,) * 2)
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
        """[tokens, heads, head_dim]."""
        return torch.randn((tokens, heads, self.head_dim), generator=self.draw)

    def new_tokens(self, tensors: list[Tensor], whole: bool) -> Tensor:
        """The new tokens' part of each sequence's tensor, in the order of the batch's rows."""
        return torch.cat([tensors[i][self.work[i][0] :] if whole else tensors[i] for i in self.batch.row_order])

    def attend(self) -> list[Tensor]:
        """Store the new tokens, and attend. Outputs a sequence, in the order of `work`."""
        self.attention.store(1, self.new_tokens(self.k, True), self.new_tokens(self.v, True), self.batch)
        out = self.attention.attend(1, self.new_tokens(self.q, False), self.batch)
        assert out.shape == (self.batch.num_tokens, self.num_q_heads * self.head_dim)
        parts = out.clone().view(-1, self.num_q_heads, self.head_dim).split(list(self.batch.query_lens))
        ordered = dict(zip(self.batch.row_order, parts, strict=True))
        return [ordered[i] for i in range(len(self.work))]

    def check(self, tolerance: float = 1e-5) -> None:
        """The outputs are the textbook's for K and V as the pool can hold them."""
        for i, got in enumerate(self.attend()):
            k, v = self.as_stored(self.k[i]), self.as_stored(self.v[i])
            want = dense_attention(self.q[i], k, v, self.work[i][0], self.look)
            torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)

    def as_stored(self, rows: Tensor) -> Tensor:
        """fp32 rows as they read back from the pool."""
        if self.cache.layout.dtype.has_scales:
            return dequantised(*quantised(rows, self.cache.dtype))
        return rows.to(self.cache.dtype).float()

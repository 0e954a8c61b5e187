"""The attention kernels by themselves, on one layer's pages of random KV whose blocks lie in no order."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bench.common.harness import BenchmarkError
from engine.attention.interface import LayerAttention
from engine.attention.quantised import dequantised, quantised
from engine.kernels.decode_attention import DecodeRows, decode_attention, decode_scratch, plan_decode
from engine.kernels.prefill_attention import ChunkRows, prefill_attention
from engine.kernels.store_kv import store_kv
from kv_cache.layout import SCALE_BYTES, KVCacheLayout, KVDtype

_STORED_AT_ONCE = 16384
_CODES = {KVDtype.INT8: torch.int8, KVDtype.FP8_E4M3: torch.uint8}
_TOLERANCE = 2e-2  # Outputs are bf16.


@dataclass(frozen=True, slots=True)
class Shape:
    """Sequences of equal context in a layer."""

    rows: int
    context: int
    dtype: KVDtype
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16

    @property
    def layout(self) -> KVCacheLayout:
        """Of a pool with one layer."""
        return KVCacheLayout("bench", "0", 1, self.num_kv_heads, self.head_dim, self.block_size, self.dtype)

    @property
    def decode_bytes(self) -> int:
        """K, V and scales that one token of each sequence looks back at."""
        scale = SCALE_BYTES if self.dtype.has_scales else 0
        per_token = self.num_kv_heads * 2 * (self.head_dim * self.dtype.itemsize + scale)
        return self.rows * self.context * per_token

    def prefill_flop(self, chunk: int) -> int:
        """Of both products for the last `chunk` tokens of each sequence, each with itself and all before it."""
        seen = sum(range(self.context - chunk + 1, self.context + 1))
        return self.rows * self.num_q_heads * 4 * self.head_dim * seen

    @property
    def spec(self) -> LayerAttention:
        """Plain attention."""
        return LayerAttention(self.head_dim**-0.5)


class PagedLayer:
    """A pool with all contexts stored. What is queued goes to the current stream."""

    def __init__(self, shape: Shape, device: torch.device, seed: int) -> None:
        self.shape = shape
        self._generator = torch.Generator(device).manual_seed(seed)
        per_row = -(-shape.context // shape.block_size)
        num_blocks = shape.rows * per_row
        self.pool = torch.zeros(shape.layout.pool_bytes(num_blocks), dtype=torch.uint8, device=device)
        order = torch.randperm(num_blocks, generator=self._generator, device=device)
        self.block_tables = order.to(torch.int32).view(shape.rows, per_row)
        self.context_lens = torch.full((shape.rows,), shape.context, dtype=torch.int32, device=device)
        self._first: tuple[Tensor, Tensor] | None = None
        for row in range(shape.rows):
            for start in range(0, shape.context, _STORED_AT_ONCE):
                self._store(row, start, min(shape.context, start + _STORED_AT_ONCE))

    def random_queries(self, count: int) -> Tensor:
        """bf16 [count, num_q_heads, head_dim]."""
        size = (count, self.shape.num_q_heads, self.shape.head_dim)
        return self._random(size)

    def check(self, q: Tensor, out: Tensor, last: int) -> None:
        """Raises BenchmarkError unless `out`, of q [n, heads, head_dim], is attention over the first row's first
        `last` tokens and, for each query before the last, one token less."""
        shape, (k, v) = self.shape, self._of_first_row()
        group = shape.num_q_heads // shape.num_kv_heads
        k, v = (each[:last].repeat_interleave(group, dim=1) for each in (k, v))
        scores = torch.einsum("qhd,thd->hqt", q.float(), k) * shape.spec.scale
        seen = torch.arange(last, device=q.device) <= torch.arange(last - len(q), last, device=q.device).unsqueeze(1)
        right = torch.einsum("hqt,thd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)
        worst = float((out.float() - right).abs().max() / right.abs().max())
        if not worst < _TOLERANCE:
            raise BenchmarkError(f"attention over {shape} is off by {worst:.3g} of the largest value")

    def _store(self, row: int, start: int, end: int) -> None:
        shape = self.shape
        k, v = (self._random((end - start, shape.num_kv_heads, shape.head_dim)) for _ in range(2))
        positions = torch.arange(start, end, device=self.pool.device)
        blocks = self.block_tables[row].long()[positions // shape.block_size]
        store_kv(self.pool, shape.layout, 0, k, v, blocks * shape.block_size + positions % shape.block_size)
        if row == 0:
            before = self._first or (k[:0], v[:0])
            self._first = (torch.cat((before[0], k)), torch.cat((before[1], v)))

    def _of_first_row(self) -> tuple[Tensor, Tensor]:
        """fp32, as they are read from the pool."""
        k, v = self._first or (torch.empty(0), torch.empty(0))
        codes = _CODES.get(self.shape.dtype)
        if codes is None:
            return k.float(), v.float()
        return dequantised(*quantised(k, codes)), dequantised(*quantised(v, codes))

    def _random(self, size: tuple[int, ...]) -> Tensor:
        return torch.randn(size, generator=self._generator, device=self.pool.device).to(torch.bfloat16)


class DecodeKernel:
    """One token of each sequence over its context."""

    def __init__(self, layer: PagedLayer) -> None:
        shape = layer.shape
        self._layer = layer
        self._q = layer.random_queries(shape.rows)
        self._out = torch.empty_like(self._q)
        self._rows: DecodeRows = plan_decode(layer.block_tables, layer.context_lens, None, shape.layout)
        self._scratch = decode_scratch(shape.rows, shape.num_q_heads, shape.layout, layer.pool.device)

    def __call__(self) -> Tensor:
        """Queue it."""
        shape = self._layer.shape
        decode_attention(self._layer.pool, shape.layout, 0, self._q, self._rows, shape.spec, self._scratch, self._out)
        return self._out

    def check(self) -> None:
        """Raises BenchmarkError unless the first row is right."""
        self._layer.check(self._q[:1], self()[:1], self._layer.shape.context)


class PrefillKernel:
    """The last `chunk` tokens of each sequence over its context."""

    def __init__(self, layer: PagedLayer, chunk: int) -> None:
        rows = layer.shape.rows
        self._layer, self._chunk = layer, chunk
        self._q = layer.random_queries(rows * chunk)
        self._out = torch.empty_like(self._q)
        query_start = torch.arange(rows + 1, dtype=torch.int32, device=layer.pool.device) * chunk
        self._rows = ChunkRows(layer.block_tables, layer.context_lens, query_start)

    def __call__(self) -> Tensor:
        """Queue it."""
        shape = self._layer.shape
        prefill_attention(self._layer.pool, shape.layout, 0, self._q, self._rows, len(self._q), shape.spec, self._out)
        return self._out

    def check(self) -> None:
        """Raises BenchmarkError unless the last tokens of the first row are right."""
        count = min(16, self._chunk)
        part = slice(self._chunk - count, self._chunk)
        self._layer.check(self._q[part], self()[part], self._layer.shape.context)

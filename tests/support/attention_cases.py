"""Paged attention on a device compared with the textbook's on the host.

Run as a program with a file for the answers and "decode" or "prefill", it computes all cases of that kernel under
Triton's interpreter, which must be chosen before the kernels are imported: TRITON_INTERPRET=1 in the environment. The
answers are a dict of outputs by name.
"""

import math
import sys
import tempfile
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from engine.attention.interface import LayerAttention
from kv_cache.layout import KVCacheLayout, KVDtype
from kv_transfer.page_arrays import PageArrays
from kv_transfer.quantise import Tiles, convert

LAYER = 1
_MANY_LAYERS = 1 << 16
_FP32, _FP16, _BF16 = torch.float32, torch.float16, torch.bfloat16
# The interpreter rounds to bf16 towards zero.
_TOLERANCES = {_FP32: 4e-6, _FP16: 2e-3, _BF16: 2**-7}
_QUANTISED = (KVDtype.INT8, KVDtype.FP8_E4M3)

Work = tuple[tuple[int, int], ...]
"""(tokens before, new tokens) of each sequence."""

# A first token, two pieces of which the second is short, a context that ends within a block.
_SINGLES: Work = ((0, 1), (131, 1), (42, 1))
# A whole prompt, a chunk over a prefix of more than a tile, one token.
_CHUNKS: Work = ((0, 5), (70, 29), (17, 1))


@dataclass(frozen=True, slots=True)
class Case:
    """`num_layers`: a block of many layers is far from the next. `by_instruction`: fp8 is converted as on sm_90."""

    kept: KVDtype
    dtype: torch.dtype = _BF16
    work: Work = _SINGLES
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 64
    block_size: int = 16
    window: int | None = None
    soft_cap: float | None = None
    num_layers: int = 2
    by_instruction: bool = False

    @property
    def layout(self) -> KVCacheLayout:
        return KVCacheLayout("m", "1", self.num_layers, self.heads[1], self.head_dim, self.block_size, self.kept)

    @property
    def spec(self) -> LayerAttention:
        return LayerAttention(self.head_dim**-0.5, self.window, self.soft_cap)


def _shapes(work: Work) -> dict[str, Case]:
    """What does not depend on how a kernel goes through its work."""
    return {
        **{f"{kept.value} for bf16": Case(kept, work=work) for kept in KVDtype},
        **{f"{kept.value} for fp16": Case(kept, _FP16, work) for kept in (KVDtype.FP16, *_QUANTISED)},
        **{f"{kept.value} for fp32": Case(kept, _FP32, work) for kept in (KVDtype.FP32, *_QUANTISED)},
        "fp8 converted by instruction": Case(KVDtype.FP8_E4M3, _FP32, work, (2, 1), by_instruction=True),
        "blocks of 8": Case(KVDtype.FP32, _FP32, work, (2, 1), block_size=8),
        "blocks of 128": Case(KVDtype.INT8, _FP32, work, (2, 1), block_size=128),
        "7 q heads for 1": Case(KVDtype.FP32, _FP32, work, (7, 1)),
        "as many q heads as kv heads": Case(KVDtype.FP32, _FP32, work, (3, 3)),
        "head_dim 80": Case(KVDtype.INT8, _FP32, work, (2, 1), 80),
        "head_dim 96": Case(KVDtype.FP32, _FP32, work, (3, 1), 96),
        "head_dim 256": Case(KVDtype.FP8_E4M3, _FP32, work, (2, 1), 256),
        "a window": Case(KVDtype.FP32, _FP32, work, (2, 1), window=37),
        "a window over codes": Case(KVDtype.INT8, _FP32, work, (2, 1), window=64),
        "a window of one token": Case(KVDtype.FP32, _FP32, work, (2, 1), window=1),
        "a window that all fit into": Case(KVDtype.FP32, _FP32, work, (2, 1), window=500),
        "a soft cap": Case(KVDtype.FP32, _FP32, work, (2, 1), soft_cap=1.5),
        "a soft cap over codes in a window": Case(KVDtype.FP8_E4M3, _FP32, work, (2, 1), window=50, soft_cap=1.5),
        "offsets beyond 32 bits": Case(
            KVDtype.INT8, _FP32, ((40, work[0][1]),), (4, 4), 128, 16, num_layers=_MANY_LAYERS
        ),
    }


DECODE_CASES = {
    **_shapes(_SINGLES),
    "40 q heads for 1": Case(KVDtype.FP32, _FP32, heads=(40, 1)),
    "no context": Case(KVDtype.FP32, _FP32, ((-1, 1), (20, 1), (-1, 1))),
    "many pieces": Case(KVDtype.FP32, _FP32, ((900, 1), (0, 1)), (2, 1), 16, 64),
    "more rows than a program looks at once": Case(
        KVDtype.INT8, _FP32, ((4, 1), *((-1, 1),) * 130, (3, 1)), (1, 1), 16, 8
    ),
}
PREFILL_CASES = {
    **_shapes(_CHUNKS),
    "a group that does not divide a tile": Case(KVDtype.FP32, _BF16, ((7, 45),), (9, 3)),
    "a group larger than a tile": Case(KVDtype.FP32, _FP32, ((7, 3),), (40, 1)),
    "one token each": Case(KVDtype.FP32, _FP32, ((0, 1), (70, 1), (3, 1))),
    "many tiles": Case(KVDtype.FP32, _FP32, ((5, 50), (0, 100)), (2, 1), 16),
}


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """What a case's kernel takes, and K and V of each sequence fp32 [2, heads, tokens, head_dim] as they read back."""

    pool: Tensor
    q: Tensor
    block_tables: Tensor
    context_lens: Tensor
    query_start: Tensor
    kv: list[Tensor]


def inputs(case: Case) -> Inputs:
    """A pool in which nothing is but what must be seen: no tokens behind a context or before a window."""
    random = np.random.default_rng(11)
    layout = case.layout
    needs = [max(1, layout.blocks_for(start + new)) for start, new in case.work]
    spare = 2
    blocks = list(spare + random.permutation(sum(needs)))
    pool = _pool(case, spare + sum(needs))
    tables = np.zeros((len(needs), max(needs)), np.int32)
    kv = []
    for table, need, (start, new) in zip(tables, needs, case.work, strict=True):
        table[:need] = [blocks.pop() for _ in range(need)]
        first = 0 if case.window is None else max(0, start - case.window + 1)
        kv.append(_stored(layout, pool, table, range(first, start + new), random))
    num_tokens = sum(new for _, new in case.work)
    # Of one wider matrix, as the q of a fused projection is.
    q = random.standard_normal((num_tokens, case.heads[0] + 1, case.head_dim), np.float32) * np.float32(2)
    return Inputs(
        pool,
        torch.from_numpy(q).to(case.dtype)[:, : case.heads[0]],
        torch.from_numpy(tables),
        torch.tensor([start + new for start, new in case.work], dtype=torch.int32),
        torch.tensor([0, *np.cumsum([new for _, new in case.work])], dtype=torch.int32),
        kv,
    )


def _pool(case: Case, num_blocks: int) -> Tensor:
    """Bytes 0xFF are NaN in all floats and scales. A large pool is a file of which only what is written takes room."""
    size_bytes = case.layout.pool_bytes(num_blocks)
    if case.num_layers < _MANY_LAYERS:
        return torch.full((size_bytes,), 0xFF, dtype=torch.uint8)
    with tempfile.TemporaryDirectory() as folder:
        return torch.from_file(f"{folder}/pool", shared=True, size=size_bytes, dtype=torch.uint8)


def _stored(
    layout: KVCacheLayout, pool: Tensor, table: np.ndarray, tokens: range, random: np.random.Generator
) -> Tensor:
    """Random K and V of these tokens into their slots. Some are large, some tiny, and some all zero."""
    shape = (2, layout.num_kv_heads, tokens.stop, layout.head_dim)
    kept = np.zeros(shape, np.float32)
    pages = PageArrays(layout, memoryview(pool.numpy()), layout.num_layers)
    for token in tokens:
        size = random.choice(np.array([0.0, 1e-3, 1.0, 1.0, 3.0], np.float32), (*shape[:2], 1))
        row = random.standard_normal((*shape[:2], shape[3]), np.float32) * size
        place = (table[token // layout.block_size], LAYER, slice(None), slice(None), token % layout.block_size)
        stored = Tiles(layout.dtype, pages.values[place], None if pages.scales is None else pages.scales[place])
        convert(Tiles(KVDtype.FP32, row), stored)
        convert(stored, Tiles(KVDtype.FP32, kept[:, :, token]))
    return torch.from_numpy(kept)


def textbook(case: Case) -> Tensor:
    """fp64 [T, q heads, head_dim]."""
    given = inputs(case)
    return torch.cat(
        [
            attention(given.q[low:high], kv[0], kv[1], case.spec)
            for low, high, kv in zip(given.query_start[:-1], given.query_start[1:], given.kv, strict=True)
        ]
    )


def attention(q: Tensor, keys: Tensor, values: Tensor, spec: LayerAttention) -> Tensor:
    """fp64 [T, q heads, head_dim] of q of that shape, the last T tokens of K and V [kv heads, tokens, head_dim]."""
    num_tokens, num_q_heads, _ = q.shape
    num_kv_heads, context_len, _ = keys.shape
    if not context_len:
        return torch.zeros(q.shape, dtype=torch.float64)
    keys, values = (x.double().repeat_interleave(num_q_heads // num_kv_heads, dim=0) for x in (keys, values))
    scores = torch.einsum("thd,hcd->htc", q.double(), keys) * spec.scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    position = torch.arange(context_len - num_tokens, context_len)[:, None]
    token = torch.arange(context_len)
    seen = (token <= position) & (token > position - (spec.window or context_len))
    weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
    return torch.einsum("htc,hcd->thd", weights, values)


def check(case: Case, result: Tensor) -> None:
    """Raises AssertionError where a result is not the textbook's."""
    tolerance = _TOLERANCES[case.dtype]
    torch.testing.assert_close(result.double(), textbook(case), rtol=tolerance, atol=2 * tolerance)


def decoded(case: Case, device: str) -> Tensor:
    """What the kernels for single tokens make of a case."""
    from engine.kernels.decode_attention import decode_attention, decode_scratch, plan_decode

    given, layout = inputs(case), case.layout
    pool, q, tables, lens = (x.to(device) for x in (given.pool, given.q, given.block_tables, given.context_lens))
    out = torch.full_like(q, math.nan)
    rows = plan_decode(tables, lens, case.window, layout)
    decode_attention(pool, layout, LAYER, q, rows, case.spec, decode_scratch(len(q), q.shape[1], layout, q.device), out)
    return out.cpu()


def prefilled(case: Case, device: str) -> Tensor:
    """What the kernel for chunks makes of a case."""
    from engine.kernels.prefill_attention import ChunkRows, prefill_attention

    given = inputs(case)
    pool, q = given.pool.to(device), given.q.to(device)
    rows = ChunkRows(*(x.to(device) for x in (given.block_tables, given.context_lens, given.query_start)))
    out = torch.full_like(q, math.nan)
    prefill_attention(pool, case.layout, LAYER, q, rows, len(q), case.spec, out)
    return out.cpu()


def _interpreted(kernel: Any, case: Case) -> Tensor:
    """On the CPU; if the case wants it, as if that could convert fp8 as newer GPUs do."""
    from engine.kernels import attention_tiles, decode_attention, prefill_attention

    def constants(layout: KVCacheLayout, dtype: torch.dtype, capability: int | None) -> dict[str, Any]:
        found = attention_tiles.pool_constants(layout, dtype, capability)
        return {**found, "CODES": attention_tiles.FP8_CODES.value} if case.by_instruction else found

    with (
        patch.object(decode_attention, "pool_constants", constants),
        patch.object(prefill_attention, "pool_constants", constants),
    ):
        result: Tensor = kernel(case, "cpu")
    return result


if __name__ == "__main__":
    kernel, cases = {"decode": (decoded, DECODE_CASES), "prefill": (prefilled, PREFILL_CASES)}[sys.argv[2]]
    torch.save({name: _interpreted(kernel, case) for name, case in cases.items()}, sys.argv[1])

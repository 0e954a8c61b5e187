"""Attention of single tokens over a paged pool, split over the context (flash-decoding), and the sum of the pieces.

All contexts of a batch are cut into pieces of one length, which is chosen so that the pieces fill the GPU, whether one
context is long or many are short. A program takes a piece and a kv head; its query heads are the rows of one product.

    contexts        | a a a a a | b | c c c |          piece_len: on the device, from the sum of all lengths
    pieces            0   1   2   3   4   5            first_piece: 0, 3, 4, 6
    programs          num_rows + a number that only the GPU and the model decide; those beyond the pieces return

So neither the launch nor the scratch depends on a context's length: a step can be captured in a CUDA graph, and nothing
is read back. Rows that pad a batch have context length 1, or 0: then their output is 0.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.attention.interface import LayerAttention
from engine.kernels.attention_tiles import (
    LOG2_E,
    capability_of,
    check_heads,
    check_pool,
    check_rows,
    fold_tile,
    halves,
    layer_views,
    load_rows,
    load_scales,
    pool_constants,
    query_operand,
    score_tile,
    taken_apart,
    token_pages,
)
from kv_cache.layout import KVCacheLayout

PIECE_TOKENS = 128
"""Lengths of pieces are multiples of this. A multiple of every tile."""

# Programs on a multiprocessor for the longest contexts: two at once, twice.
_WAVES = 4
_INTERPRETED_PROCESSORS = 1
_TILE_BYTES = 16384
_ROW_TILE = tl.constexpr(128)
_PIECE_TILE = tl.constexpr(16)


@dataclass(frozen=True, slots=True, eq=False)
class DecodeRows:
    """Single-token rows as the kernel takes them; good for all layers that look back as far as each other.

    block_tables int32 [S, blocks], context_lens int32 [S], first_piece int32 [S + 1], piece_len int32 [1], all on the
    device. `window` is that of the layers.
    """

    block_tables: Tensor
    context_lens: Tensor
    first_piece: Tensor
    piece_len: Tensor
    window: int | None


@dataclass(frozen=True, slots=True, eq=False)
class DecodeScratch:
    """What pieces leave for the sum: outputs fp32 [pieces, q heads, head_dim], and the logarithm to base 2 of the sum
    of their weights, fp32 [pieces, q heads]. May be used again by the next call on the same stream."""

    outputs: Tensor
    log_sums: Tensor


def most_pieces(num_rows: int, num_kv_heads: int, device: torch.device) -> int:
    """Pieces that this many rows can have, and so programs for a kv head: nothing else decides it."""
    return num_rows + _long_pieces(num_kv_heads, device)


def decode_scratch(num_rows: int, num_q_heads: int, layout: KVCacheLayout, device: torch.device) -> DecodeScratch:
    """Scratch for up to `num_rows` rows."""
    pieces = most_pieces(num_rows, layout.num_kv_heads, device)
    outputs = torch.empty((pieces, num_q_heads, layout.head_dim), dtype=torch.float32, device=device)
    return DecodeScratch(outputs, torch.empty((pieces, num_q_heads), dtype=torch.float32, device=device))


def plan_decode(block_tables: Tensor, context_lens: Tensor, window: int | None, layout: KVCacheLayout) -> DecodeRows:
    """Cut contexts (int32 [S]) into pieces, on their device, waiting for nothing. Once a step and window.

    With room for P pieces more than there are rows, a piece is at least sum / P tokens long: there are at most S + P.
    """
    seen = context_lens if window is None else context_lens.clamp(max=window)
    quantum = _long_pieces(layout.num_kv_heads, context_lens.device) * PIECE_TOKENS
    piece_len = ((seen.sum() + (quantum - 1)) // quantum).clamp(min=1) * PIECE_TOKENS
    first_piece = torch.zeros(len(seen) + 1, dtype=torch.int32, device=seen.device)
    first_piece[1:] = torch.cumsum((seen + (piece_len - 1)) // piece_len, 0)
    return DecodeRows(block_tables, context_lens, first_piece, piece_len.to(torch.int32).view(1), window)


def decode_attention(
    pool: Tensor,
    layout: KVCacheLayout,
    layer: int,
    q: Tensor,
    rows: DecodeRows,
    spec: LayerAttention,
    scratch: DecodeScratch,
    out: Tensor,
) -> None:
    """Attention of q over each row's context in one layer's pages, queued on the current stream.

    pool: uint8 [bytes], contiguous, aligned to 16, on a CUDA device (on the CPU under Triton's interpreter). q and out:
    [S, num_q_heads, head_dim] in fp32, fp16 or bf16, heads contiguous, rows a constant stride apart; out is written.
    rows: from `plan_decode`, with the window of `spec`; block ids and lengths are not checked, that would wait for the
    device. scratch: from `decode_scratch`, for at least S rows and as many heads. K and V are what `layout` says;
    products are summed in fp32. Raises ValueError for shapes, dtypes and devices that are not as described.
    """
    _check(pool, layout, layer, q, rows, spec, scratch, out)
    num_rows, num_q_heads = q.shape[0], q.shape[1]
    if not num_rows:
        return
    elements, scales = layer_views(pool, layout, layer)
    capability = capability_of(pool.device)
    _decode_pieces[(most_pieces(num_rows, layout.num_kv_heads, pool.device), layout.num_kv_heads)](
        q,
        elements,
        scales,
        rows.block_tables,
        rows.context_lens,
        rows.first_piece,
        rows.piece_len,
        scratch.outputs,
        scratch.log_sums,
        num_rows,
        q.stride(0),
        rows.block_tables.stride(0),
        spec.scale,
        spec.soft_cap or 0.0,
        spec.window or 0,
        **decode_constants(layout, q.dtype, num_q_heads, spec, capability),
    )
    _sum_pieces[(num_rows, num_q_heads)](
        scratch.outputs,
        scratch.log_sums,
        rows.first_piece,
        out,
        out.stride(0),
        HEAD_DIM=layout.head_dim,
        DIM=triton.next_power_of_2(layout.head_dim),
        num_warps=1,
    )


def decode_constants(
    layout: KVCacheLayout, q_dtype: torch.dtype, num_q_heads: int, spec: LayerAttention, capability: int | None
) -> dict[str, Any]:
    """Constants and launch options of the kernel of the pieces."""
    constants = pool_constants(layout, q_dtype, capability)
    group = num_q_heads // layout.num_kv_heads
    tile = _TILE_BYTES // (constants["DIM"] * layout.dtype.itemsize)
    return {
        **constants,
        "GROUP": group,
        "BLOCK_M": max(16, triton.next_power_of_2(group)),
        "BLOCK_N": min(max(tile, 16), 64),
        "SOFT_CAP": spec.soft_cap is not None,
        "WINDOW": spec.window is not None,
        "STAGES": 3,
        "num_warps": 4,
    }


@functools.cache
def _long_pieces(num_kv_heads: int, device: torch.device) -> int:
    processors = _INTERPRETED_PROCESSORS
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    return -(-_WAVES * processors // num_kv_heads)


def _check(
    pool: Tensor,
    layout: KVCacheLayout,
    layer: int,
    q: Tensor,
    rows: DecodeRows,
    spec: LayerAttention,
    scratch: DecodeScratch,
    out: Tensor,
) -> None:
    check_pool(pool, layout, layer)
    check_heads("q", q, layout, pool.device)
    check_heads("out", out, layout, pool.device)
    num_rows, num_q_heads = q.shape[0], q.shape[1]
    vectors = {
        "context_lens": (rows.context_lens, num_rows),
        "first_piece": (rows.first_piece, num_rows + 1),
        "piece_len": (rows.piece_len, 1),
    }
    check_rows(rows.block_tables, vectors, pool.device)
    if out.shape != q.shape or rows.block_tables.shape[0] != num_rows:
        raise ValueError(
            f"q is {list(q.shape)}, out {list(out.shape)}, and there are {rows.block_tables.shape[0]} block tables"
        )
    if rows.window != spec.window:
        raise ValueError(f"rows planned for a window of {rows.window} in a layer with one of {spec.window}")
    pieces = most_pieces(num_rows, layout.num_kv_heads, pool.device)
    if scratch.outputs.shape[0] < pieces or scratch.outputs.shape[1:] != q.shape[1:]:
        raise ValueError(
            f"scratch for {pieces} pieces of {num_q_heads} heads is needed, not {list(scratch.outputs.shape)}"
        )


# Compiled once for a model: where in their tensors the rows of a batch begin makes no difference.
@triton.jit(
    do_not_specialize=["num_rows", "table_stride", "window"],
    do_not_specialize_on_alignment=["block_tables", "context_lens", "first_piece", "piece_len"],
)
def _decode_pieces(
    q: tl.tensor,
    pool: tl.tensor,
    scales: tl.tensor,
    block_tables: tl.tensor,
    context_lens: tl.tensor,
    first_piece: tl.tensor,
    piece_len: tl.tensor,
    outputs: tl.tensor,
    log_sums: tl.tensor,
    num_rows: tl.int32,
    q_stride: tl.int32,
    table_stride: tl.int32,
    scale: tl.float32,
    soft_cap: tl.float32,
    window: tl.int32,
    CODES: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    V_OFFSET: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    K_SCALES: tl.constexpr,
    V_SCALES: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Program (i, h): the i-th piece from the end and kv head h. The last rows are the longest, so they go first."""
    piece = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    row = _row_of(piece, first_piece, num_rows)
    if row >= num_rows:
        return
    context_len = tl.load(context_lens + row)
    length = tl.load(piece_len)
    begin = (piece - tl.load(first_piece + row)) * length
    if WINDOW:
        begin += tl.maximum(context_len - window, 0)
    end = tl.minimum(begin + length, context_len)

    lane = tl.arange(0, BLOCK_M)
    q_rows = q + row.to(tl.int64) * q_stride + (head * GROUP + lane) * HEAD_DIM
    queries, factor = query_operand(load_rows(q_rows, lane < GROUP, HEAD_DIM, DIM, True), CODES, DTYPE)
    step = scale * LOG2_E if CODES == 0 and not SOFT_CAP else 1.0
    table = block_tables + row.to(tl.int64) * table_stride
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    COLUMNS: tl.constexpr = DIM if CODES == 0 else DIM // 2
    output = tl.zeros([BLOCK_M, COLUMNS], tl.float32)
    odd_queries, odd_output = queries, output
    if CODES != 0:
        queries, odd_queries = halves(queries, BLOCK_M, DIM)
    k_scales = tl.zeros([BLOCK_N], tl.float32)
    e, f, inverse = k_scales, k_scales, k_scales
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        tokens = start + tl.arange(0, BLOCK_N)
        there = tokens < end
        pages = token_pages(table, tokens, there, BLOCK_SIZE)
        within = head * BLOCK_SIZE + tokens % BLOCK_SIZE
        k_rows = pool + pages * BLOCK_STRIDE + within * ROW
        keys = load_rows(k_rows, there, ROW, COLUMNS, True)
        values = load_rows(k_rows + V_OFFSET, there, ROW, COLUMNS, True)
        if CODES != 0:
            words = scales + pages * SCALE_STRIDE
            k_scales = load_scales(words + K_SCALES, within, there, CODES)
            e, f, inverse = taken_apart(load_scales(words + V_SCALES, within, there, CODES))
        scores = score_tile(queries, odd_queries, keys, k_scales, e, factor, scale, soft_cap, CODES, DTYPE, SOFT_CAP)
        scores = tl.where(there[None, :], scores, float("-inf"))
        maximum, total, output, odd_output = fold_tile(
            scores, values, f, inverse, maximum, total, output, odd_output, step, CODES, DTYPE, False
        )
    if CODES != 0:
        output = tl.reshape(tl.join(output, odd_output), [BLOCK_M, DIM])

    place = piece.to(tl.int64) * (GROUP * tl.num_programs(1)) + head * GROUP + lane
    dim = tl.arange(0, DIM)[None, :]
    mask = (lane < GROUP)[:, None] & (dim < HEAD_DIM)
    tl.store(outputs + place[:, None] * HEAD_DIM + dim, output / total[:, None], mask=mask)
    tl.store(log_sums + place, maximum + tl.log2(total), mask=lane < GROUP)


@triton.jit
def _row_of(piece: tl.tensor, first_piece: tl.tensor, num_rows: tl.tensor) -> tl.tensor:
    """The row that a piece belongs to: the number of rows that end before it; `num_rows` if there is none."""
    row = 0
    for first in tl.range(0, num_rows, _ROW_TILE):
        rows = first + tl.arange(0, _ROW_TILE)
        ends = tl.load(first_piece + 1 + rows, mask=rows < num_rows, other=0x7FFFFFFF)
        row += tl.sum((ends <= piece).to(tl.int32), 0)
    return row


@triton.jit
def _sum_pieces(
    outputs: tl.tensor,
    log_sums: tl.tensor,
    first_piece: tl.tensor,
    out: tl.tensor,
    out_stride: tl.int32,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
) -> None:
    """Program (i, h): row i and query head h. The outputs of its pieces, weighted by their sums."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    end = tl.load(first_piece + row + 1)
    dim = tl.arange(0, DIM)
    maximum = float("-inf")
    total = 0.0
    result = tl.zeros([DIM], tl.float32)
    for start in tl.range(tl.load(first_piece + row), end, _PIECE_TILE):
        pieces = start + tl.arange(0, _PIECE_TILE)
        place = pieces.to(tl.int64) * tl.num_programs(1) + head
        there = pieces < end
        log_sum = tl.load(log_sums + place, mask=there, other=float("-inf"))
        mask = there[:, None] & (dim < HEAD_DIM)[None, :]
        output = tl.load(outputs + place[:, None] * HEAD_DIM + dim[None, :], mask=mask, other=0)
        new_maximum = tl.maximum(maximum, tl.max(log_sum, 0))
        shrink = tl.exp2(maximum - new_maximum)
        weights = tl.exp2(log_sum - new_maximum)
        total = total * shrink + tl.sum(weights, 0)
        result = result * shrink + tl.sum(weights[:, None] * output, 0)
        maximum = new_maximum
    result /= tl.where(total > 0, total, 1.0)
    tl.store(
        out + row.to(tl.int64) * out_stride + head * HEAD_DIM + dim,
        result.to(out.dtype.element_ty),
        mask=dim < HEAD_DIM,
    )

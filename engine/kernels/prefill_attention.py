"""Causal attention of chunks of prompts over a paged pool that already holds the chunks and what came before them.

A program takes a tile: some consecutive tokens of one chunk, with all query heads of one kv head. Tokens and heads are
the rows of one product, so that K and V are read once for all of them.

    row of a tile     0        1        2        3        4        5              group of 3 query heads
    token, head       t, 0     t, 1     t, 2     t+1, 0   t+1, 1   t+1, 2

With Q tokens a tile, row i of the batch begins at tile query_start[i] // Q + i: early enough for all tiles of the rows
before it, so T // Q + S programs are enough, whatever the lengths. Each finds its row by bisection on the device; those
whose tile lies behind its row return. Nothing is read back and no map is made on the host.
"""

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
    product_dtype,
    query_operand,
    score_tile,
    taken_apart,
    token_pages,
)
from kv_cache.layout import KVCacheLayout

# With codes there is room in registers for tiles of 64 tokens on this generation only: before it, what is multiplied is
# there too; after it, a thread has a whole row of scores and what each token's scales become.
_HOPPER = 9
_WIDE = 128


@dataclass(frozen=True, slots=True, eq=False)
class ChunkRows:
    """Rows of a batch as the kernel takes them: block_tables int32 [S, blocks], context_lens int32 [S] (with the
    chunk), query_start int32 [S + 1]: row i has the tokens query_start[i] to query_start[i + 1] - 1 of q. On the
    device."""

    block_tables: Tensor
    context_lens: Tensor
    query_start: Tensor


def prefill_attention(
    pool: Tensor,
    layout: KVCacheLayout,
    layer: int,
    q: Tensor,
    rows: ChunkRows,
    num_tokens: int,
    spec: LayerAttention,
    out: Tensor,
) -> None:
    """Causal attention of chunks over their whole contexts in one layer's pages, queued on the current stream.

    pool: uint8 [bytes], contiguous, aligned to 16, on a CUDA device (on the CPU under Triton's interpreter). q and out:
    [T, num_q_heads, head_dim] in fp32, fp16 or bf16, heads contiguous, tokens a constant stride apart; of out, the
    tokens of the rows are written. num_tokens: at least the number of those tokens, T if in doubt; known to the host.
    The token at position p of its sequence sees p - window + 1 to p. Block ids, lengths and starts are not checked:
    that would wait for the device. Products are summed in fp32. Raises ValueError for shapes, dtypes and devices that
    are not as described.
    """
    num_rows = rows.context_lens.shape[0]
    _check(pool, layout, layer, q, rows, num_tokens, out)
    if not num_rows or not num_tokens:
        return
    elements, scales = layer_views(pool, layout, layer)
    constants = prefill_constants(layout, q.dtype, q.shape[1], spec, capability_of(pool.device))
    tiles = num_tokens // (constants["BLOCK_M"] // constants["GROUP"]) + num_rows
    _prefill_tiles[(tiles, layout.num_kv_heads)](
        q,
        elements,
        scales,
        rows.block_tables,
        rows.context_lens,
        rows.query_start,
        out,
        num_rows,
        q.stride(0),
        out.stride(0),
        rows.block_tables.stride(0),
        spec.scale,
        spec.soft_cap or 0.0,
        spec.window or 0,
        **constants,
    )


def prefill_constants(
    layout: KVCacheLayout, q_dtype: torch.dtype, num_q_heads: int, spec: LayerAttention, capability: int | None
) -> dict[str, Any]:
    """Constants and launch options of the kernel."""
    group = num_q_heads // layout.num_kv_heads
    block_m, block_n, num_warps = _tile(layout, q_dtype, spec, capability)
    return {
        **pool_constants(layout, q_dtype, capability),
        "GROUP": group,
        "BLOCK_M": max(block_m, triton.next_power_of_2(group)),
        "BLOCK_N": block_n,
        "SOFT_CAP": spec.soft_cap is not None,
        "WINDOW": spec.window is not None,
        "STAGES": 3,
        "num_warps": num_warps,
    }


def _tile(
    layout: KVCacheLayout, q_dtype: torch.dtype, spec: LayerAttention, capability: int | None
) -> tuple[int, int, int]:
    """Rows, tokens and warps: at least 64 rows for the tensor cores of a warp group, else what keeps all sums in
    registers; found by compiling."""
    if product_dtype(layout, q_dtype) == torch.float32:
        return 32, 32, 4
    wide = layout.head_dim > _WIDE
    rows, tokens = (64, 32) if wide else (128, 64)
    if layout.dtype.has_scales and capability is not None:
        hopper = capability // 10 == _HOPPER
        if wide and hopper:
            tokens = 16
        elif not hopper or spec.window is not None or spec.soft_cap is not None:
            tokens = 32
    return rows, tokens, 8


def _check(
    pool: Tensor, layout: KVCacheLayout, layer: int, q: Tensor, rows: ChunkRows, num_tokens: int, out: Tensor
) -> None:
    check_pool(pool, layout, layer)
    check_heads("q", q, layout, pool.device)
    check_heads("out", out, layout, pool.device)
    num_rows = rows.block_tables.shape[0]
    vectors = {"context_lens": (rows.context_lens, num_rows), "query_start": (rows.query_start, num_rows + 1)}
    check_rows(rows.block_tables, vectors, pool.device)
    if out.shape != q.shape:
        raise ValueError(f"q is {list(q.shape)}, out is {list(out.shape)}")
    if not 0 <= num_tokens <= q.shape[0]:
        raise ValueError(f"{num_tokens} tokens of {q.shape[0]}")


# Compiled once for a model: where in their tensors the rows of a batch begin makes no difference.
@triton.jit(
    do_not_specialize=["num_rows", "table_stride", "window"],
    do_not_specialize_on_alignment=["block_tables", "context_lens", "query_start"],
)
def _prefill_tiles(
    q: tl.tensor,
    pool: tl.tensor,
    scales: tl.tensor,
    block_tables: tl.tensor,
    context_lens: tl.tensor,
    query_start: tl.tensor,
    out: tl.tensor,
    num_rows: tl.int32,
    q_stride: tl.int32,
    out_stride: tl.int32,
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
    """Program (i, h): the i-th tile from the end and kv head h. The last tiles of a prompt are the longest."""
    TILE_TOKENS: tl.constexpr = BLOCK_M // GROUP
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    row = _row_of(tile, query_start, num_rows, TILE_TOKENS)
    first_token = tl.load(query_start + row)
    num_tokens = tl.load(query_start + row + 1) - first_token
    tile_token = (tile - ((first_token - tl.load(query_start)) // TILE_TOKENS + row)) * TILE_TOKENS
    if tile_token >= num_tokens:
        return
    context_len = tl.load(context_lens + row)
    table = block_tables + row.to(tl.int64) * table_stride

    lane = tl.arange(0, BLOCK_M)
    token = tile_token + lane // GROUP
    mine = (lane < TILE_TOKENS * GROUP) & (token < num_tokens)
    q_head = head * GROUP + lane % GROUP
    q_rows = q + (first_token + token).to(tl.int64) * q_stride + q_head * HEAD_DIM
    queries, factor = query_operand(load_rows(q_rows, mine, HEAD_DIM, DIM, True), CODES, DTYPE)
    first_position = context_len - num_tokens + tile_token
    position = first_position + lane // GROUP

    step = scale * LOG2_E if CODES == 0 and not SOFT_CAP else 1.0
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    COLUMNS: tl.constexpr = DIM if CODES == 0 else DIM // 2
    output = tl.zeros([BLOCK_M, COLUMNS], tl.float32)
    odd_queries, odd_output = queries, output
    if CODES != 0:
        queries, odd_queries = halves(queries, BLOCK_M, DIM)
    k_scales = tl.zeros([BLOCK_N], tl.float32)
    e, f, inverse = k_scales, k_scales, k_scales
    first_seen = tl.maximum(first_position - window + 1, 0) if WINDOW else 0
    begin = first_seen // BLOCK_N * BLOCK_N
    end = tl.minimum(first_position + TILE_TOKENS, context_len)
    # What all tokens of the tile see whole needs no mask; with a window, little is seen whole.
    masked_from = begin if WINDOW else (first_position + 1) // BLOCK_N * BLOCK_N
    for MASKED in tl.static_range(WINDOW, 2):
        low = masked_from if MASKED else begin
        high = end if MASKED else masked_from
        for start in tl.range(low, high, BLOCK_N, num_stages=STAGES):
            tokens = start + tl.arange(0, BLOCK_N)
            there = tokens < end
            if WINDOW:
                there &= tokens >= first_seen
            pages = token_pages(table, tokens, there, BLOCK_SIZE)
            within = head * BLOCK_SIZE + tokens % BLOCK_SIZE
            k_rows = pool + pages * BLOCK_STRIDE + within * ROW
            keys = load_rows(k_rows, there, ROW, COLUMNS, MASKED)
            values = load_rows(k_rows + V_OFFSET, there, ROW, COLUMNS, MASKED)
            if CODES != 0:
                words = scales + pages * SCALE_STRIDE
                k_scales = load_scales(words + K_SCALES, within, there, CODES)
                e, f, inverse = taken_apart(load_scales(words + V_SCALES, within, there, CODES))
            scores = score_tile(
                queries, odd_queries, keys, k_scales, e, factor, scale, soft_cap, CODES, DTYPE, SOFT_CAP
            )
            if MASKED:
                seen = there[None, :] & (tokens[None, :] <= position[:, None])
                if WINDOW:
                    seen &= tokens[None, :] > position[:, None] - window
                scores = tl.where(seen, scores, float("-inf"))
            maximum, total, output, odd_output = fold_tile(
                scores, values, f, inverse, maximum, total, output, odd_output, step, CODES, DTYPE, WINDOW
            )
    if CODES != 0:
        output = tl.reshape(tl.join(output, odd_output), [BLOCK_M, DIM])

    dim = tl.arange(0, DIM)[None, :]
    out_rows = out + (first_token + token).to(tl.int64) * out_stride + q_head * HEAD_DIM
    result = (output / tl.where(mine, total, 1.0)[:, None]).to(out.dtype.element_ty)
    tl.store(out_rows[:, None] + dim, result, mask=mine[:, None] & (dim < HEAD_DIM))


@triton.jit
def _row_of(tile: tl.tensor, query_start: tl.tensor, num_rows: tl.tensor, TILE_TOKENS: tl.constexpr) -> tl.tensor:
    """The last row that begins at this tile or before it."""
    origin = tl.load(query_start)
    low = 0
    high = num_rows
    while high - low > 1:
        middle = (low + high) // 2
        if (tl.load(query_start + middle) - origin) // TILE_TOKENS + middle <= tile:
            low = middle
        else:
            high = middle
    return low

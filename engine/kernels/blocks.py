"""Blocks between a pool on a GPU and a staging buffer: as they are, or as pages of another layout.

Copied as they are, blocks keep their bytes. Converted, they become what `kv_transfer.convert` makes of them, byte for
byte: a page of the target collects the tokens that it covers, wherever they lie in the source's blocks; dtypes change
by the rules of `kv_transfer.quantise`; token places from the end of the prompt on, and padding, are zero.

A staging buffer holds pages block by block, without gaps: [blocks][layers][page]. Block ids are never checked: that
would wait for the device.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.pools import first_scale, page_elements, page_scales, pool_views
from engine.kernels.quantise import dequantised, quantised, rounded
from kv_cache.layout import PAGE_ALIGNMENT_BYTES, SCALE_BYTES, KVCacheLayout, LayoutVerdict

_WORD_BYTES = 8
_COPY_WORDS = 1024
_COPY_WARPS = 4
_TILE_ELEMENTS = 2048
_MAX_GRID_LAYERS = 65535
_MOST_PADDING_SCALES = tl.constexpr(PAGE_ALIGNMENT_BYTES // SCALE_BYTES)


def gather_blocks(pool: Tensor, layout: KVCacheLayout, block_ids: Tensor, layers: range, staging: Tensor) -> None:
    """Copy the pages of these blocks and layers into `staging`, block by block; queued on the current stream.

    `pool`: uint8, one dimension, aligned to 16 bytes, of whole blocks. `block_ids`: int32 [n], contiguous. `layers`:
    consecutive. `staging`: like the pool, exactly n * len(layers) pages. Raises ValueError for anything else.
    """
    _copy(pool, layout, block_ids, layers, staging, False)


def scatter_blocks(pool: Tensor, layout: KVCacheLayout, block_ids: Tensor, layers: range, staging: Tensor) -> None:
    """The other way round: from `staging` into the pool. No block may be named twice. See `gather_blocks`."""
    _copy(pool, layout, block_ids, layers, staging, True)


def convert_blocks(
    pool: Tensor,
    layout: KVCacheLayout,
    block_table: Tensor,
    num_tokens: int,
    blocks: Tensor,
    target: KVCacheLayout,
    layers: range,
    staging: Tensor,
) -> None:
    """Fill `staging` with pages of `target` that hold a prompt's blocks `blocks`; queued on the current stream.

    `block_table`: int32, contiguous: where the prompt's blocks, of `layout`, are in the pool, from the first one on;
    those that hold none of the wanted tokens may be any number. `num_tokens`: of the prompt. `blocks`: int32 [n],
    contiguous, counted in the target's block size. `staging`: uint8, one dimension, aligned to 16 bytes, exactly
    n * len(layers) pages of the target. Raises ValueError where it is not, or where `layout` and `target` differ in
    more than block size, dtype and heads, of which the pool must have all that the target has.
    """
    _check_layouts(layout, target)
    _check_ids(pool, block_table)
    _check_ids(pool, blocks)
    _check_layers(layout, layers)
    _check_pages(target, blocks, layers, staging)
    if not staging.numel():
        return
    # The staging buffer is a pool of as many layers as are wanted, filled in order.
    places = torch.arange(len(blocks), dtype=torch.int32, device=pool.device)
    constants = convert_constants(layout, target, len(layers), layout.num_layers)
    _launch_convert(
        (pool, layout, block_table, layers.start), (staging, target, places, 0), blocks, num_tokens, constants
    )


def requantise_blocks(
    staging: Tensor, wire: KVCacheLayout, pool: Tensor, layout: KVCacheLayout, block_ids: Tensor, layers: range
) -> None:
    """Turn pages of `wire` into those of a pool, which differs from it in dtype only; queued on the current stream.

    The other arguments are those of `scatter_blocks`. What `kv_transfer.convert.requantise` does.
    """
    _check_layouts(wire, layout)
    if wire.block_size != layout.block_size or wire.shard != layout.shard:
        raise ValueError(f"pages on the wire may differ from the pool's in dtype only. Wire: {wire}. Pool: {layout}")
    _check_ids(pool, block_ids)
    _check_layers(layout, layers)
    _check_pages(wire, block_ids, layers, staging)
    if not staging.numel():
        return
    order = torch.arange(len(block_ids), dtype=torch.int32, device=pool.device)
    constants = convert_constants(wire, layout, layout.num_layers, len(layers))
    num_tokens = len(block_ids) * layout.block_size
    _launch_convert((staging, wire, order, 0), (pool, layout, block_ids, layers.start), order, num_tokens, constants)


def _copy(
    pool: Tensor, layout: KVCacheLayout, block_ids: Tensor, layers: range, staging: Tensor, into_pool: bool
) -> None:
    _check_ids(pool, block_ids)
    _check_layers(layout, layers)
    _check_pages(layout, block_ids, layers, staging)
    pool_views(pool, layout)
    if not staging.numel():
        return
    words = len(layers) * layout.page_bytes // _WORD_BYTES
    _copy_blocks[(len(block_ids), triton.cdiv(words, _COPY_WORDS))](
        pool.view(torch.int64),
        staging.view(torch.int64),
        block_ids,
        layers.start * layout.page_bytes // _WORD_BYTES,
        words,
        BLOCK_WORDS=layout.block_bytes // _WORD_BYTES,
        INTO_POOL=into_pool,
        WORDS=_COPY_WORDS,
        num_warps=_COPY_WARPS,
    )


def _check_ids(pool: Tensor, ids: Tensor) -> None:
    if ids.dtype != torch.int32 or ids.dim() != 1 or not ids.is_contiguous() or ids.device != pool.device:
        raise ValueError(f"block ids must be a contiguous int32 vector on {pool.device}, not {ids.dtype} {ids.device}")


def _check_layers(layout: KVCacheLayout, layers: range) -> None:
    if layers.step != 1 or layers.start < 0 or layers.stop > min(layout.num_layers, _MAX_GRID_LAYERS):
        raise ValueError(f"{layers} are not consecutive layers of {layout.num_layers}")


def _check_pages(layout: KVCacheLayout, blocks: Tensor, layers: range, staging: Tensor) -> None:
    size_bytes = len(blocks) * len(layers) * layout.page_bytes
    fits = staging.dtype == torch.uint8 and staging.dim() == 1 and staging.numel() == size_bytes
    if not fits or not staging.is_contiguous() or staging.data_ptr() % 16:
        raise ValueError(f"{staging.numel()} of {staging.dtype} are not {size_bytes} bytes, aligned to 16")


def _check_layouts(source: KVCacheLayout, target: KVCacheLayout) -> None:
    match = source.compare(target, "at the source", "at the target")
    held = source.kv_head_start <= target.kv_head_start and target.kv_head_end <= source.kv_head_end
    if match.verdict is LayoutVerdict.REFUSED or not held:
        raise ValueError(f"pages cannot be converted ({match}). Source: {source}. Target: {target}")


def convert_constants(
    source: KVCacheLayout, target: KVCacheLayout, target_layers: int, source_layers: int
) -> dict[str, Any]:
    """What the kernel is compiled for: pools with this many layers."""
    dims = triton.next_power_of_2(target.head_dim)
    scales = 2 * target.num_kv_heads * target.block_size if target.dtype.has_scales else 0
    return {
        "HEAD_DIM": target.head_dim,
        "FROM_BLOCK": source.block_size,
        "FROM_LAYERS": source_layers,
        "FROM_PAGE": page_elements(source),
        "FROM_PAGE_SCALES": page_scales(source),
        "FROM_FIRST_SCALE": first_scale(source),
        "FROM_HEADS": source.num_kv_heads,
        "FIRST_HEAD": target.kv_head_start - source.kv_head_start,
        "TO_BLOCK": target.block_size,
        "TO_LAYERS": target_layers,
        "TO_PAGE": page_elements(target),
        "TO_PAGE_SCALES": page_scales(target),
        "TO_FIRST_SCALE": first_scale(target),
        "TO_HEADS": target.num_kv_heads,
        "TO_USED_SCALES": first_scale(target) + scales,
        "TOKENS": min(target.block_size, max(1, _TILE_ELEMENTS // dims)),
        "DIMS": dims,
    }


_Side = tuple[Tensor, KVCacheLayout, Tensor, int]
"""Memory, its layout, which block of it is meant by a number, and its first layer."""


def _launch_convert(source: _Side, target: _Side, blocks: Tensor, num_tokens: int, constants: dict[str, Any]) -> None:
    values, scales = pool_views(source[0], source[1])
    to_values, to_scales = pool_views(target[0], target[1])
    layers = min(constants["TO_LAYERS"], constants["FROM_LAYERS"])
    tiles = 2 * constants["TO_HEADS"] * (constants["TO_BLOCK"] // constants["TOKENS"])
    _convert_pages[(len(blocks), layers, tiles)](
        values,
        scales,
        source[2],
        to_values,
        to_scales,
        target[2],
        blocks,
        num_tokens,
        source[3],
        target[3],
        num_warps=4,
        **constants,
    )


@triton.jit(do_not_specialize_on_alignment=["block_ids"])
def _copy_blocks(
    pool: tl.tensor,
    staging: tl.tensor,
    block_ids: tl.tensor,
    first_word: tl.int64,
    num_words: tl.int64,
    BLOCK_WORDS: tl.constexpr,
    INTO_POOL: tl.constexpr,
    WORDS: tl.constexpr,
) -> None:
    """Program (i, j): part j of the i-th block. The wanted layers of a block are one run of `num_words` int64."""
    block = tl.load(block_ids + tl.program_id(0)).to(tl.int64)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    in_pool = pool + block * BLOCK_WORDS + first_word + word
    in_staging = staging + tl.program_id(0).to(tl.int64) * num_words + word
    there = word < num_words
    if INTO_POOL:
        tl.store(in_pool, tl.load(in_staging, mask=there), mask=there)
    else:
        tl.store(in_staging, tl.load(in_pool, mask=there), mask=there)


@triton.jit(
    do_not_specialize=["num_tokens", "first_layer", "to_first_layer"],
    do_not_specialize_on_alignment=["block_table", "to_blocks", "blocks"],
)
def _convert_pages(
    pool: tl.tensor,
    scale_pool: tl.tensor,
    block_table: tl.tensor,
    to_pool: tl.tensor,
    to_scale_pool: tl.tensor,
    to_blocks: tl.tensor,
    blocks: tl.tensor,
    num_tokens: tl.int32,
    first_layer: tl.int32,
    to_first_layer: tl.int32,
    HEAD_DIM: tl.constexpr,
    FROM_BLOCK: tl.constexpr,
    FROM_LAYERS: tl.constexpr,
    FROM_PAGE: tl.constexpr,
    FROM_PAGE_SCALES: tl.constexpr,
    FROM_FIRST_SCALE: tl.constexpr,
    FROM_HEADS: tl.constexpr,
    FIRST_HEAD: tl.constexpr,
    TO_BLOCK: tl.constexpr,
    TO_LAYERS: tl.constexpr,
    TO_PAGE: tl.constexpr,
    TO_PAGE_SCALES: tl.constexpr,
    TO_FIRST_SCALE: tl.constexpr,
    TO_HEADS: tl.constexpr,
    TO_USED_SCALES: tl.constexpr,
    TOKENS: tl.constexpr,
    DIMS: tl.constexpr,
) -> None:
    """Program (i, j, t): of the i-th wanted block and the j-th wanted layer, some tokens of one head's K or V."""
    CHUNKS: tl.constexpr = TO_BLOCK // TOKENS
    head_of_kv = tl.program_id(2) // CHUNKS
    is_v, head = head_of_kv // TO_HEADS, head_of_kv % TO_HEADS
    place = (tl.program_id(2) % CHUNKS) * TOKENS + tl.arange(0, TOKENS)
    position = tl.load(blocks + tl.program_id(0)) * TO_BLOCK + place
    dim = tl.arange(0, DIMS)[None, :]
    inside = position < num_tokens

    from_block = tl.load(block_table + position // FROM_BLOCK, mask=inside, other=0).to(tl.int64)
    from_page = from_block * FROM_LAYERS + first_layer + tl.program_id(1)
    from_row = (is_v * FROM_HEADS + FIRST_HEAD + head) * FROM_BLOCK + position % FROM_BLOCK
    rows = tl.load(
        pool + (from_page * FROM_PAGE + from_row * HEAD_DIM)[:, None] + dim,
        mask=inside[:, None] & (dim < HEAD_DIM),
        other=0,
    )
    scale_places = scale_pool + from_page * FROM_PAGE_SCALES + FROM_FIRST_SCALE + from_row
    to_block = tl.load(to_blocks + tl.program_id(0)).to(tl.int64)
    to_page = to_block * TO_LAYERS + to_first_layer + tl.program_id(1)
    to_row = (is_v * TO_HEADS + head) * TO_BLOCK + place
    places = to_pool + to_page * TO_PAGE + (to_row * HEAD_DIM)[:, None] + dim
    to_scales = to_scale_pool + to_page * TO_PAGE_SCALES
    _write(rows, scale_places, inside, places, to_scales + TO_FIRST_SCALE + to_row, HEAD_DIM)

    if tl.program_id(2) == 0:
        padding = TO_USED_SCALES + tl.arange(0, _MOST_PADDING_SCALES)
        tl.store(to_scales + padding, tl.zeros(padding.shape, tl.int16), mask=padding < TO_PAGE_SCALES)


@triton.jit
def _write(
    rows: tl.tensor,
    scale_places: tl.tensor,
    inside: tl.tensor,
    places: tl.tensor,
    to_scale_places: tl.tensor,
    HEAD_DIM: tl.constexpr,
) -> None:
    """Rows in the form of the target, and their scales. Its type and that of the rows tell the KV dtypes."""
    kept: tl.constexpr = places.dtype.element_ty
    FROM_SCALES: tl.constexpr = rows.dtype == tl.int8 or rows.dtype == tl.uint8
    TO_SCALES: tl.constexpr = kept == tl.int8 or kept == tl.uint8
    there = (tl.arange(0, places.shape[1]) < HEAD_DIM)[None, :]
    if FROM_SCALES:
        scales = tl.load(scale_places, mask=inside, other=0)
    if rows.dtype == kept:
        tl.store(places, rows, mask=there)
        if FROM_SCALES:
            tl.store(to_scale_places, scales)
    else:
        values = dequantised(rows, scales) if FROM_SCALES else rows.to(tl.float32)
        if TO_SCALES:
            codes, new_scales = quantised(values, kept == tl.uint8)
            tl.store(places, codes, mask=there)
            tl.store(to_scale_places, new_scales)
        else:
            tl.store(places, rounded(values, kept), mask=there)

"""New K and V into the pages of a pool: rotated, quantised and written in one pass.

A program takes one token and as many of its heads as fill a tile of 1024 elements:

    programs of a token   | q heads ... | k heads ... | v heads ... |     (q only where there is something to turn)
    q                     turned in place
    k                     turned in place, then written to its page: what is written is what can be read back from qk
    v                     written to its page

The program of a token that is the last of its block in this step, and whose block has its first token in this step too,
writes zeros to the block's remaining slots. Both are seen in `slot_mapping`: tokens of a sequence lie side by side.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.pools import first_scale, page_elements, page_scales, pool_views
from engine.kernels.quantise import quantised, rounded
from kv_cache.layout import KVCacheLayout

_TILE_ELEMENTS = 1024
_NUM_WARPS = 2
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def rotate_and_store_kv(
    pool: Tensor, layout: KVCacheLayout, layer: int, qk: Tensor, v: Tensor, rotation: Tensor, slot_mapping: Tensor
) -> None:
    """Turn q and k in place, then write K and V into their slots; queued on the current stream.

    `pool`: uint8, one dimension, aligned to 16 bytes, of whole blocks of `layout`. `qk`: fp32, fp16 or bf16
    [T, num_q_heads + num_kv_heads, head_dim], `v`: the same dtype [T, num_kv_heads, head_dim]; both may be views into
    one wider matrix: heads are contiguous, tokens a constant stride apart. `rotation`: fp32 [T, head_dim], contiguous:
    cos and sin of each pair's angle, side by side. `slot_mapping`: int64 or int32 [T], contiguous: block_id *
    block_size + offset; -1 marks a padded row, of which nothing is turned or written.

    Values in the pool are those of `kv_transfer.quantise`. Slots behind the last token of a block that this step began
    to fill become zero, scales too. Raises ValueError for shapes and dtypes that are not as described; slots are
    not checked, as that would wait for the device.
    """
    num_q_heads = qk.shape[1] - layout.num_kv_heads
    if num_q_heads < 0:
        raise ValueError(f"{qk.shape[1]} heads cannot hold {layout.num_kv_heads} of K")
    if rotation.dtype != torch.float32 or rotation.shape != (len(qk), layout.head_dim) or not rotation.is_contiguous():
        raise ValueError(f"rotation must be contiguous fp32 [T, head_dim], not {rotation.dtype} {list(rotation.shape)}")
    _check(layout, qk, v, slot_mapping)
    _launch(pool, layout, layer, qk, v, rotation, slot_mapping)


def store_kv(pool: Tensor, layout: KVCacheLayout, layer: int, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
    """Write K and V, each [T, num_kv_heads, head_dim], as they are; otherwise see `rotate_and_store_kv`."""
    if k.shape[1] != layout.num_kv_heads:
        raise ValueError(f"{k.shape[1]} heads of K for a pool of {layout.num_kv_heads}")
    _check(layout, k, v, slot_mapping)
    _launch(pool, layout, layer, k, v, None, slot_mapping)


def _check(layout: KVCacheLayout, x: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
    if x.dtype not in _FLOATS or v.dtype != x.dtype:
        raise ValueError(f"K and V must both be fp32, fp16 or bf16, not {x.dtype} and {v.dtype}")
    if x.shape[2] != layout.head_dim or v.shape != (len(x), layout.num_kv_heads, layout.head_dim):
        raise ValueError(f"K {list(x.shape)} and V {list(v.shape)} do not fit {layout}")
    for part in (x, v):
        if part.stride(2) != 1 or part.stride(1) != layout.head_dim:
            raise ValueError(f"heads must be contiguous, not with strides {part.stride()}")
    if slot_mapping.dtype not in (torch.int64, torch.int32) or slot_mapping.shape != (len(x),):
        raise ValueError(f"slots must be int64 or int32 [T], not {slot_mapping.dtype} {list(slot_mapping.shape)}")


def _launch(
    pool: Tensor, layout: KVCacheLayout, layer: int, x: Tensor, v: Tensor, rotation: Tensor | None, slots: Tensor
) -> None:
    if not 0 <= layer < layout.num_layers:
        raise ValueError(f"no layer {layer} of {layout.num_layers}")
    num_tokens = len(x)
    values, scales = pool_views(pool, layout)
    if not num_tokens:
        return
    num_q_heads = x.shape[1] - layout.num_kv_heads
    constants = store_constants(layout, num_q_heads, rotation is not None)
    kv_programs = 2 * triton.cdiv(layout.num_kv_heads, constants["HEADS"])
    _store_kv[(num_tokens, triton.cdiv(num_q_heads, constants["HEADS"]) + kv_programs)](
        values,
        scales,
        x,
        v,
        x if rotation is None else rotation,
        slots,
        num_tokens,
        layer,
        x.stride(0),
        v.stride(0),
        num_warps=_NUM_WARPS,
        **constants,
    )


def store_constants(layout: KVCacheLayout, num_q_heads: int, rotate: bool) -> dict[str, Any]:
    """What the kernel is compiled for."""
    dims = triton.next_power_of_2(layout.head_dim)
    most_heads = triton.next_power_of_2(max(num_q_heads, layout.num_kv_heads))
    return {
        "NUM_Q_HEADS": num_q_heads,
        "NUM_KV_HEADS": layout.num_kv_heads,
        "HEAD_DIM": layout.head_dim,
        "BLOCK_SIZE": layout.block_size,
        "NUM_LAYERS": layout.num_layers,
        "PAGE_ELEMENTS": page_elements(layout),
        "PAGE_SCALES": page_scales(layout),
        "FIRST_SCALE": first_scale(layout),
        "ROTATE": rotate,
        "HEADS": min(most_heads, max(1, _TILE_ELEMENTS // dims)),
        "DIMS": dims,
    }


@triton.jit(do_not_specialize=["num_tokens", "layer"], do_not_specialize_on_alignment=["slot_mapping"])
def _store_kv(
    pool: tl.tensor,
    scale_pool: tl.tensor,
    x: tl.tensor,
    v: tl.tensor,
    rotation: tl.tensor,
    slot_mapping: tl.tensor,
    num_tokens: tl.int32,
    layer: tl.int32,
    x_stride: tl.int64,
    v_stride: tl.int64,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_LAYERS: tl.constexpr,
    PAGE_ELEMENTS: tl.constexpr,
    PAGE_SCALES: tl.constexpr,
    FIRST_SCALE: tl.constexpr,
    ROTATE: tl.constexpr,
    HEADS: tl.constexpr,
    DIMS: tl.constexpr,
) -> None:
    """Program (t, g): group g of the heads of token t. `x` has the q heads, if any, and the k heads."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    Q_GROUPS: tl.constexpr = (NUM_Q_HEADS + HEADS - 1) // HEADS
    KV_GROUPS: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    x += token * x_stride
    v += token * v_stride
    rotation += token * HEAD_DIM
    if slot >= 0:
        if group < Q_GROUPS:
            _turned(x, rotation, group * HEADS, NUM_Q_HEADS, HEAD_DIM, HEADS, DIMS)
        else:
            is_v = (group - Q_GROUPS) // KV_GROUPS
            first_head = ((group - Q_GROUPS) % KV_GROUPS) * HEADS
            if is_v > 0:
                rows = _rows(v, first_head, NUM_KV_HEADS, HEAD_DIM, HEADS, DIMS)
            elif ROTATE:
                rows = _turned(x + NUM_Q_HEADS * HEAD_DIM, rotation, first_head, NUM_KV_HEADS, HEAD_DIM, HEADS, DIMS)
            else:
                rows = _rows(x, first_head, NUM_KV_HEADS, HEAD_DIM, HEADS, DIMS)

            page = (slot // BLOCK_SIZE) * NUM_LAYERS + layer
            head = first_head + tl.arange(0, HEADS)
            dim = tl.arange(0, DIMS)
            row = (is_v * NUM_KV_HEADS + head) * BLOCK_SIZE
            places = pool + page * PAGE_ELEMENTS + (row * HEAD_DIM)[:, None] + dim[None, :]
            scale_places = scale_pool + page * PAGE_SCALES + FIRST_SCALE + row
            there = head < NUM_KV_HEADS
            offset = (slot % BLOCK_SIZE).to(tl.int32)
            _write(places + offset * HEAD_DIM, scale_places + offset, rows, there, HEAD_DIM)
            if _ends_new_block(slot_mapping + token, token, slot, offset, num_tokens):
                for behind in range(offset + 1, BLOCK_SIZE):
                    _clear(places + behind * HEAD_DIM, scale_places + behind, there, HEAD_DIM)


@triton.jit
def _rows(
    x: tl.tensor,
    first_head: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    DIMS: tl.constexpr,
) -> tl.tensor:
    """[HEADS, DIMS] of one token, in its own dtype; zero where there is no head or no dim."""
    head, dim = first_head + tl.arange(0, HEADS), tl.arange(0, DIMS)
    there = (head < NUM_HEADS)[:, None] & (dim < HEAD_DIM)[None, :]
    return tl.load(x + (head * HEAD_DIM)[:, None] + dim[None, :], mask=there, other=0)


@triton.jit
def _turned(
    x: tl.tensor,
    rotation: tl.tensor,
    first_head: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    DIMS: tl.constexpr,
) -> tl.tensor:
    """The same, after they were turned in place: multiplied, as complex numbers, by cos + i sin."""
    head, dim = first_head + tl.arange(0, HEADS), tl.arange(0, DIMS)
    pairs = _rows(x, first_head, NUM_HEADS, HEAD_DIM, HEADS, DIMS).to(tl.float32)
    left, right = tl.split(tl.reshape(pairs, (HEADS, DIMS // 2, 2)))
    turn = tl.load(rotation + dim, mask=dim < HEAD_DIM, other=0)
    cos, sin = tl.split(tl.reshape(turn, (1, DIMS // 2, 2)))
    turned = tl.reshape(tl.join(left * cos - right * sin, left * sin + right * cos), (HEADS, DIMS))
    there = (head < NUM_HEADS)[:, None] & (dim < HEAD_DIM)[None, :]
    rows = turned.to(x.dtype.element_ty)
    tl.store(x + (head * HEAD_DIM)[:, None] + dim[None, :], rows, mask=there)
    return rows


@triton.jit
def _write(
    places: tl.tensor, scale_places: tl.tensor, rows: tl.tensor, there: tl.tensor, HEAD_DIM: tl.constexpr
) -> None:
    """Rows, and their scales where the pool has them, in the form that the pool keeps."""
    kept: tl.constexpr = places.dtype.element_ty
    dim = tl.arange(0, rows.shape[1])
    where = there[:, None] & (dim < HEAD_DIM)[None, :]
    if rows.dtype == kept:
        tl.store(places, rows, mask=where)
    elif tl.int8 == kept or tl.uint8 == kept:
        codes, scales = quantised(rows.to(tl.float32), tl.uint8 == kept)
        tl.store(places, codes, mask=where)
        tl.store(scale_places, scales, mask=there)
    else:
        tl.store(places, rounded(rows.to(tl.float32), kept), mask=where)


@triton.jit
def _clear(places: tl.tensor, scale_places: tl.tensor, there: tl.tensor, HEAD_DIM: tl.constexpr) -> None:
    """Zeros in the place of rows and scales."""
    kept: tl.constexpr = places.dtype.element_ty
    where = there[:, None] & (tl.arange(0, places.shape[1]) < HEAD_DIM)[None, :]
    tl.store(places, tl.zeros(places.shape, kept), mask=where)
    if tl.int8 == kept or tl.uint8 == kept:
        tl.store(scale_places, tl.zeros(scale_places.shape, tl.int16), mask=there)


@triton.jit
def _ends_new_block(
    slots: tl.tensor, token: tl.tensor, slot: tl.tensor, offset: tl.tensor, num_tokens: tl.tensor
) -> tl.tensor:
    """Whether this step writes the first slot of the token's block, and none behind this one. `slots`: at the token."""
    following = tl.load(slots + 1, mask=token + 1 < num_tokens, other=-1)
    opening = tl.load(slots - offset, mask=token >= offset, other=-1)
    return (following != slot + 1) & (opening == slot - offset)

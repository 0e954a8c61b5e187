"""RMS norms over the last dimension: y = x / sqrt(mean(x^2) + eps) * weight, in fp32, whatever the activations are.

A program takes whole rows: one wide one, or as many short ones (the heads of a token) as fill a tile.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE_ELEMENTS = 1024
_ELEMENTS_A_WARP = 512
_MAX_WARPS = 16
_MAX_SIZE = 32768
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm of x [T, d] or [T, heads, d], in a new contiguous tensor of its dtype; queued on the current stream.

    `x`: fp32, fp16 or bf16; heads are contiguous, tokens a constant stride apart. `weight`: fp32 [d] or [heads, d],
    contiguous, on the same device. Raises ValueError for anything else, and for d above 32768.
    """
    return _normed(x, None, weight, eps)


def add_rms_norm(x: Tensor, change: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x += change, in place, and then the norm of it: the same values as one after the other.

    `x` [T, d] and `change`, of the same shape and dtype, have rows that are contiguous. Otherwise as `rms_norm`.
    """
    if change.shape != x.shape or change.dtype != x.dtype or x.dim() != 2 or change.stride(1) != 1:
        raise ValueError(f"{change.dtype} {list(change.shape)} cannot be added to rows of {x.dtype} {list(x.shape)}")
    return _normed(x, change, weight, eps)


def _normed(x: Tensor, change: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    size = x.shape[-1]
    heads = x.shape[1] if x.dim() == 3 else 1
    if x.dtype not in _FLOATS or x.dim() not in (2, 3) or not 0 < size <= _MAX_SIZE:
        raise ValueError(f"activations must be [T, d] or [T, heads, d] of floats, not {x.dtype} {list(x.shape)}")
    if x.stride(-1) != 1 or (x.dim() == 3 and x.stride(1) != size):
        raise ValueError(f"heads must be contiguous, not with strides {x.stride()}")
    if weight.dtype != torch.float32 or weight.shape not in ((size,), (heads, size)) or not weight.is_contiguous():
        raise ValueError(f"{weight.dtype} {list(weight.shape)} are no fp32 weights for {list(x.shape)}")
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_rows = len(x) * heads
    if not num_rows:
        return normed
    dims = triton.next_power_of_2(size)
    rows = min(triton.next_power_of_2(heads), max(1, _TILE_ELEMENTS // dims))
    _rms_norm[(triton.cdiv(num_rows, rows),)](
        x,
        x if change is None else change,
        weight,
        normed,
        x.stride(0),
        0 if change is None else change.stride(0),
        num_rows,
        eps,
        HEADS=heads,
        SIZE=size,
        WEIGHT_STRIDE=size if weight.dim() == 2 and heads > 1 else 0,
        ADD=change is not None,
        ROWS=rows,
        DIMS=dims,
        num_warps=min(_MAX_WARPS, max(1, rows * dims // _ELEMENTS_A_WARP)),
    )
    return normed


@triton.jit(do_not_specialize=["num_rows", "eps"])
def _rms_norm(
    x: tl.tensor,
    change: tl.tensor,
    weight: tl.tensor,
    normed: tl.tensor,
    x_stride: tl.int64,
    change_stride: tl.int64,
    num_rows: tl.int32,
    eps: tl.float32,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    WEIGHT_STRIDE: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    DIMS: tl.constexpr,
) -> None:
    """Program i: rows i * ROWS and on; row r is head r % HEADS of token r // HEADS."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, DIMS)[None, :]
    there = (row < num_rows)[:, None] & (dim < SIZE)
    token, head = (row // HEADS).to(tl.int64), row % HEADS
    places = x + (token * x_stride + head * SIZE)[:, None] + dim
    values = tl.load(places, mask=there, other=0).to(tl.float32)
    if ADD:
        values += tl.load(change + (token * change_stride)[:, None] + dim, mask=there, other=0).to(tl.float32)
        # The sum is rounded before it is squared, so that nothing depends on whether the two steps are one.
        total = values.to(x.dtype.element_ty)
        tl.store(places, total, mask=there)
        values = total.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(values * values, 1) / SIZE + eps)
    weights = tl.load(weight + (head * WEIGHT_STRIDE)[:, None] + dim, mask=dim < SIZE, other=0)
    result = values * inverse[:, None] * weights
    tl.store(normed + (row.to(tl.int64) * SIZE)[:, None] + dim, result.to(x.dtype.element_ty), mask=there)

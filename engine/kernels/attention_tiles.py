"""What the attention kernels share: how they see a pool, and how a tile of K or V becomes something to multiply.

Scores are exponents of 2. Quantised K and V are multiplied as they are stored: their codes are exact in fp16, so tensor
cores take them, and nothing is rounded that was not rounded when it was quantised. Two neighbouring codes are loaded as
one element of 16 bits, which copies into and out of shared memory treat as they treat fp16; what is even and what is
odd in a row is then multiplied separately.

    K:  score[m, n] = (q[m] . code[n]) * scale[n]
    V:  scale[n] = 2^e[n] * f[n]. weight[m, n] = 2^(score[m, n] + e[n] - maximum), of which the maximum is taken too:
        weight * f, which code[n] is multiplied with, is at most 2 and fits fp16 whatever the scales are. The sum of
        weights has 2^-e divided out again, in fp32: at most 2^24, because a token whose scale is 0 counts as one with
        the smallest fp16 (its codes are zeros).
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.pools import pool_views
from kv_cache.layout import SCALE_BYTES, KVCacheLayout, KVDtype

_ELEMENTS = {
    KVDtype.FP32: torch.float32,
    KVDtype.FP16: torch.float16,
    KVDtype.BF16: torch.bfloat16,
    KVDtype.FP8_E4M3: torch.int16,
    KVDtype.INT8: torch.int16,
}
_TL_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}

# What the elements are, for the kernels.
VALUES = tl.constexpr(0)
INT8_CODES = tl.constexpr(1)
FP8_CODES = tl.constexpr(2)
# The same, taken apart by integer arithmetic where the GPU cannot convert fp8.
FP8_BITS = tl.constexpr(3)
_FP8_CAPABILITY = 89
_SCALE_WORD_BYTES = 2 * SCALE_BYTES

LOG2_E = tl.constexpr(1.4426950408889634)
_SMALLEST_SCALE = tl.constexpr(2.0**-24)


@functools.cache
def capability_of(device: torch.device) -> int | None:
    """The compute capability, 90 for 9.0; None on a CPU, where kernels run under Triton's interpreter only."""
    if device.type != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def product_dtype(layout: KVCacheLayout, q_dtype: torch.dtype) -> torch.dtype:
    """What is multiplied: fp16 with quantised K and V, else the wider of the two; fp32, as three tf32 products, if q
    is fp32."""
    if layout.dtype.has_scales:
        return torch.float32 if q_dtype == torch.float32 else torch.float16
    return torch.promote_types(q_dtype, _ELEMENTS[layout.dtype])


@functools.cache
def pool_constants(layout: KVCacheLayout, q_dtype: torch.dtype, capability: int | None) -> dict[str, Any]:
    """The constants that a kernel is compiled with: what `token_rows`, `operand` and their like take.

    ROW is the length of a head's row in elements as they are loaded, which offsets and strides of K and V count too;
    those of scales are in words of two scales. DTYPE is `product_dtype`; but the interpreter multiplies bf16 as if it
    were integers, so there it is fp32.
    """
    itemsize = _ELEMENTS[layout.dtype].itemsize
    dtype = product_dtype(layout, q_dtype)
    if capability is None and dtype == torch.bfloat16:
        dtype = torch.float32
    codes = {KVDtype.INT8: INT8_CODES, KVDtype.FP8_E4M3: FP8_CODES}.get(layout.dtype, VALUES)
    if codes is FP8_CODES and (capability is None or capability < _FP8_CAPABILITY):
        codes = FP8_BITS
    return {
        "CODES": codes.value,
        "DTYPE": _TL_DTYPES[dtype],
        "BLOCK_SIZE": layout.block_size,
        "HEAD_DIM": layout.head_dim,
        "DIM": max(32, triton.next_power_of_2(layout.head_dim)),
        "ROW": layout.head_dim * layout.dtype.itemsize // itemsize,
        "BLOCK_STRIDE": layout.block_bytes // itemsize,
        "V_OFFSET": layout.v_offset // itemsize,
        "SCALE_STRIDE": layout.block_bytes // _SCALE_WORD_BYTES,
        "K_SCALES": layout.k_scale_offset // _SCALE_WORD_BYTES,
        "V_SCALES": layout.v_scale_offset // _SCALE_WORD_BYTES,
    }


def layer_views(pool: Tensor, layout: KVCacheLayout, layer: int) -> tuple[Tensor, Tensor]:
    """The pool from the first page of a layer on: elements of K and V (int16 pairs of codes), int32 pairs of scales."""
    rest = pool[layer * layout.page_bytes :]
    return rest.view(_ELEMENTS[layout.dtype]), rest.view(torch.int32)


def check_pool(pool: Tensor, layout: KVCacheLayout, layer: int) -> None:
    """Raises ValueError unless `pool` is uint8 [bytes], aligned to 16, of whole blocks, and has this layer."""
    pool_views(pool, layout)
    if pool.numel() % layout.block_bytes:
        raise ValueError(f"a pool has whole blocks, not {pool.numel()} bytes")
    if not 0 <= layer < layout.num_layers:
        raise ValueError(f"there is no layer {layer} of {layout.num_layers}")


def check_heads(name: str, heads: Tensor, layout: KVCacheLayout, device: torch.device) -> None:
    """Raises ValueError unless `heads` is [tokens, heads, head_dim] for this pool, heads contiguous."""
    if heads.dtype not in _TL_DTYPES or heads.device != device:
        raise ValueError(f"{name} is {heads.dtype} on {heads.device}: it must be fp32, fp16 or bf16 on {device}")
    if heads.dim() != 3 or heads.shape[2] != layout.head_dim or not heads.shape[1]:
        raise ValueError(f"{name} must be [tokens, heads, {layout.head_dim}], not {list(heads.shape)}")
    if heads.shape[1] % layout.num_kv_heads:
        raise ValueError(f"{name} has {heads.shape[1]} heads over {layout.num_kv_heads} kv heads")
    if heads.stride(2) != 1 or heads.stride(1) != layout.head_dim:
        raise ValueError(f"the heads of {name} must be contiguous, their strides are {heads.stride()}")


def check_rows(block_tables: Tensor, vectors: dict[str, tuple[Tensor, int]], device: torch.device) -> None:
    """Raises ValueError unless `block_tables` is int32 [rows, blocks] and each vector int32 of the length beside it."""
    if block_tables.dtype != torch.int32 or block_tables.dim() != 2 or block_tables.stride(1) != 1:
        raise ValueError(f"block tables are int32 [rows, blocks], not {block_tables.dtype} {list(block_tables.shape)}")
    if block_tables.device != device:
        raise ValueError(f"block tables are on {block_tables.device}, the pool is on {device}")
    for name, (vector, length) in vectors.items():
        if vector.dtype != torch.int32 or list(vector.shape) != [length] or not vector.is_contiguous():
            raise ValueError(f"{name} must be int32 [{length}], not {vector.dtype} {list(vector.shape)}")
        if vector.device != device:
            raise ValueError(f"{name} is on {vector.device}, the pool is on {device}")


@triton.jit
def token_pages(table: tl.tensor, tokens: tl.tensor, there: tl.tensor, BLOCK_SIZE: tl.constexpr) -> tl.tensor:
    """int64 [N]: the block of each token. Offsets into a pool need 64 bits."""
    return tl.load(table + tokens // BLOCK_SIZE, mask=there, other=0).to(tl.int64)


@triton.jit
def load_rows(
    rows: tl.tensor, there: tl.tensor, LENGTH: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr
) -> tl.tensor:
    """[N, PADDED] elements from pointers [N] on: zeros behind LENGTH and, if MASKED, where the token is not there."""
    column = tl.arange(0, PADDED)[None, :]
    pointers = rows[:, None] + column
    if LENGTH == PADDED and not MASKED:
        return tl.load(pointers)
    mask = column < LENGTH
    if MASKED:
        mask = there[:, None] if LENGTH == PADDED else there[:, None] & mask
    return tl.load(pointers, mask=mask, other=0)


@triton.jit
def codes_of(pairs: tl.tensor, CODES: tl.constexpr, DTYPE: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The first and the second code of each pair as numbers. FP8_BITS come out 256 times too small."""
    both = pairs.to(tl.uint16, bitcast=True)
    if CODES == 1:
        # The byte with its sign flipped, below the exponent of 1024: 1024 + 128 + code.
        first = (((both & 0xFF) ^ 0x6480).to(tl.float16, bitcast=True) - 1152.0).to(DTYPE)
        second = (((both >> 8) ^ 0x6480).to(tl.float16, bitcast=True) - 1152.0).to(DTYPE)
    elif CODES == 2:
        first = (both & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(DTYPE)
        second = (both >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(DTYPE)
    else:
        # Sign, 4 bits of exponent and 3 of mantissa, put where fp16 has them, subnormals too.
        first = (((both & 0x80) << 8) | ((both & 0x7F) << 7)).to(tl.float16, bitcast=True).to(DTYPE)
        second = ((both & 0x8000) | ((both & 0x7F00) >> 1)).to(tl.float16, bitcast=True).to(DTYPE)
    return first, second


@triton.jit
def load_scales(words: tl.tensor, index: tl.tensor, there: tl.tensor, CODES: tl.constexpr) -> tl.tensor:
    """fp32 [N]: what each token's codes must be multiplied with, from its place among fp16 scales that begin at `words`
    [N], pointers to int32. Where no token is: 0. Two are loaded at once because cp.async moves no less."""
    two = tl.load(words + index // 2, mask=there, other=0)
    bits = (two >> (index % 2 * 16)) & 0xFFFF
    scales = bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    if CODES == 3:
        scales *= 256.0
    return scales


@triton.jit
def halves(x: tl.tensor, M: tl.constexpr, DIM: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The even and the odd columns of x [M, DIM]."""
    even, odd = tl.split(tl.reshape(x, [M, DIM // 2, 2]))
    return even, odd


@triton.jit
def taken_apart(scales: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """(e, f, 2^-e) of scales of V: f from 1 to 2, f * 2^e the scale, or 2^-24 where that is 0.

    By integer arithmetic, because every thread does it. The f of a NaN is one: it stands for a fault that must not be
    hidden.
    """
    scales = tl.where(scales < _SMALLEST_SCALE, _SMALLEST_SCALE, scales)
    exponent = scales.to(tl.int32, bitcast=True) >> 23
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return (exponent - 127).to(tl.float32), scales * inverse, inverse


@triton.jit
def query_operand(q: tl.tensor, CODES: tl.constexpr, DTYPE: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """q [M, DIM] in DTYPE, and what its scores must be multiplied with.

    bf16 has a wider range than the fp16 that codes are multiplied in, so it is divided by a power of two: that of the
    largest number of the tile. What is 2^14 times smaller loses bits then, more than bf16 has from 2^17 on.
    """
    factor = 1.0
    if CODES != 0 and q.dtype == tl.bfloat16 and tl.float32 != DTYPE:
        q = q.to(tl.float32)
        largest = tl.max(tl.max(tl.abs(q), 1), 0)
        power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        factor = tl.where(power > 0, power, 1.0)
        q = q / factor
    return q.to(DTYPE), factor


@triton.jit
def capped(scores: tl.tensor, scale: tl.float32, soft_cap: tl.float32) -> tl.tensor:
    """soft_cap * tanh(scale * score / soft_cap), as exponents of 2."""
    # tanh(x) = 1 - 2 / (e^2x + 1), without overflow at either end.
    doubled = scores * (scale * (2 * LOG2_E) / soft_cap)
    return (soft_cap * LOG2_E) * (1 - 2 / (tl.exp2(doubled) + 1))


@triton.jit
def score_tile(
    queries: tl.tensor,
    odd_queries: tl.tensor,
    keys: tl.tensor,
    k_scales: tl.tensor,
    e: tl.tensor,
    factor: tl.tensor,
    scale: tl.float32,
    soft_cap: tl.float32,
    CODES: tl.constexpr,
    DTYPE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
) -> tl.tensor:
    """fp32 [M, N] exponents, those of codes with e [N] added; without codes and cap still to be scaled: `fold_tile`
    does it within the exponent, in one instruction."""
    if CODES == 0:
        scores = tl.dot(queries, tl.trans(keys.to(DTYPE)), input_precision="tf32x3")
        if SOFT_CAP:
            scores = capped(scores, scale, soft_cap)
    else:
        even, odd = codes_of(keys, CODES, DTYPE)
        scores = tl.dot(queries, tl.trans(even), input_precision="tf32x3")
        scores = tl.dot(odd_queries, tl.trans(odd), scores, input_precision="tf32x3")
        if SOFT_CAP:
            scores = capped(scores * (factor * k_scales)[None, :], scale, soft_cap) + e[None, :]
        else:
            scores = scores * (factor * scale * LOG2_E * k_scales)[None, :] + e[None, :]
    return scores


@triton.jit
def fold_tile(
    scores: tl.tensor,
    values: tl.tensor,
    f: tl.tensor,
    inverse: tl.tensor,
    maximum: tl.tensor,
    total: tl.tensor,
    output: tl.tensor,
    odd_output: tl.tensor,
    step: tl.float32,
    CODES: tl.constexpr,
    DTYPE: tl.constexpr,
    MAY_SEE_NOTHING: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """(maximum, total, output, odd_output), each over all tiles so far: one step of the online softmax.

    scores [M, N], -inf where nothing is to be seen, times `step` are exponents. values [N, ...] as loaded.
    """
    new_maximum = tl.maximum(maximum, tl.max(scores, 1) * step)
    base = new_maximum
    if MAY_SEE_NOTHING:
        base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    shrink = tl.exp2(maximum - base)
    weights = tl.exp2(scores * step - base[:, None])
    output *= shrink[:, None]
    if CODES == 0:
        total = total * shrink + tl.sum(weights, 1)
        output = tl.dot(weights.to(DTYPE), values.to(DTYPE), output, input_precision="tf32x3")
    else:
        total = total * shrink + tl.sum(weights * inverse[None, :], 1)
        even, odd = codes_of(values, CODES, DTYPE)
        weights = (weights * f[None, :]).to(DTYPE)
        output = tl.dot(weights, even, output, input_precision="tf32x3")
        odd_output = tl.dot(weights, odd, odd_output * shrink[:, None], input_precision="tf32x3")
    return new_maximum, total, output, odd_output

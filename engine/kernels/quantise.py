"""The numbers of `kv_transfer.quantise` inside a kernel: the same bytes for the same rows.

A row is the head_dim elements of one head and token, a tile is [rows, head_dim]; what pads a row is zero. Rounding is
done in integers wherever compilers, GPUs and Triton's interpreter do not agree on it.
"""

import triton
import triton.language as tl

_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_INFINITY = tl.constexpr(0x7F800000)
_NAN_FP32 = tl.constexpr(0x7FC00000)
_NAN_FP16 = tl.constexpr(0x7E00)
_NAN_BF16 = tl.constexpr(0x7FC0)
_LARGEST_FP16 = tl.constexpr(65504.0)
_INT8_LIMIT = tl.constexpr(127.0)
_FP8_LIMIT = tl.constexpr(448.0)
_FP8_NAN = tl.constexpr(0x7F)

# The distance between neighbouring fp32 values is 1 from the first on, and that of fp8's subnormals from the second.
_TO_INTEGER = tl.constexpr(12582912.0)
_TO_FP8_SUBNORMAL = tl.constexpr(16384.0)
_FP8_SUBNORMAL_ZERO = tl.constexpr(0x46800000)
# Bits of an fp32 exponent and of the fp8 e4m3 one with the same meaning, times the distance of their places.
_FP8_EXPONENTS_LESS = tl.constexpr(120 << 3)
_FP8_SCALE_BACK = tl.constexpr(2.0**120)
_FP8_FIRST_NORMAL = tl.constexpr(0x3C800000)


@triton.jit
def quantised(rows: tl.tensor, FP8: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """fp32 rows [R, D] -> (codes [R, D]: int8, or the bits of fp8 e4m3 as uint8; bits of the fp16 scales int16 [R])."""
    LIMIT: tl.constexpr = _FP8_LIMIT if FP8 else _INT8_LIMIT
    largest = tl.max(rows.to(tl.int32, bitcast=True) & _MAGNITUDE, 1)
    usable = largest < _INFINITY
    wide_scales = tl.div_rn(largest.to(tl.float32, bitcast=True), tl.full(largest.shape, LIMIT, tl.float32))
    scales = tl.minimum(wide_scales, _LARGEST_FP16).to(tl.float16)
    divisors = scales.to(tl.float32)
    inverse = tl.where(divisors > 0, tl.div_rn(tl.full(largest.shape, 1.0, tl.float32), divisors), 0.0)
    scaled = tl.where(usable[:, None], rows * inverse[:, None], 0.0)
    scaled = tl.minimum(tl.maximum(scaled, -LIMIT), LIMIT)
    scale_bits = tl.where(usable, scales.to(tl.int16, bitcast=True), _NAN_FP16).to(tl.int16)
    codes = _fp8_bits(scaled) if FP8 else _int8(scaled)
    return codes, scale_bits


@triton.jit
def dequantised(codes: tl.tensor, scale_bits: tl.tensor) -> tl.tensor:
    """fp32 [R, D] of codes [R, D] (int8; uint8: the bits of fp8 e4m3) and the bits of fp16 scales int16 [R]."""
    if codes.dtype == tl.int8:
        values = codes.to(tl.float32)
    else:
        bits = codes.to(tl.int32)
        # Read as an fp32 with a smaller exponent, which is exact, subnormals included.
        magnitudes = ((bits & 0x7F) << 20).to(tl.float32, bitcast=True) * _FP8_SCALE_BACK
        magnitude_bits = tl.where((bits & 0x7F) == _FP8_NAN, _NAN_FP32, magnitudes.to(tl.int32, bitcast=True))
        values = (magnitude_bits | ((bits & 0x80) << 24)).to(tl.float32, bitcast=True)
    return values * scale_bits.to(tl.float16, bitcast=True).to(tl.float32)[:, None]


@triton.jit
def rounded(rows: tl.tensor, TYPE: tl.constexpr) -> tl.tensor:
    """fp32 rows in fp32, fp16 or bf16. Overflow gives the largest finite value; a NaN becomes the one quiet NaN."""
    bits = rows.to(tl.int32, bitcast=True)
    magnitude = bits & _MAGNITUDE
    missing = magnitude > _INFINITY
    if tl.float32 == TYPE:
        result = tl.where(missing, _NAN_FP32, bits)
    elif tl.bfloat16 == TYPE:
        sign = (bits >> 16) & 0x8000
        upper = (magnitude + 0x7FFF + ((magnitude >> 16) & 1)) >> 16
        upper = tl.where(magnitude < _INFINITY, tl.minimum(upper, 0x7F7F), upper)
        result = tl.where(missing, _NAN_BF16, sign | upper).to(tl.int16)
    else:
        half = rows.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
        upper = half & 0x7FFF
        upper = tl.where(magnitude < _INFINITY, tl.minimum(upper, 0x7BFF), upper)
        result = tl.where(missing, _NAN_FP16, (half & 0x8000) | upper).to(tl.int16)
    return result.to(TYPE, bitcast=True)


@triton.jit
def _int8(values: tl.tensor) -> tl.tensor:
    """int8: fp32 values within -127..127 rounded, ties to even."""
    # In the sum the integer, in two's complement, is what the lowest byte holds.
    return (values + _TO_INTEGER).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def _fp8_bits(values: tl.tensor) -> tl.tensor:
    """uint8: fp32 values within -448..448 rounded to fp8 e4m3, ties to even."""
    bits = values.to(tl.int32, bitcast=True)
    magnitude = bits & _MAGNITUDE
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - _FP8_EXPONENTS_LESS
    shifted = magnitude.to(tl.float32, bitcast=True) + _TO_FP8_SUBNORMAL
    subnormal = shifted.to(tl.int32, bitcast=True) - _FP8_SUBNORMAL_ZERO
    code = tl.where(magnitude < _FP8_FIRST_NORMAL, subnormal, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)

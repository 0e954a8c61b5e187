"""Element types of K and V turned into each other, defined to the bit, so that any other code can give the same bytes.

A *row* is the head_dim elements of one head and token. All arithmetic is IEEE fp32, rounds to nearest, ties to even,
and keeps subnormals. Between two dtypes a row goes through fp32:

    fp32 of a row     fp32, fp16, bf16: its values. fp8_e4m3, int8: fp32(code) * fp32(scale), one multiplication.

    row to fp16, bf16 Each value rounded. What is finite and rounds to infinity becomes the largest finite value of its
                      sign; infinity stays; a NaN becomes the one quiet NaN (0x7e00, 0x7fc0; in fp32 0x7fc00000).

    row to int8, fp8  limit = 127, 448 (the largest code). amax = largest |value| of the row.
                      scale   = fp16(min(amax / limit, 65504))
                      inverse = 1 / fp32(scale), or 0 if the scale is 0
                      code    = value * inverse, clipped to -limit..limit, rounded to an integer, or to fp8 e4m3.
                      A row that holds an infinity or a NaN gets the scale NaN (0x7e00) and all codes 0: it reads back
                      as NaN, so a fault upstream is never hidden by saturation.

So a row of zeros has scale 0; fp8 keeps the sign of a zero. Read back, |error| <= amax/254 (int8, and amax/28 in fp8)
plus the rounding of the scale, which is at most 2^-11 of amax, or limit * 2^-25 where the scale is below 2^-14.
The same dtype on both sides is a copy of bytes.
"""

from dataclasses import dataclass
from typing import Any, Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from kv_cache.layout import KVDtype

Array = NDArray[Any]

_STORAGE: Final[dict[KVDtype, np.dtype[Any]]] = {
    KVDtype.FP32: np.dtype(np.float32),
    KVDtype.FP16: np.dtype(np.float16),
    KVDtype.BF16: np.dtype(ml_dtypes.bfloat16),
    KVDtype.FP8_E4M3: np.dtype(ml_dtypes.float8_e4m3fn),
    KVDtype.INT8: np.dtype(np.int8),
}
LIMITS: Final = {KVDtype.INT8: 127.0, KVDtype.FP8_E4M3: 448.0}
"""Largest magnitude of a code."""

_FP32_INFINITY = np.uint32(0x7F800000)
_FP16_LARGEST = np.float32(65504.0)
_NAN = {KVDtype.FP32: 0x7FC00000, KVDtype.FP16: 0x7E00, KVDtype.BF16: 0x7FC0}
_INFINITY = {KVDtype.FP16: 0x7C00, KVDtype.BF16: 0x7F80}


def storage(dtype: KVDtype) -> "np.dtype[Any]":
    """The numpy type of an element."""
    return _STORAGE[dtype]


@dataclass(frozen=True, slots=True)
class Tiles:
    """Rows of one dtype: `values` [rows..., head_dim] of `storage(dtype)`, and `scales` fp16 [rows...] if any."""

    dtype: KVDtype
    values: Array
    scales: Array | None = None


def convert(source: Tiles, into: Tiles) -> None:
    """Fill `into` with the rows of `source`, which has the same shape. Any strides. Any thread."""
    if source.dtype is into.dtype:
        bits = np.dtype(f"u{source.dtype.itemsize}")
        np.copyto(into.values.view(bits), source.values.view(bits))
        if source.scales is not None and into.scales is not None:
            np.copyto(into.scales, source.scales)
        return
    with np.errstate(all="ignore"):  # Overflow and NaN are provided for.
        rows = _fp32(source)
        if into.scales is None:
            np.copyto(into.values, _rounded(rows, into.dtype))
            return
        codes, scales = _quantised(rows, into.dtype)
        np.copyto(into.values.view(codes.dtype), codes)
        np.copyto(into.scales, scales)


def _fp32(source: Tiles) -> Array:
    """fp32 [..., head_dim]: what the rows stand for."""
    if source.scales is None:
        return np.asarray(source.values, np.float32)
    if source.dtype is KVDtype.FP8_E4M3:
        rows: Array = _FP8_VALUES.take(source.values.view(np.uint8))
    else:
        rows = source.values.astype(np.float32)
    rows *= source.scales.astype(np.float32)[..., np.newaxis]
    return rows


def _rounded(rows: Array, dtype: KVDtype) -> Array:
    """fp32 rows in a float dtype without scales."""
    values = rows.astype(_STORAGE[dtype], order="C")
    if dtype is KVDtype.FP32:
        missing = np.isnan(rows)
        if missing.any():
            values.view(np.uint32)[missing] = _NAN[dtype]
        return values
    bits = values.view(np.uint16)
    if int((bits & np.uint16(0x7FFF)).max(initial=0)) < _INFINITY[dtype]:
        return values
    overflown = ((bits & np.uint16(0x7FFF)) == _INFINITY[dtype]) & np.isfinite(rows)
    bits[overflown] = (bits[overflown] & np.uint16(0x8000)) | np.uint16(_INFINITY[dtype] - 1)
    bits[np.isnan(rows)] = _NAN[dtype]
    return values


def _quantised(rows: Array, dtype: KVDtype) -> tuple[Array, Array]:
    """(codes int8 or the bits of fp8 as uint8 [..., head_dim], scales fp16 [...]) of fp32 rows."""
    limit = np.float32(LIMITS[dtype])
    largest = _largest_bits(rows)
    unusable = largest >= _FP32_INFINITY
    scales = np.minimum(largest.view(np.float32) / limit, _FP16_LARGEST).astype(np.float16)
    wide = scales.astype(np.float32)
    inverse = np.divide(np.float32(1), wide, out=np.zeros_like(wide), where=wide > 0)
    scaled = np.multiply(rows, inverse[..., np.newaxis], out=np.empty(rows.shape, np.float32))
    if unusable.any():
        scaled[unusable] = 0
        scales.view(np.uint16)[unusable] = _NAN[KVDtype.FP16]
    np.clip(scaled, -limit, limit, out=scaled)
    if dtype is KVDtype.INT8:
        return np.rint(scaled, out=scaled).astype(np.int8), scales
    return _fp8_bits(scaled), scales


def _largest_bits(rows: Array) -> Array:
    """uint32 [...]: the bits of the largest magnitude of each row, which order as the magnitudes do, NaN last."""
    bits = rows.view(np.uint32) & np.uint32(0x7FFFFFFF)
    while (width := bits.shape[-1]) > 1:  # Halving keeps the inner loops long; numpy's own reduction is slower.
        half = width // 2
        folded = np.maximum(bits[..., :half], bits[..., half : 2 * half])
        if width % 2:
            np.maximum(folded[..., 0], bits[..., -1], out=folded[..., 0])
        bits = folded
    return np.ascontiguousarray(bits[..., 0])


def _fp8_bits(values: Array) -> Array:
    """uint8: fp32 values within -448..448 rounded to fp8 e4m3. Several times faster than the cast of ml_dtypes."""
    # The upper half of an fp32, its last bit set if the lower half is not zero, rounds as the whole does: it has four
    # bits more than fp8 keeps, so what it lost can matter only by being there.
    bits = values.view(np.uint32)
    sticky = bits & np.uint32(0xFFFF)
    sticky += np.uint32(0xFFFF)
    sticky |= bits
    return _FP8_OF_UPPER_HALF.take(sticky.view(np.dtype("<u2"))[..., 1::2])


def _fp8_of_upper_halves() -> Array:
    with np.errstate(all="ignore"):
        upper = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
        rounded: Array = upper.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return rounded


_FP8_VALUES: Final[Array] = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
_FP8_OF_UPPER_HALF: Final[Array] = _fp8_of_upper_halves()

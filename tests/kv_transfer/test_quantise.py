"""Dtypes of K and V turned into each other: to the bit, within the promised error, and with every odd value."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from kv_cache.layout import KVDtype
from kv_transfer.quantise import LIMITS, Array, Tiles, convert, storage

FP32, FP16, BF16, FP8, INT8 = KVDtype.FP32, KVDtype.FP16, KVDtype.BF16, KVDtype.FP8_E4M3, KVDtype.INT8
QUANTISED = (FP8, INT8)
INF, NAN = float("inf"), float("nan")
LARGEST = {FP16: 65504.0, BF16: float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)}


def tiles(dtype: KVDtype, *shape: int) -> Tiles:
    scales = np.full(shape[:-1], 0x5555, np.uint16).view(np.float16) if dtype.has_scales else None
    return Tiles(dtype, np.full(shape, 0x55, f"u{dtype.itemsize}").view(storage(dtype)), scales)


def to(dtype: KVDtype, rows: Any, source: KVDtype = FP32) -> Tiles:
    values = np.array(rows, np.float32)
    into = tiles(dtype, *values.shape)
    convert(Tiles(source, values.astype(storage(source))), into)
    return into


def back(stored: Tiles) -> Array:
    into = tiles(FP32, *stored.values.shape)
    convert(stored, into)
    return into.values


def bits(values: Array) -> list[int]:
    flat: list[int] = values.view(f"u{values.itemsize}").ravel().tolist()
    return flat


def test_golden_bytes_of_int8() -> None:
    stored = to(INT8, [[127.0, -127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 0.0], [1.0, -0.25, 0.1, 1e-3, 0.0, -0.0, 0.5, 0.75]])
    assert stored.scales is not None
    assert stored.values[0].tolist() == [127, -127, 0, 2, 2, 0, -2, 0]
    assert stored.values[1].tolist() == [127, -32, 13, 0, 0, 0, 64, 95]
    assert bits(stored.scales) == [0x3C00, 0x2008]


def test_golden_bytes_of_fp8() -> None:
    stored = to(
        FP8, [[448.0, -448.0, 1.0, 1.0625, 1.1875, 2.0**-9, 2.0**-10, -0.0], [1.0, 0.5, -0.3, 0, 0, 0, 0, 1e-3]]
    )
    assert stored.scales is not None
    assert bits(stored.values[0]) == [0x7E, 0xFE, 0x38, 0x38, 0x3A, 0x01, 0x00, 0x80]
    assert bits(stored.values[1]) == [0x7E, 0x76, 0xF0, 0x00, 0x00, 0x00, 0x00, 0x2E]
    assert bits(stored.scales) == [0x3C00, 0x1892]


@pytest.mark.parametrize("dtype", QUANTISED)
def test_the_definition_holds_element_by_element(dtype: KVDtype) -> None:
    rows = np.random.default_rng(1).standard_normal((50, 24)).astype(np.float32) * np.float32(3)
    stored, limit = to(dtype, rows), np.float32(LIMITS[dtype])
    assert stored.scales is not None
    for row, codes, scale in zip(rows, stored.values, stored.scales, strict=True):
        assert scale == np.float16(np.abs(row).max() / limit)
        scaled = np.clip(row * (np.float32(1) / np.float32(scale)), -limit, limit)
        expected = np.rint(scaled).astype(np.int8) if dtype is INT8 else scaled.astype(ml_dtypes.float8_e4m3fn)
        assert bits(codes) == bits(expected)


def test_every_value_rounds_to_fp8_as_a_cast_does() -> None:
    """Ties, subnormals and both neighbours of every code, through rows whose scale is exactly one."""
    codes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    finite = np.sort(codes[np.isfinite(codes)])
    middles = (finite[:-1] + finite[1:]) / np.float32(2)
    near = [np.nextafter(middles, np.float32(sign * 1e9), dtype=np.float32) for sign in (-1, 1)]
    values = np.concatenate([finite, middles, *near])
    rows = np.stack([np.full_like(values, 448), values], axis=-1)
    stored = to(FP8, rows)
    assert bits(stored.values[:, 1]) == bits(values.astype(ml_dtypes.float8_e4m3fn))


@pytest.mark.parametrize("dtype", QUANTISED)
@settings(max_examples=80, deadline=None)
@given(rows=arrays.arrays(np.float32, (3, 7), elements=st.floats(-3e4, 3e4, width=32, allow_subnormal=False)))
def test_the_error_stays_within_its_bound(dtype: KVDtype, rows: Array) -> None:
    largest = np.abs(rows).max(-1, keepdims=True).astype(np.float64)
    step = 1 / 254 if dtype is INT8 else 1 / 28
    scale_error = np.maximum(largest * 2.0**-11, LIMITS[dtype] * 2.0**-25)
    assert (np.abs(back(to(dtype, rows)) - rows.astype(np.float64)) <= largest * step * 1.001 + scale_error).all()


@pytest.mark.parametrize("dtype", QUANTISED)
def test_a_row_of_zeros_has_the_scale_zero_and_reads_back_as_zeros(dtype: KVDtype) -> None:
    stored = to(dtype, np.zeros((2, 5)))
    assert stored.scales is not None
    assert bits(stored.scales) == [0, 0]
    assert bits(stored.values) == [0] * 10
    assert bits(back(stored)) == [0] * 10


@pytest.mark.parametrize("dtype", QUANTISED)
def test_values_too_small_for_a_scale_become_zeros(dtype: KVDtype) -> None:
    assert bits(back(to(dtype, [[1e-30, 1e-45, 0.0]]))) == [0, 0, 0]


@pytest.mark.parametrize("dtype", QUANTISED)
def test_values_too_large_for_a_scale_saturate(dtype: KVDtype) -> None:
    stored = to(dtype, [[3e38, -3e38, 1.0]])
    assert stored.scales is not None
    assert stored.scales.tolist() == [65504.0]
    assert stored.values.astype(np.float32).tolist() == [[LIMITS[dtype], -LIMITS[dtype], 0.0]]


@pytest.mark.parametrize("dtype", QUANTISED)
@pytest.mark.parametrize("odd", [INF, -INF, NAN])
def test_a_row_with_an_infinity_or_a_nan_reads_back_as_nan_and_its_neighbours_as_themselves(
    dtype: KVDtype, odd: float
) -> None:
    stored = to(dtype, [[1.0, 2.0, 4.0], [1.0, odd, 2.0], [4.0, 2.0, 1.0]])
    assert stored.scales is not None
    assert bits(stored.scales)[1] == 0x7E00
    assert bits(stored.values[1]) == [0, 0, 0]
    read = back(stored)
    assert bits(read[1]) == [0x7FC00000] * 3
    assert np.isfinite(read[[0, 2]]).all()


@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_floats_round_to_even_saturate_and_keep_infinities_and_nans(dtype: KVDtype) -> None:
    largest, ulp = LARGEST[dtype], 2.0**-10 if dtype is FP16 else 2.0**-7
    beyond = np.nextafter(np.float32(3.4e38), np.float32(INF)) if dtype is FP16 else np.finfo(np.float32).max
    stored = to(dtype, [[1 + ulp / 2, 1 + 3 * ulp / 2, float(beyond), -float(beyond), INF, -INF, NAN, -0.0]])
    read = stored.values.astype(np.float32)[0]
    assert read[:6].tolist() == [1.0, 1 + 2 * ulp, largest, -largest, INF, -INF]
    assert bits(stored.values)[6:] == ([0x7E00, 0x8000] if dtype is FP16 else [0x7FC0, 0x8000])


@pytest.mark.parametrize("source", [FP32, FP16, BF16])
@pytest.mark.parametrize("target", [FP32, FP16, BF16])
def test_a_nan_has_one_form_unless_it_is_only_moved(source: KVDtype, target: KVDtype) -> None:
    held = tiles(source, 1, 2)
    held.values.view(f"u{source.itemsize}")[...] = (1 << 8 * source.itemsize) - 2  # a NaN with sign and payload
    into = tiles(target, 1, 2)
    convert(held, into)
    quiet = {FP32: 0x7FC00000, FP16: 0x7E00, BF16: 0x7FC0}[target]
    assert bits(into.values) == ([quiet] * 2 if source is not target else bits(held.values))


@pytest.mark.parametrize("source", KVDtype)
@pytest.mark.parametrize("target", KVDtype)
def test_any_dtype_becomes_any_other_by_way_of_fp32(source: KVDtype, target: KVDtype) -> None:
    rows = np.random.default_rng(2).standard_normal((4, 3, 8)).astype(np.float32)
    held, direct, in_two_steps, wide = to(source, rows), *(tiles(d, 4, 3, 8) for d in (target, target, FP32))
    convert(held, direct)
    convert(held, wide)
    convert(wide, in_two_steps)
    if source is target:
        assert bits(direct.values) == bits(held.values)
    else:
        assert bits(direct.values) == bits(in_two_steps.values)
        if direct.scales is not None and in_two_steps.scales is not None:
            assert bits(direct.scales) == bits(in_two_steps.scales)


@pytest.mark.parametrize("dtype", KVDtype)
def test_strides_do_not_matter(dtype: KVDtype) -> None:
    rows = np.random.default_rng(3).standard_normal((6, 5, 9)).astype(np.float32)
    plain, other = to(dtype, rows), tiles(dtype, 5, 6, 9)
    convert(Tiles(FP32, rows.transpose(1, 0, 2)), other)
    assert bits(np.ascontiguousarray(other.values.transpose(1, 0, 2))) == bits(plain.values)
    read = tiles(FP32, 6, 5, 9)
    scales = None if other.scales is None else other.scales.T
    convert(Tiles(dtype, other.values.transpose(1, 0, 2), scales), read)
    assert bits(read.values) == bits(back(plain))

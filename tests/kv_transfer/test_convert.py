"""Pages made from pages of another layout, against a model that moves one row at a time; and what is refused."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_cache.layout import KVCacheLayout, KVDtype
from kv_transfer.convert import PageConverter, check_wire, describe, layout_refusal, requantise, wire_layout
from kv_transfer.quantise import Tiles, convert, storage

BASE = KVCacheLayout("tiny", "abc", num_layers=2, num_kv_heads=4, head_dim=6, block_size=16, dtype=KVDtype.FP32)
SIZES = (8, 16, 32, 64, 128)
GARBAGE = 0xEE


def pool_of(layout: KVCacheLayout, num_blocks: int, seed: int) -> memoryview:
    """Blocks of random bytes: numbers of all sizes, infinities and NaNs, and anything in the padding."""
    return memoryview(np.random.default_rng(seed).bytes(layout.pool_bytes(num_blocks)))


Place = tuple[int, int, int, int, int]
"""Block, layer, K or V, head, token."""


def to_row(dtype: KVDtype, values: Any) -> Tiles:
    row = Tiles(
        dtype, np.zeros((1, len(values)), storage(dtype)), np.zeros(1, np.float16) if dtype.has_scales else None
    )
    convert(Tiles(KVDtype.FP32, np.array([values], np.float32)), row)
    return row


def offsets(layout: KVCacheLayout, place: Place) -> tuple[int, int]:
    """Where a row's values and its scale are, by the picture in kv_cache/layout.py."""
    block, layer, kv, head, token = place
    page, row = layout.page_offset(block, layer), head * layout.block_size + token
    values = page + (layout.k_offset, layout.v_offset)[kv] + row * layout.head_dim * layout.dtype.itemsize
    return values, page + (layout.k_scale_offset, layout.v_scale_offset)[kv] + row * 2


def write_row(layout: KVCacheLayout, memory: Any, place: Place, row: Tiles) -> None:
    values, scale = offsets(layout, place)
    data = row.values.tobytes()
    memory[values : values + len(data)] = data
    if row.scales is not None:
        memory[scale : scale + 2] = row.scales.tobytes()


def read_row(layout: KVCacheLayout, memory: Any, place: Place) -> Tiles:
    values, scale = offsets(layout, place)
    held = np.frombuffer(memory, storage(layout.dtype), layout.head_dim, values).reshape(1, -1)
    scales = np.frombuffer(memory, np.float16, 1, scale) if layout.dtype.has_scales else None
    return Tiles(layout.dtype, held, scales)


def model(
    source: KVCacheLayout,
    target: KVCacheLayout,
    pool: memoryview,
    local: dict[int, int],
    num_tokens: int,
    into: bytearray,
) -> None:
    """All pages of the prompt in all layers, row by row; heads that the source lacks stay as they are."""
    used = target.v_scale_offset + (target.v_scale_offset - target.k_scale_offset)
    for block in range(target.blocks_for(num_tokens)):
        for layer in range(target.num_layers):
            page = target.page_offset(block, layer)
            into[page + used : page + target.page_bytes] = bytes(target.page_bytes - used)
            for kv in range(2):
                for head in range(
                    max(source.kv_head_start, target.kv_head_start), min(source.kv_head_end, target.kv_head_end)
                ):
                    for token in range(target.block_size):
                        at = block * target.block_size + token
                        row = to_row(target.dtype, np.zeros(target.head_dim))
                        if at < num_tokens:
                            index, offset = divmod(at, source.block_size)
                            place = (local[index], layer, kv, head - source.kv_head_start, offset)
                            convert(read_row(source, pool, place), row)
                        write_row(target, into, (block, layer, kv, head - target.kv_head_start, token), row)


def converted(
    source: KVCacheLayout,
    target: KVCacheLayout,
    pool: memoryview,
    local: dict[int, int],
    num_tokens: int,
    cuts: tuple[list[int], list[int]] = ([], []),
) -> bytearray:
    """The same by the converter, the pages filled piece by piece as the cuts (in blocks, in layers) say."""
    num_blocks, size = target.blocks_for(num_tokens), target.page_bytes
    into = bytearray([GARBAGE]) * target.pool_bytes(num_blocks)
    block_cuts = sorted({0, num_blocks, *(cut for cut in cuts[0] if cut < num_blocks)})
    layer_cuts = sorted({0, target.num_layers, *cuts[1]})
    converter = PageConverter(source, target)
    for first, end in pairwise(block_cuts):
        for low, high in pairwise(layer_cuts):
            some = bytearray([GARBAGE]) * ((end - first) * (high - low) * size)
            converter.fill(pool, local, range(first, end), range(low, high), num_tokens, memoryview(some))
            for place, block in enumerate(range(first, end)):
                start = target.page_offset(block, low)
                length = (high - low) * size
                into[start : start + length] = some[place * length : (place + 1) * length]
    return into


def heads_of(first: int, count: int, layout: KVCacheLayout = BASE) -> KVCacheLayout:
    return replace(layout, kv_head_start=first, num_kv_heads=count, total_kv_heads=4)


shards = st.tuples(st.integers(0, 3), st.integers(1, 4)).filter(lambda shard: sum(shard) <= 4)


@pytest.mark.parametrize("to_dtype", KVDtype)
@pytest.mark.parametrize("from_dtype", KVDtype)
@settings(max_examples=4, deadline=None)
@given(data=st.data())
def test_pages_are_what_the_model_makes_however_they_are_cut(
    from_dtype: KVDtype, to_dtype: KVDtype, data: st.DataObject
) -> None:
    from_heads, to_heads = data.draw(shards), data.draw(shards)
    if from_heads[0] + from_heads[1] <= to_heads[0] or to_heads[0] + to_heads[1] <= from_heads[0]:
        from_heads = (0, 4)
    source = replace(heads_of(*from_heads), dtype=from_dtype, block_size=data.draw(st.sampled_from(SIZES)))
    target = replace(heads_of(*to_heads), dtype=to_dtype, block_size=data.draw(st.sampled_from(SIZES)))
    num_tokens = data.draw(st.integers(1, 200))
    used = source.blocks_for(num_tokens)
    local = dict(enumerate(data.draw(st.permutations(range(used + 1)))[:used]))
    pool = pool_of(source, used + 1, seed=1)
    cuts = data.draw(st.tuples(st.lists(st.integers(1, 24), max_size=3), st.lists(st.just(1), max_size=1)))
    expected = bytearray([GARBAGE]) * target.pool_bytes(target.blocks_for(num_tokens))
    model(source, target, pool, local, num_tokens, expected)
    assert converted(source, target, pool, local, num_tokens, cuts) == expected


def test_equal_dtypes_are_moved_as_bytes_whatever_they_mean() -> None:
    """Random bytes hold NaNs of every kind, which arithmetic would not leave alone."""
    for dtype in KVDtype:
        source, target = replace(BASE, dtype=dtype, block_size=8), replace(BASE, dtype=dtype, block_size=32)
        pool = memoryview(np.random.default_rng(5).bytes(source.pool_bytes(8)))
        forth = converted(source, target, pool, {index: index for index in range(8)}, 64)
        again = converted(target, source, memoryview(forth), {0: 0, 1: 1}, 64)
        for block in range(8):
            for layer in range(2):
                page = source.page_offset(block, layer)
                end = page + source.v_scale_offset + (source.v_scale_offset - source.k_scale_offset)
                assert again[page:end] == pool[page:end]


def test_places_after_the_prompt_and_padding_are_zero() -> None:
    source, target = replace(BASE, block_size=8), replace(BASE, block_size=32, dtype=KVDtype.INT8)
    pool = memoryview(b"\xff" * source.pool_bytes(2))  # NaN everywhere
    made = converted(source, target, pool, {0: 1}, 5)
    for layer in range(2):
        for kv in range(2):
            for head in range(4):
                rows = [read_row(target, made, (0, layer, kv, head, token)) for token in range(32)]
                scales = [float(row.scales[0]) for row in rows if row.scales is not None]
                assert np.isnan(scales[:5]).all()
                assert scales[5:] == [0.0] * 27
                assert not any(row.values.any() for row in rows)
        end = target.page_offset(0, layer) + target.page_bytes
        used = target.v_scale_offset + (target.v_scale_offset - target.k_scale_offset)
        assert not any(made[end - target.page_bytes + used : end])


def test_golden_bytes_of_a_page() -> None:
    source = KVCacheLayout("m", "r", num_layers=1, num_kv_heads=1, head_dim=2, block_size=8, dtype=KVDtype.FP32)
    target = replace(source, block_size=16, dtype=KVDtype.INT8)
    memory = bytearray(source.pool_bytes(2))
    for token in range(9):
        for kv in range(2):
            row = np.array([127 * (token + 1), -(token + 1) * (1 + kv)], np.float32)
            write_row(source, memory, (1 - token // 8, 0, kv, 0, token % 8), Tiles(KVDtype.FP32, row[np.newaxis]))
    made = converted(source, target, memoryview(memory), {0: 1, 1: 0}, 9)
    keys, values = b"\x7f\xff" * 9 + bytes(14), b"\x7f\xfe" * 9 + bytes(14)
    scales = b"".join(np.float16(token + 1).tobytes() for token in range(9)) + bytes(14)
    assert made == keys + values + scales + scales + bytes(256 - 128)


@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1), (2, 4), (4, 2), (1, 4), (4, 1)])
@pytest.mark.parametrize("dtype", [KVDtype.FP32, KVDtype.FP8_E4M3])
@pytest.mark.parametrize("to_size", [16, 64])
def test_shards_in_separate_pools_give_what_the_whole_model_would(
    prefill: int, decode: int, dtype: KVDtype, to_size: int
) -> None:
    """Prefill TP m to decode TP n: the heads gathered are those of the unsharded pool, to the bit."""
    num_tokens, whole = 50, replace(BASE, dtype=dtype)
    pool, blocks = pool_of(whole, 4, seed=7), {index: index for index in range(4)}

    def shard(count: int, number: int, size: int) -> KVCacheLayout:
        return replace(heads_of(number * (4 // count), 4 // count, whole), block_size=size)

    sources = [shard(prefill, number, 16) for number in range(prefill)]
    pools = [converted(whole, source, pool, blocks, 64) for source in sources]
    for number in range(decode):
        target = shard(decode, number, to_size)
        expected = converted(whole, target, pool, blocks, num_tokens)
        made, num_blocks = bytearray([GARBAGE]) * len(expected), target.blocks_for(num_tokens)
        for source, held in zip(sources, pools, strict=True):
            if source.kv_head_start < target.kv_head_end and target.kv_head_start < source.kv_head_end:
                PageConverter(source, target).fill(
                    memoryview(held), blocks, range(num_blocks), range(2), num_tokens, memoryview(made)
                )
        assert made == expected


def test_large_runs_are_converted_in_pieces_without_a_seam() -> None:
    source = KVCacheLayout("m", "r", num_layers=3, num_kv_heads=8, head_dim=128, block_size=32, dtype=KVDtype.FP32)
    target = replace(source, block_size=64, dtype=KVDtype.BF16)
    values = np.random.default_rng(1).standard_normal(source.pool_bytes(6) // 4).astype(np.float32)
    pool, local, num_tokens = memoryview(values).cast("B"), {index: index for index in range(6)}, 180
    one_by_one = converted(source, target, pool, local, num_tokens, ([1, 2], [1, 2]))
    assert converted(source, target, pool, local, num_tokens) == one_by_one


def test_a_source_block_that_is_not_there_is_an_error() -> None:
    into = memoryview(bytearray(BASE.block_bytes))
    with pytest.raises(KeyError):
        PageConverter(replace(BASE, block_size=8), BASE).fill(
            memoryview(bytearray(BASE.pool_bytes(1))), {0: 0}, [0], range(2), 16, into
        )


@pytest.mark.parametrize("size", [BASE.block_bytes - 1, BASE.page_bytes, 2 * BASE.block_bytes])
def test_memory_of_another_size_is_an_error(size: int) -> None:
    with pytest.raises(ValueError, match="are not"):
        PageConverter(BASE, BASE).fill(
            memoryview(bytearray(BASE.block_bytes)), {0: 0}, [0], range(2), 16, memoryview(bytearray(size))
        )


@pytest.mark.parametrize("wire_dtype", [KVDtype.INT8, KVDtype.FP8_E4M3, KVDtype.BF16])
@pytest.mark.parametrize("cut", [[], [1], [2, 3], [1, 2, 3, 4, 5]])
def test_pages_from_the_wire_become_pages_of_the_pool(wire_dtype: KVDtype, cut: list[int]) -> None:
    wire = replace(BASE, dtype=wire_dtype)
    staged = pool_of(wire, 3, seed=2)
    expected = bytearray(BASE.pool_bytes(3))
    model(wire, BASE, staged, {0: 0, 1: 1, 2: 2}, 48, expected)
    pool = bytearray([GARBAGE]) * BASE.pool_bytes(3)
    borders = [border * BASE.page_bytes for border in (0, *cut, 6)]
    requantise(wire, BASE, staged, [memoryview(pool)[low:high] for low, high in pairwise(borders)])
    assert pool == expected


def test_pages_from_the_wire_that_do_not_fill_the_pools_are_an_error() -> None:
    wire = replace(BASE, dtype=KVDtype.INT8)
    for staged, into in ((2, 1), (1, 2)):
        with pytest.raises(ValueError, match="do not fill"):
            requantise(
                wire, BASE, memoryview(bytes(staged * wire.page_bytes)), [memoryview(bytearray(into * BASE.page_bytes))]
            )
    with pytest.raises(ValueError, match="dtype only"):
        requantise(replace(BASE, block_size=8), BASE, memoryview(b""), [])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_id": "other"}, "model_id is tiny at the sender and other at the receiver"),
        ({"num_layers": 3}, "num_layers is 2 at the sender and 3 at the receiver"),
        ({"head_dim": 8}, "head_dim is 6 at the sender and 8 at the receiver"),
        ({"total_kv_heads": 8}, "total_kv_heads is 4 at the sender and 8 at the receiver"),
        ({"axis_order": "bl_latent"}, "axis_order is bl_k(htd)v(htd)s at the sender and bl_latent at the receiver"),
        ({"hash_version": 9}, "hash_version is 1 at the sender and 9 at the receiver"),
    ],
)
def test_what_cannot_be_converted_is_refused_with_both_layouts(change: dict[str, Any], named: str) -> None:
    target = replace(BASE, **change)
    refusal = layout_refusal(BASE, target)
    assert named in refusal
    assert refusal.endswith(f"Sender: {BASE}. Receiver: {target}")
    with pytest.raises(ValueError, match="cannot be converted"):
        PageConverter(BASE, target)


@pytest.mark.parametrize(
    "change",
    [{}, {"block_size": 128}, {"dtype": KVDtype.INT8}, {"num_kv_heads": 2, "kv_head_start": 1, "total_kv_heads": 4}],
)
def test_what_can_be_converted_is_not_refused(change: dict[str, Any]) -> None:
    assert layout_refusal(BASE, replace(BASE, **change)) == ""


def test_a_receiver_whose_heads_one_sender_does_not_all_have_is_refused() -> None:
    refusal = layout_refusal(heads_of(0, 2), BASE)
    assert "kv heads are 0..1 at the sender and 0..3 at the receiver, and one hand-off has one sender" in refusal
    assert "none in common" in layout_refusal(heads_of(0, 2), heads_of(2, 2))


def test_an_axis_order_that_nobody_knows_is_refused_even_between_equals() -> None:
    """Multi-head latent attention has no heads to slice: every rank holds the whole latent."""
    latent = replace(BASE, axis_order="bl_latent")
    assert "axis_order bl_latent is not known here" in layout_refusal(latent, latent)
    with pytest.raises(ValueError, match="cannot be converted"):
        PageConverter(latent, latent)


def test_a_wire_dtype_is_taken_only_where_it_saves_bytes() -> None:
    assert wire_layout(BASE, None) == BASE
    assert wire_layout(BASE, KVDtype.INT8) == replace(BASE, dtype=KVDtype.INT8)
    for pool, wire in ((KVDtype.INT8, KVDtype.FP8_E4M3), (KVDtype.FP16, KVDtype.BF16), (KVDtype.INT8, KVDtype.FP32)):
        assert wire_layout(replace(BASE, dtype=pool), wire).dtype is pool


def test_pages_on_the_wire_may_differ_in_dtype_only() -> None:
    assert check_wire(replace(BASE, dtype=KVDtype.INT8), BASE) == check_wire(BASE, BASE) == ""
    for change in ({"block_size": 8}, {"num_layers": 3}, {"model_id": "other"}):
        other = replace(BASE, dtype=KVDtype.INT8, **change)  # type: ignore[arg-type]
        assert str(other) in check_wire(other, BASE)
        assert str(BASE) in check_wire(other, BASE)


def test_what_was_changed_is_said_on_the_receipt() -> None:
    int8, large = replace(BASE, dtype=KVDtype.INT8), replace(BASE, block_size=32)
    half = replace(BASE, dtype=KVDtype.FP16)
    assert describe(BASE, BASE, BASE) == ""
    assert describe(BASE, int8, int8) == "dtype fp32 -> int8"
    assert describe(BASE, int8, BASE) == "dtype fp32 -> int8 on the wire"
    assert describe(half, int8, BASE) == "dtype fp16 -> int8 on the wire -> fp32"
    assert (
        describe(BASE, replace(large, dtype=KVDtype.INT8), large)
        == "block_size 16 -> 32, dtype fp32 -> int8 on the wire"
    )
    assert describe(BASE, heads_of(0, 2), heads_of(0, 2)) == "kv heads 0..3 -> 0..1"

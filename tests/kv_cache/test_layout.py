"""Byte maths against numbers worked out by hand, and which pools may exchange blocks."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_cache.layout import KVCacheLayout, KVDtype, LayoutVerdict
from kvferry_rpc import common_pb2

SMOLLM2 = KVCacheLayout(
    model_id="smollm2", model_revision="abc123", num_layers=30, num_kv_heads=3, head_dim=64, block_size=16,
    dtype=KVDtype.FP32,
)  # fmt: skip

ITEM_BYTES = {KVDtype.FP32: 4, KVDtype.FP16: 2, KVDtype.BF16: 2, KVDtype.FP8_E4M3: 1, KVDtype.INT8: 1}


def layout_of(num_kv_heads: int, head_dim: int, block_size: int, dtype: KVDtype, num_layers: int = 2) -> KVCacheLayout:
    return KVCacheLayout("m", "r", num_layers, num_kv_heads, head_dim, block_size, dtype)


# num_kv_heads, head_dim, block_size, dtype -> v_offset, k_scale_offset, v_scale_offset, page_bytes, bytes_per_token
BY_HAND = [
    # MHA: 32 heads of 128, blocks of 16: 65,536 elements of K.
    (32, 128, 16, KVDtype.FP32, 262144, 524288, 524288, 524288, 65536),
    (32, 128, 16, KVDtype.FP16, 131072, 262144, 262144, 262144, 32768),
    (32, 128, 16, KVDtype.BF16, 131072, 262144, 262144, 262144, 32768),
    # Scales: 32 heads x 16 tokens x 2 bytes = 1,024 each for K and V.
    (32, 128, 16, KVDtype.FP8_E4M3, 65536, 131072, 132096, 133120, 16640),
    (32, 128, 16, KVDtype.INT8, 65536, 131072, 132096, 133120, 16640),
    # GQA: 3 heads of 64, blocks of 16: 3,072 elements of K.
    (3, 64, 16, KVDtype.FP32, 12288, 24576, 24576, 24576, 3072),
    (3, 64, 16, KVDtype.FP16, 6144, 12288, 12288, 12288, 1536),
    (3, 64, 16, KVDtype.BF16, 6144, 12288, 12288, 12288, 1536),
    # 6,144 + 2 x 96 = 6,336 used, 6,400 with padding.
    (3, 64, 16, KVDtype.FP8_E4M3, 3072, 6144, 6240, 6400, 792),
    (3, 64, 16, KVDtype.INT8, 3072, 6144, 6240, 6400, 792),
    # MQA: one head of 80, blocks of 8: 640 elements of K.
    (1, 80, 8, KVDtype.FP32, 2560, 5120, 5120, 5120, 1280),
    (1, 80, 8, KVDtype.FP16, 1280, 2560, 2560, 2560, 640),
    (1, 80, 8, KVDtype.BF16, 1280, 2560, 2560, 2560, 640),
    # 1,280 + 2 x 16 = 1,312 used, 1,536 with padding.
    (1, 80, 8, KVDtype.FP8_E4M3, 640, 1280, 1296, 1536, 328),
    (1, 80, 8, KVDtype.INT8, 640, 1280, 1296, 1536, 328),
]


@pytest.mark.parametrize(
    ("heads", "head_dim", "block_size", "dtype", "v", "k_scale", "v_scale", "page", "token_bytes"), BY_HAND
)
def test_a_page_has_the_size_and_offsets_worked_out_by_hand(
    heads: int, head_dim: int, block_size: int, dtype: KVDtype,
    v: int, k_scale: int, v_scale: int, page: int, token_bytes: int,
) -> None:  # fmt: skip
    layout = layout_of(heads, head_dim, block_size, dtype)
    assert layout.k_offset == 0
    assert layout.v_offset == v
    assert layout.k_scale_offset == k_scale
    assert layout.v_scale_offset == v_scale
    assert layout.page_bytes == page
    assert layout.bytes_per_token == token_bytes
    assert layout.block_bytes == 2 * page


def test_every_dtype_has_its_item_size_and_only_the_quantised_ones_have_scales() -> None:
    assert {dtype: dtype.itemsize for dtype in KVDtype} == ITEM_BYTES
    assert [dtype for dtype in KVDtype if dtype.has_scales] == [KVDtype.FP8_E4M3, KVDtype.INT8]


def test_the_pool_of_the_demo_model_has_the_size_worked_out_by_hand() -> None:
    assert SMOLLM2.bytes_per_token == 46080  # 30 layers x 2 x 3 heads x 64 x 4 bytes
    assert SMOLLM2.block_bytes == 737280  # 16 such tokens; no padding needed
    assert SMOLLM2.pool_bytes(100) == 73728000
    assert SMOLLM2.page_offset(0, 0) == 0
    assert SMOLLM2.page_offset(0, 29) == 712704
    assert SMOLLM2.page_offset(7, 3) == 5234688


def test_a_page_offset_outside_the_pool_is_refused() -> None:
    for block_id, layer in ((-1, 0), (0, -1), (0, 30)):
        with pytest.raises(IndexError, match=f"block {block_id}, layer {layer}"):
            SMOLLM2.page_offset(block_id, layer)


def test_blocks_are_counted_up_to_the_last_partly_filled_one() -> None:
    assert [SMOLLM2.blocks_for(n) for n in (0, 1, 15, 16, 17, 32, 33)] == [0, 1, 1, 1, 2, 2, 3]


layouts = st.builds(
    layout_of,
    num_kv_heads=st.integers(1, 64),
    head_dim=st.integers(1, 256),
    block_size=st.sampled_from([8, 16, 32, 64, 128]),
    dtype=st.sampled_from(KVDtype),
    num_layers=st.integers(1, 6),
)


@given(layouts)
def test_pages_tile_the_pool_and_hold_what_they_must(layout: KVCacheLayout) -> None:
    pages = [layout.page_offset(block, layer) for block in range(3) for layer in range(layout.num_layers)]
    assert pages == list(range(0, layout.pool_bytes(3), layout.page_bytes))
    assert layout.page_bytes % 256 == 0
    padding = layout.block_bytes - layout.block_size * layout.bytes_per_token
    assert 0 <= padding < 256 * layout.num_layers


@given(layouts)
def test_a_layout_survives_the_wire(layout: KVCacheLayout) -> None:
    wire = common_pb2.KVCacheLayout.FromString(layout.to_proto().SerializeToString())
    assert KVCacheLayout.from_proto(wire) == layout


def test_equal_layouts_are_identical() -> None:
    match = SMOLLM2.compare(replace(SMOLLM2))
    assert match.verdict is LayoutVerdict.IDENTICAL
    assert match.reasons == ()
    assert str(match) == "identical"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_id": "qwen3"}, "model_id is smollm2 here and qwen3 there"),
        ({"model_revision": "def456"}, "model_revision is abc123 here and def456 there"),
        ({"num_layers": 28}, "num_layers is 30 here and 28 there"),
        ({"head_dim": 128}, "head_dim is 64 here and 128 there"),
        ({"num_kv_heads": 4, "total_kv_heads": 4}, "total_kv_heads is 3 here and 4 there"),
        ({"axis_order": "bl_k(thd)v(thd)s"}, "axis_order is bl_k(htd)v(htd)s here and bl_k(thd)v(thd)s there"),
        ({"hash_version": 2}, "hash_version is 1 here and 2 there"),
    ],
)
def test_pools_that_cannot_exchange_blocks_are_refused_naming_both_values(
    change: dict[str, object], reason: str
) -> None:
    other = replace(SMOLLM2, **change)  # type: ignore[arg-type]
    match = SMOLLM2.compare(other)
    assert match.verdict is LayoutVerdict.REFUSED
    assert match.reasons == (reason,)
    assert str(match) == f"refused: {reason}"
    assert other.compare(SMOLLM2).verdict is LayoutVerdict.REFUSED


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"block_size": 32}, "block_size is 16 here and 32 there"),
        ({"dtype": KVDtype.INT8}, "dtype is fp32 here and int8 there"),
        ({"dtype": KVDtype.BF16}, "dtype is fp32 here and bf16 there"),
        ({"num_kv_heads": 2, "kv_head_start": 1}, "kv heads are 0..2 here and 1..2 there"),
    ],
)
def test_pools_that_differ_in_a_convertible_way_say_what_to_convert(change: dict[str, object], reason: str) -> None:
    other = replace(SMOLLM2, **change)  # type: ignore[arg-type]
    match = SMOLLM2.compare(other)
    assert match.verdict is LayoutVerdict.CONVERTIBLE
    assert match.reasons == (reason,)
    assert other.compare(SMOLLM2).verdict is LayoutVerdict.CONVERTIBLE


def test_a_layout_and_a_comparison_can_be_told_to_an_operator() -> None:
    assert str(SMOLLM2) == (
        "smollm2 at revision abc123, 30 layers, kv heads 0..2 of 3, head_dim 64, block_size 16, fp32, axis order "
        "bl_k(htd)v(htd)s, hash version 1"
    )
    match = SMOLLM2.compare(replace(SMOLLM2, block_size=32), "at the sender", "at the receiver")
    assert match.reasons == ("block_size is 16 at the sender and 32 at the receiver",)


def test_all_differences_that_forbid_the_exchange_are_named_and_the_convertible_ones_are_not() -> None:
    match = SMOLLM2.compare(replace(SMOLLM2, num_layers=1, head_dim=8, dtype=KVDtype.INT8))
    assert match.reasons == ("num_layers is 30 here and 1 there", "head_dim is 64 here and 8 there")


def test_shards_without_a_common_head_are_refused() -> None:
    low = replace(SMOLLM2, num_kv_heads=2, total_kv_heads=4)
    high = replace(low, kv_head_start=2)
    for match in (low.compare(high), high.compare(low)):
        assert match.verdict is LayoutVerdict.REFUSED
    assert low.compare(high).reasons == ("kv heads are 0..1 here and 2..3 there, with none in common",)
    assert low.compare(replace(low, kv_head_start=1)).verdict is LayoutVerdict.CONVERTIBLE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_id": ""}, "model_id must not be empty"),
        ({"model_revision": ""}, "model_revision must not be empty"),
        ({"axis_order": ""}, "axis_order must not be empty"),
        ({"num_layers": 0}, "num_layers must be at least 1, not 0"),
        ({"num_kv_heads": -3}, "num_kv_heads must be at least 1, not -3"),
        ({"head_dim": 0}, "head_dim must be at least 1, not 0"),
        ({"hash_version": 0}, "hash_version must be at least 1, not 0"),
        ({"block_size": 4}, "power of two from 8 to 128, not 4"),
        ({"block_size": 24}, "power of two from 8 to 128, not 24"),
        ({"block_size": 256}, "power of two from 8 to 128, not 256"),
        ({"kv_head_start": -1}, "kv heads -1..1 do not lie within the model's 3 kv heads"),
        ({"kv_head_start": 1}, "kv heads 1..3 do not lie within the model's 3 kv heads"),
        ({"total_kv_heads": 2}, "kv heads 0..2 do not lie within the model's 2 kv heads"),
    ],
)
def test_a_layout_that_makes_no_sense_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("..", r"\.\.")):
        replace(SMOLLM2, **change)  # type: ignore[arg-type]


def test_a_layout_from_a_peer_is_checked_like_any_other() -> None:
    message = SMOLLM2.to_proto()
    message.dtype = "fp64"
    with pytest.raises(ValueError, match="fp64"):
        KVCacheLayout.from_proto(message)
    with pytest.raises(ValueError, match="model_id"):
        KVCacheLayout.from_proto(common_pb2.KVCacheLayout(dtype="fp32"))

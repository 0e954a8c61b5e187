"""The kernels beside attention, as their launchers call them for models of ordinary sizes."""

from engine.kernels import blocks, fingerprint, gates, norms, sampling, store_kv
from kv_cache.layout import KVCacheLayout, KVDtype
from tests.support.compiled_kernels import Compilation

_TRITON_TYPES = {
    KVDtype.FP32: "*fp32",
    KVDtype.FP16: "*fp16",
    KVDtype.BF16: "*bf16",
    KVDtype.FP8_E4M3: "*u8",
    KVDtype.INT8: "*i8",
}


def _layout(dtype: KVDtype, block_size: int = 16) -> KVCacheLayout:
    return KVCacheLayout("m", "1", 32, 8, 128, block_size, dtype)


def _store(dtype: KVDtype, num_q_heads: int = 32) -> Compilation:
    """bf16 activations, turned and stored."""
    return Compilation(
        store_kv._store_kv,
        {"pool": _TRITON_TYPES[dtype], "scale_pool": "*i16", "x": "*bf16", "v": "*bf16", "rotation": "*fp32"}
        | {"slot_mapping": "*i64", "num_tokens": "i32", "layer": "i32", "x_stride": "i64", "v_stride": "i64"},
        store_kv.store_constants(_layout(dtype), num_q_heads, True),
        aligned=("pool", "scale_pool", "x", "v", "rotation", "x_stride", "v_stride"),
        num_warps=2,
    )


def _norm(heads: int, size: int, add: bool) -> Compilation:
    """bf16 activations."""
    rows = max(1, 1024 // size)
    return Compilation(
        norms._rms_norm,
        {"x": "*bf16", "change": "*bf16", "weight": "*fp32", "normed": "*bf16"}
        | {"x_stride": "i64", "change_stride": "i64", "num_rows": "i32", "eps": "fp32"},
        {"HEADS": heads, "SIZE": size, "WEIGHT_STRIDE": 0, "ADD": add, "ROWS": rows, "DIMS": size},
        aligned=("x", "change", "weight", "normed", "x_stride", "change_stride"),
        num_warps=rows * size // 512,
    )


def _convert(source: KVDtype, target: KVDtype) -> Compilation:
    """Blocks of 16 tokens to blocks of 64."""
    constants = blocks.convert_constants(_layout(source), _layout(target, 64), 32, 32)
    pools = {"pool": _TRITON_TYPES[source], "to_pool": _TRITON_TYPES[target]}
    pools |= {"scale_pool": "*i16", "to_scale_pool": "*i16"}
    ids = dict.fromkeys(("block_table", "to_blocks", "blocks"), "*i32")
    numbers = dict.fromkeys(("num_tokens", "first_layer", "to_first_layer"), "i32")
    return Compilation(blocks._convert_pages, pools | ids | numbers, constants, aligned=tuple(pools))


COMPILATIONS = {
    # A page of 8 KiB: each of 32 threads loads 256 bytes of it.
    "fingerprint": Compilation(
        fingerprint._page_fingerprints,
        {"pool": "*i64", "block_ids": "*i32", "constants": "*i64", "found": "*i64"}
        | {"first_block": "i32", "first_layer": "i32", "num_layers": "i32", "base_seed": "u64"},
        {"PAGE_WORDS": 8192 // 8},
        aligned=("pool", "constants", "found"),
        num_warps=1,
    ),
    **{f"store {dtype.value}": _store(dtype) for dtype in (KVDtype.BF16, KVDtype.FP8_E4M3, KVDtype.INT8)},
    "rms norm of heads": _norm(32, 128, False),
    "add and rms norm": _norm(1, 4096, True),
    "gated": Compilation(
        gates._gated,
        {"gate_up": "*bf16", "result": "*bf16", "stride": "i64", "size": "i32"},
        {"SILU": False, "BLOCK": 1024},
        aligned=("gate_up", "result", "stride", "size"),
        num_warps=2,
    ),
    "gather blocks": Compilation(
        blocks._copy_blocks,
        {"pool": "*i64", "staging": "*i64", "block_ids": "*i32", "first_word": "i64", "num_words": "i64"},
        {"BLOCK_WORDS": _layout(KVDtype.BF16).block_bytes // 8, "INTO_POOL": False, "WORDS": 1024},
        aligned=("pool", "staging", "first_word", "num_words"),
    ),
    "convert bf16 to int8": _convert(KVDtype.BF16, KVDtype.INT8),
    "convert fp8_e4m3 to bf16": _convert(KVDtype.FP8_E4M3, KVDtype.BF16),
    "sample": Compilation(
        sampling._sample,
        {"logits": "*fp32", "chosen": "*i64", "temperatures": "*fp64", "top_ps": "*fp64", "min_ps": "*fp64"}
        | {"top_ks": "*i32", "seeds": "*i64", "positions": "*i64", "stride": "i64", "vocab_size": "i32"},
        {"BLOCK": 4096},
        aligned=("logits", "stride", "vocab_size"),
        num_warps=16,
    ),
}

"""The attention kernels as their launchers call them for heads of 128, compiled for GPUs that are not there.

Run as a program with a file for the answers, "decode" or "prefill", and a compute capability, it compiles that kernel
with K and V of several dtypes: {"bf16": report}, see `tests.support.compiled_kernels`.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from engine.attention.interface import LayerAttention
from engine.kernels import decode_attention, prefill_attention
from kv_cache.layout import KVCacheLayout, KVDtype
from tests.support.compiled_kernels import Compilation, Report, inspect
from tests.support.triton_programs import run_program

_SPEC = LayerAttention(128**-0.5)
_HEADS = 32
_KV_HEADS = 8
_ELEMENTS = {KVDtype.FP32: "*fp32", KVDtype.FP16: "*fp16", KVDtype.BF16: "*bf16"}
KEPT = (KVDtype.BF16, KVDtype.FP8_E4M3)
_OF_EACH_ROW = {"block_tables": "*i32", "context_lens": "*i32"}
_ALIGNED = ("q", "pool", "scales", "outputs", "log_sums", "out", "q_stride", "out_stride")
_NUMBERS = {"num_rows": "i32", "q_stride": "i32", "table_stride": "i32", "scale": "fp32", "soft_cap": "fp32"}


def compilation(kernel: str, kept: KVDtype, capability: int, dtype: torch.dtype = torch.bfloat16) -> Compilation:
    """A kernel with K and V of one dtype and q of another."""
    layout = KVCacheLayout("m", "1", 32, _KV_HEADS, 128, 16, kept)
    q_type = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}[dtype]
    types = {"q": q_type, "pool": _ELEMENTS.get(kept, "*i16"), "scales": "*i32", **_OF_EACH_ROW, **_NUMBERS}
    function: Any
    if kernel == "decode":
        function = decode_attention._decode_pieces
        constants = decode_attention.decode_constants(layout, dtype, _HEADS, _SPEC, capability)
        types |= {"first_piece": "*i32", "piece_len": "*i32", "outputs": "*fp32", "log_sums": "*fp32"}
    else:
        function = prefill_attention._prefill_tiles
        constants = prefill_attention.prefill_constants(layout, dtype, _HEADS, _SPEC, capability)
        types |= {"query_start": "*i32", "out": q_type, "out_stride": "i32"}
    num_warps = constants.pop("num_warps")
    aligned = tuple(name for name in types if name in _ALIGNED)
    return Compilation(function, {**types, "window": "i32"}, constants, aligned, num_warps)


def compile_attention(kernel: str, gpu: str, folder: Path) -> dict[str, Report]:
    """The answers of this program for a GPU, "sm_90"."""
    file = run_program(__name__, [kernel, gpu.removeprefix("sm_")], {}, folder)
    answers: dict[str, Report] = json.loads(file.read_text())
    return answers


if __name__ == "__main__":
    capability = int(sys.argv[3])
    results = {kept.value: inspect(compilation(sys.argv[2], kept, capability), capability) for kept in KEPT}
    Path(sys.argv[1]).write_text(json.dumps(results))

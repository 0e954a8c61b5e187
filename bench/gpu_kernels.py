"""How near the kernels come to what a GPU can do, and how long it idles between steps. Needs a CUDA device and Triton.

Decode attention in bytes a second against a copy's; prefill attention in operations a second against a large product's;
and of a decode step of a model in the shape of 8 billion random weights, the share in which the device waits for the
host, with captured graphs and without. Without a CUDA device it says so in a line, and measures nothing.
"""

import argparse
import functools
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from bench.common.harness import Better, Options, Report, summarise, take_pairs
from kv_cache.layout import KVCacheLayout, KVDtype

if TYPE_CHECKING:
    from bench.common.device_attention import PagedLayer
    from bench.common.device_dummy import DummyDecoding
    from engine.execution.cuda import CudaDevice

CONTEXT_TOKENS = 1 << 18
DTYPES = (KVDtype.BF16, KVDtype.FP8_E4M3)
_DECODE_ROWS = (8, 64, 256)
_PREFILL_TOKENS = 8192
_GEMM_SIZE = 8192
_COPY_BYTES = 1 << 30
_CALLS = 10  # of a kernel in one graph
_STEPS = 16
_WARM_UP_STEPS = 4
_BLOCK_SIZE = 16


class Stopwatch:
    """Seconds that the device takes for what is queued."""

    def __init__(self, device: "CudaDevice") -> None:
        self._device = device

    def seconds(self, work: Callable[[], object]) -> float:
        """Of `work`, once the device has nothing else to do."""
        torch.cuda.synchronize()
        with self._device.queueing():
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            began.record()
            work()
            ended.record()
            ended.synchronize()
        return float(began.elapsed_time(ended)) / 1000

    def captured(self, kernel: Callable[[], torch.Tensor]) -> Callable[[], float]:
        """Seconds of one call of a kernel, called some times in a graph: the host's part is left out."""

        def calls() -> torch.Tensor:
            for _ in range(_CALLS):
                result = kernel()
            return result

        replay = self._device.capture(calls)
        return lambda: self.seconds(replay) / _CALLS


def measure_decode(layer: "PagedLayer", watch: Stopwatch, report: Report, options: Options) -> None:
    """One line: bytes of KV a second against bytes read and written by a copy."""
    from bench.common.device_attention import DecodeKernel

    shape, kernel = layer.shape, DecodeKernel(layer)
    kernel.check()
    source = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=layer.pool.device)
    target = torch.empty_like(source)
    kernel_s, copy_s = watch.captured(kernel), watch.captured(lambda: target.copy_(source))
    pairs = take_pairs(
        lambda: shape.decode_bytes / kernel_s() / 1e9, lambda: 2 * _COPY_BYTES / copy_s() / 1e9, options.num_pairs
    )
    variant = f"{shape.dtype.value}:{shape.rows}x{shape.context}"
    rates = summarise("decode_bw_share", variant, "share", Better.HIGHER, "copy", pairs, options.seed)
    report.note(f"{variant}: decode reads {rates.value:.0f} GB/s, a copy moves {rates.baseline_value:.0f}")
    report.add(replace(rates, value=rates.ratio, baseline_value=1.0))


def measure_prefill(layer: "PagedLayer", chunk: int, watch: Stopwatch, report: Report, options: Options) -> None:
    """One line: operations a second against those of a large product in bf16."""
    from bench.common.device_attention import PrefillKernel

    shape, kernel = layer.shape, PrefillKernel(layer, chunk)
    kernel.check()
    factor = torch.randn(_GEMM_SIZE, _GEMM_SIZE, device=layer.pool.device).to(torch.bfloat16)
    kernel_s, gemm_s = watch.captured(kernel), watch.captured(lambda: factor @ factor)
    pairs = take_pairs(
        lambda: shape.prefill_flop(chunk) / kernel_s() / 1e12,
        lambda: 2 * _GEMM_SIZE**3 / gemm_s() / 1e12,
        options.num_pairs,
    )
    variant = f"{shape.dtype.value}:{chunk}of{shape.context}"
    rates = summarise("prefill_flop_share", variant, "share", Better.HIGHER, "gemm", pairs, options.seed)
    report.note(f"{variant}: prefill does {rates.value:.0f} TFLOP/s, a product {rates.baseline_value:.0f}")
    report.add(replace(rates, value=rates.ratio, baseline_value=1.0))


def measure_host_gap(device: "CudaDevice", batch: int, report: Report, options: Options) -> None:
    """Two lines: steps with graphs and without, against the same work queued without a look back."""
    from bench.common.device_dummy import SHAPE_8B, DummyDecoding, Kit, Load, check_same_tokens, random_weights
    from engine.attention.triton import TritonAttention
    from engine.execution.triton_sampler import TritonSampler
    from engine.models.transformer import Transformer
    from engine.ops.triton_ops import TritonOps
    from engine.weight_dtypes import WeightDtype

    config = SHAPE_8B
    load = Load(batch, context=1024, growth=(options.num_pairs + 2) * _STEPS)
    heads = (config.num_layers, config.num_kv_heads, config.head_dim)
    layout = KVCacheLayout("bench", "0", *heads, _BLOCK_SIZE, KVDtype.BF16)
    pool_bytes = layout.pool_bytes(load.num_blocks(_BLOCK_SIZE))
    with device.queueing(), torch.inference_mode():
        weights = random_weights(config, WeightDtype.BF16, device.torch_device, options.seed)
        model = Transformer(config, weights, TritonOps(torch.bfloat16))
        pool = torch.zeros(pool_bytes, dtype=torch.uint8, device=device.torch_device)
        kit = Kit(model, TritonAttention(pool, layout, config.attention), layout, device, TritonSampler())
    with_graphs, without = DummyDecoding(kit, load, graphs=True), DummyDecoding(kit, load, graphs=False)
    check_same_tokens(with_graphs, without, _WARM_UP_STEPS, what="a captured step is not what it was captured of")
    # What the device does for itself does not depend on who queues it. A third one: it overwrites what was prepared.
    bare = functools.partial(bare_step_s, DummyDecoding(kit, load, graphs=True), Stopwatch(device), device, batch)
    bare()
    for name, decoding in (("graphs", with_graphs), ("eager", without)):
        pairs = take_pairs(functools.partial(step_s, decoding), bare, options.num_pairs)
        variant = f"8b:{name}:batch{batch}"
        times = summarise("host_gap_share", variant, "share", Better.LOWER, "device", pairs, options.seed)
        report.note(f"{variant}: a step takes {1e3 * times.value:.3f} ms, the device {1e3 * times.baseline_value:.3f}")
        report.add(replace(times, value=1.0 - times.ratio, baseline_value=0.0))


def step_s(decoding: "DummyDecoding") -> float:
    """Seconds of a whole step, in the mean of some."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(_STEPS):
        decoding.step()
    return (time.perf_counter() - began) / _STEPS


def bare_step_s(decoding: "DummyDecoding", watch: Stopwatch, device: "CudaDevice", batch: int) -> float:
    """Seconds of the device for the model and the sampling of a step, queued so that it never waits."""
    from bench.common.device_dummy import GREEDY
    from engine.kernels.sampling import sample, sampling_rows

    loaded = decoding.loaded()
    with device.queueing():
        rows = sampling_rows([GREEDY] * batch, [0] * batch, device.torch_device)

    def steps() -> None:
        for _ in range(_STEPS):
            sample(decoding.queue(loaded), rows)

    return watch.seconds(steps) / _STEPS


def measure(report: Report, options: Options) -> None:
    """All lines, on the first CUDA device."""
    from bench.common.device_attention import PagedLayer, Shape
    from engine.execution.cuda import CudaDevice

    device = CudaDevice(torch.device("cuda"))
    watch = Stopwatch(device)
    report.note(f"on {torch.cuda.get_device_name(device.torch_device)}")
    for dtype in DTYPES:
        for rows in options.pick(_DECODE_ROWS[1:2], _DECODE_ROWS, _DECODE_ROWS):
            with device.queueing(), torch.inference_mode():
                layer = PagedLayer(Shape(rows, CONTEXT_TOKENS // rows, dtype), device.torch_device, options.seed)
                measure_decode(layer, watch, report, options)
        for chunk in options.pick((_PREFILL_TOKENS,), (_PREFILL_TOKENS, 2048), (_PREFILL_TOKENS, 2048, 512)):
            with device.queueing(), torch.inference_mode():
                layer = PagedLayer(Shape(1, _PREFILL_TOKENS, dtype), device.torch_device, options.seed)
                measure_prefill(layer, chunk, watch, report, options)
    for batch in options.pick((8,), (8, 32), (1, 8, 32, 64)):
        measure_host_gap(device, batch, report, options)


def missing() -> str | None:
    """Why nothing can be measured here, or None."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    try:
        import triton  # noqa: F401
    except ImportError:
        return "Triton is not installed: pip install 'kvferry[gpu]'"
    return None


def main(argv: list[str] | None = None) -> None:
    """Run it, or say why not. Raises BenchmarkError when a kernel is wrong."""
    options, _ = Options.parse(argparse.ArgumentParser(description=__doc__), argv)
    with Report(options) as report:
        reason = missing()
        if reason is None:
            measure(report, options)
        else:
            report.missing("cuda", reason)
            report.note(f"gpu_kernels: nothing was measured, {reason}")


if __name__ == "__main__":
    main()

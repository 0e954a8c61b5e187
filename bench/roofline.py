"""How near the engine comes to what one core of this machine can do, whose roofs are measured in the same run.

Decode attention over a paged pool against the larger of two times: that of its bytes at the bandwidth of reading, and
that of its operations at the rate of multiply-adds on registers. The prefill of a model against plain products of the
same shapes. And the share of a decode step that is neither product nor attention. One thread.
"""

import argparse
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from bench.common.harness import BenchmarkError, Better, Options, Pair, Report, Result, summarise, take_pairs
from bench.common.origin import ROOT
from bench.common.roofline_chart import Point, save_png, text_chart
from bench.common.roofs import Roof, RoofMeter, roof_meter
from bench.common.small_engines import add_model_flags, chosen_model, greedy, layout_of, small_engine, step
from bench.common.text import excerpt, text_tokens
from bench.step_overhead import measure as measure_step
from engine.attention.interface import LayerAttention
from engine.attention.native import best_cpu_attention
from engine.attention.torch_paged import TorchAttention
from engine.batch import BatchRow, build_batch
from engine.model_config import ModelConfig
from engine.models import load_model
from engine.ops.native_ops import best_cpu_ops
from engine.paged_cache import PagedCache
from engine.prepared_model import PreparedModel
from engine.scheduler import SchedulerConfig
from engine.tensor_map import prepared_tensors
from engine.weights import map_weights
from kv_cache.layout import SCALE_BYTES, KVCacheLayout, KVDtype

GROUPS = (1, 3, 7)
DTYPES = (KVDtype.FP32, KVDtype.BF16, KVDtype.INT8)
_HEAD_DIM, _KV_HEADS, _BLOCK_SIZE = 64, 2, 16
_ROWS, _CONTEXT = 8, 2048
_TOKEN_BUDGET = 256
_OVERHEAD_BATCH = 8


@dataclass(frozen=True, slots=True)
class DecodeCase:
    """Attention of one token in each of some sequences, in one layer after the other, as in a decode step."""

    group: int  # query heads of a kv head
    dtype: KVDtype
    num_layers: int
    rows: int = _ROWS
    context: int = _CONTEXT

    @property
    def size_bytes(self) -> int:
        """Of K, V and scales that must be read."""
        scale = SCALE_BYTES if self.dtype.has_scales else 0
        per_token = _KV_HEADS * 2 * (_HEAD_DIM * self.dtype.itemsize + scale)
        return self.num_layers * self.rows * self.context * per_token

    @property
    def flop(self) -> int:
        """Of the two products: for each query head and token 2 * head_dim for the score, as many for the output."""
        return self.num_layers * self.rows * self.context * _KV_HEADS * self.group * 4 * _HEAD_DIM

    @property
    def variant(self) -> str:
        """For the line."""
        return f"group{self.group}:{self.dtype.value}"


def decode_case(group: int, dtype: KVDtype, pool_bytes: int) -> DecodeCase:
    """As many layers as fill `pool_bytes`, at least two."""
    one = DecodeCase(group, dtype, 1)
    return replace(one, num_layers=max(2, pool_bytes // one.size_bytes))


class DecodeStep:
    """The attention of a step over a pool of random KV, its blocks in no order."""

    def __init__(self, case: DecodeCase, seed: int) -> None:
        self.case = case
        per_row = case.context // _BLOCK_SIZE
        layout = KVCacheLayout("bench", "0", case.num_layers, _KV_HEADS, _HEAD_DIM, _BLOCK_SIZE, case.dtype)
        cache = PagedCache(layout, case.rows * per_row)
        _fill(cache, seed)
        layers = [LayerAttention(_HEAD_DIM**-0.5)] * case.num_layers
        self._backend, self._reference = best_cpu_attention(cache, layers), TorchAttention(cache, layers)
        order = np.random.default_rng(seed).permutation(case.rows * per_row).reshape(case.rows, per_row).tolist()
        self._batch = build_batch([BatchRow([0], case.context - 1, table) for table in order], _BLOCK_SIZE)
        generator = torch.Generator().manual_seed(seed)
        self._q = torch.randn(case.rows, _KV_HEADS * case.group, _HEAD_DIM, generator=generator)

    @torch.inference_mode()
    def check(self) -> None:
        """Raises BenchmarkError unless first and last layer are what plain torch makes of them."""
        for layer in (0, self.case.num_layers - 1):
            found = self._backend.attend(layer, self._q, self._batch).clone()
            expected = self._reference.attend(layer, self._q, self._batch)
            if not torch.allclose(found, expected, rtol=1e-3, atol=1e-4):
                worst = float((found - expected).abs().max())
                raise BenchmarkError(f"{self.case.variant}: attention is off by up to {worst:g}")

    @torch.inference_mode()
    def seconds(self) -> float:
        """For all layers, once."""
        began = time.perf_counter()
        for layer in range(self.case.num_layers):
            self._backend.attend(layer, self._q, self._batch)
        return time.perf_counter() - began


def _fill(cache: PagedCache, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    first = (cache.k(0), cache.v(0))
    for tensor in first:
        if cache.layout.dtype.has_scales:
            tensor.random_(-127, 128, generator=generator)
        else:
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    for layer in range(cache.layout.num_layers):
        if layer:
            cache.k(layer).copy_(first[0])
            cache.v(layer).copy_(first[1])
        if cache.layout.dtype.has_scales:
            cache.k_scales(layer).fill_(1 / 64)
            cache.v_scales(layer).fill_(1 / 64)


def share_line(metric: str, variant: str, baseline: str, pairs: list[Pair], seed: int) -> Result:
    """Of seconds taken and the least that they could be: `value` and ratio are the share of the bound reached."""
    line = summarise(metric, variant, "share", Better.LOWER, baseline, pairs, seed)
    return replace(line, value=line.ratio, baseline_value=1.0)


def measure_decode(case: DecodeCase, meter: RoofMeter, report: Report, options: Options) -> tuple[Point, list[Roof]]:
    """One line. Returns its point, and the roofs measured beside it."""
    work = DecodeStep(case, options.seed)
    work.check()
    roofs: list[Roof] = []

    def bound_s() -> float:
        roofs.append(meter.measure())
        return roofs[-1].bound_s(case.size_bytes, case.flop)

    work.seconds()
    pairs = take_pairs(work.seconds, bound_s, options.num_pairs)
    report.add(share_line("decode_attention_roofline_share", case.variant, "roofline", pairs, options.seed))
    took_s = statistics.median(pair.value for pair in pairs)
    return Point(f"decode attention {case.variant}", case.flop / case.size_bytes, case.flop / took_s), roofs


@dataclass(frozen=True, slots=True)
class PrefillWork:
    """The operations that the prefill of a prompt cannot do without."""

    config: ModelConfig
    num_tokens: int

    @property
    def products(self) -> list[tuple[str, int, int]]:
        """(weights, outputs, inputs) of every layer's matrix products."""
        tensors = prepared_tensors(self.config)
        matrices = [each for each in tensors if each.name.startswith("layers.") and len(each.shape) == 2]
        return [(each.name, *each.shape) for each in matrices]  # type: ignore[misc]

    @property
    def product_flop(self) -> int:
        """Of the layers' products."""
        return sum(2 * self.num_tokens * outputs * inputs for _, outputs, inputs in self.products)

    @property
    def flop(self) -> int:
        """With causal attention, and the logits of the last token."""
        config, tokens = self.config, self.num_tokens
        pairs = tokens * (tokens + 1) // 2
        attention = config.num_layers * config.num_q_heads * 4 * config.head_dim * pairs
        return self.product_flop + attention + 2 * config.vocab_size * config.hidden_size


class Prefill:
    """A prompt computed by a whole engine in chunks, and plain products of the same shapes and weights."""

    def __init__(self, prepared: PreparedModel, num_tokens: int) -> None:
        self.work = PrefillWork(prepared.config, num_tokens)
        self._tokens = excerpt(text_tokens(prepared), 0, num_tokens)
        config = SchedulerConfig(_TOKEN_BUDGET, max_num_seqs=8, max_waiting=8)
        model, layout = load_model(prepared, best_cpu_ops()), layout_of(prepared, KVDtype.FP32)
        self._engine = small_engine(prepared, model, layout, num_tokens + 64, config, prefix_caching=False)
        weights = map_weights(prepared.weights_path)
        self._weights = [weights[name].t() for name, _, _ in self.work.products]
        self._inputs = {weight.shape[0]: torch.randn(_TOKEN_BUDGET, weight.shape[0]) for weight in self._weights}
        self._outputs = {weight.shape[1]: torch.empty(_TOKEN_BUDGET, weight.shape[1]) for weight in self._weights}
        self._served = 0

    def engine_flop_per_s(self) -> float:
        """From the prompt's arrival to its first token."""
        self._served += 1
        seq = greedy(f"s{self._served}", self._tokens, 1)
        began = time.perf_counter()
        self._engine.add(seq)
        while self._engine.has_work:
            step(self._engine)
        return self.work.flop / (time.perf_counter() - began)

    @torch.inference_mode()
    def gemm_flop_per_s(self) -> float:
        """Of the products alone, chunk by chunk."""
        began = time.perf_counter()
        for start in range(0, self.work.num_tokens, _TOKEN_BUDGET):
            rows = min(_TOKEN_BUDGET, self.work.num_tokens - start)
            for weight in self._weights:
                torch.mm(self._inputs[weight.shape[0]][:rows], weight, out=self._outputs[weight.shape[1]][:rows])
        return self.work.product_flop / (time.perf_counter() - began)


def measure_prefill(prepared: PreparedModel, report: Report, options: Options) -> Point:
    """One line, and its point."""
    num_tokens = options.pick(_TOKEN_BUDGET, 2 * _TOKEN_BUDGET, 4 * _TOKEN_BUDGET)
    prefill = Prefill(prepared, min(num_tokens, prepared.shape.max_context_tokens // 2))
    prefill.engine_flop_per_s()
    prefill.gemm_flop_per_s()
    pairs = take_pairs(prefill.engine_flop_per_s, prefill.gemm_flop_per_s, options.num_pairs)
    variant = f"{prepared.name}:{prefill.work.num_tokens}tokens"
    rates = summarise("prefill_flop_share", variant, "share", Better.HIGHER, "gemm", pairs, options.seed)
    report.note(
        f"{variant}: prefill does {rates.value / 1e9:.1f} GFLOP/s, plain products {rates.baseline_value / 1e9:.1f}"
    )
    report.add(replace(rates, value=rates.ratio, baseline_value=1.0))
    weights_bytes = 4 * sum(outputs * inputs for _, outputs, inputs in prefill.work.products)
    chunks = -(-prefill.work.num_tokens // _TOKEN_BUDGET)
    return Point(f"prefill {variant}", prefill.work.flop / (chunks * weights_bytes), rates.value)


def draw(roofs: list[Roof], points: list[Point], path: Path, report: Report) -> None:
    """Under the medians of all roofs measured."""
    roof = Roof(
        statistics.median(each.bytes_per_s for each in roofs), statistics.median(each.flop_per_s for each in roofs)
    )
    report.note(text_chart(roof, points))
    drawn = save_png(roof, points, path)
    report.note(f"drawn in {path}" if drawn else "no PNG was drawn: matplotlib is not installed")


def main(argv: list[str] | None = None) -> None:
    """Run it. Raises BenchmarkError when attention is not right or a replayed step differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_model_flags(parser)
    parser.add_argument("--png", type=Path, default=ROOT / "build" / "roofline.png", help="where the chart goes")
    options, given = Options.parse(parser, argv)
    torch.set_num_threads(1)
    pool_bytes = options.pick(1 << 27, 1 << 28, 1 << 29)
    meter = roof_meter(pool_bytes)
    meter.measure()
    points, roofs = [], []
    with Report(options) as report:
        report.note(f"roofs are measured by {meter.name}")
        for dtype in DTYPES:
            for group in GROUPS:
                point, beside = measure_decode(decode_case(group, dtype, pool_bytes), meter, report, options)
                points.append(point)
                roofs += beside
        prepared = chosen_model(given, report)
        points.append(measure_prefill(prepared, report, options))
        measure_step(prepared, _OVERHEAD_BATCH, report, options, plain=False)
        draw(roofs, points, given.png, report)


if __name__ == "__main__":
    main()

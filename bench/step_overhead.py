"""What share of a decode step is neither in the model's matrix products nor in attention.

A step is `schedule`, `run` and `publish` of a whole engine, greedy, all sequences decoding. The baseline calls the
products and the attention of such a step bare, with the same inputs. One thread.
"""

import argparse
import functools
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from bench.common.harness import BenchmarkError, Better, Options, Report, summarise, take_pairs
from bench.common.origin import ROOT
from bench.common.recorded_step import Call, Recorder, TappedAttention, TappedOps, differences, replay
from engine.attention.native import best_cpu_attention
from engine.attention.torch_paged import TorchAttention
from engine.engine import Engine
from engine.model_runner import ModelRunner
from engine.models import load_model
from engine.ops.native_ops import best_cpu_ops
from engine.ops.torch_ops import TorchOps
from engine.options import DEFAULT_CACHE_DIR
from engine.paged_cache import PagedCache
from engine.prepare import prepare_model
from engine.prepared_model import PreparedModel, is_prepared, open_prepared
from engine.sampler import Sampler
from engine.scheduler import SchedulerConfig
from engine.sequence import SamplingParams, Sequence, TokenSample
from engine.weight_dtypes import WeightDtype
from kv_cache.block_hash import BlockHasher
from kv_cache.block_manager import BlockManager
from kv_cache.layout import KVCacheLayout, KVDtype

TINY_MODEL = ROOT / "tests" / "data" / "tiny-real"
LARGER_MODEL = "smollm2-135m-instruct"
BATCHES = (1, 8, 32)
GREEDY = SamplingParams(max_tokens=1 << 20, temperature=0.0, ignore_eos=True)
CONTEXT_TOKENS = 256
_GROWTH_TOKENS = 1024  # Room for the tokens that the measured steps add.
_BLOCK_SIZE = 16
_SAMPLE_MS = 100.0
_MAX_STEPS = 16
_WARM_UP_STEPS = 3


class Decoding:
    """An engine in which `batch` sequences decode. Their KV is random, as if a hand-off had brought it."""

    def __init__(self, model: PreparedModel, batch: int, seed: int, *, plain: bool) -> None:
        """`plain`: computed by torch alone, as where there is no C compiler."""
        config = model.config
        layout = KVCacheLayout(
            model_id=model.name,
            model_revision=model.revision,
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=_BLOCK_SIZE,
            dtype=KVDtype.FP32,
        )
        context = min(CONTEXT_TOKENS + _GROWTH_TOKENS, config.max_context_tokens)
        num_blocks = batch * (layout.blocks_for(context) + 2)
        cache = PagedCache(layout, num_blocks)
        generator = torch.Generator().manual_seed(seed)
        for layer in range(layout.num_layers):
            cache.k(layer).normal_(generator=generator)
            cache.v(layer).normal_(generator=generator)
        self._recorder = Recorder()
        backend = TorchAttention if plain else best_cpu_attention
        attention = TappedAttention(backend(cache, config.attention), self._recorder)
        ops = TappedOps(TorchOps() if plain else best_cpu_ops(), self._recorder)
        self._engine = Engine(
            SchedulerConfig(token_budget=max(BATCHES), max_num_seqs=max(BATCHES), max_waiting=1),
            BlockManager(num_blocks, _BLOCK_SIZE),
            BlockHasher.for_layout(layout),
            ModelRunner(load_model(model, ops), attention, Sampler(), _BLOCK_SIZE),
        )
        prompts = np.random.default_rng(seed).integers(0, config.vocab_size, (batch, CONTEXT_TOKENS)).tolist()
        for index, prompt in enumerate(prompts):
            self._admit(Sequence(f"s{index}", prompt, GREEDY, max_context_tokens=context))
        self._batch = batch
        self._recorded: list[Call] = []

    def step(self) -> None:
        """One decode step, as a worker takes it. Raises BenchmarkError unless each sequence gets a token."""
        schedule = self._engine.schedule()
        outputs = self._engine.publish(schedule, self._engine.run(schedule))
        if sum(len(output.samples) == 1 and output.finish_reason is None for output in outputs) != self._batch:
            raise BenchmarkError(f"a step did not give {self._batch} sequences a token each")

    def record(self) -> None:
        """Take a step and write it down: it is what `bare_ms` repeats."""
        with self._recorder.recording() as calls:
            self.step()
        self._recorded = calls

    def check(self) -> None:
        """Raises BenchmarkError unless the recorded calls give again what they gave in the step."""
        wrong = differences(self._recorded)
        if wrong or not self._recorded:
            raise BenchmarkError(f"{wrong} of {len(self._recorded)} products and attentions differ from the step's")

    def step_ms(self, num_steps: int) -> float:
        """Milliseconds a step; then one more step is recorded, untimed, for `bare_ms` to repeat."""
        began = time.perf_counter()
        for _ in range(num_steps):
            self.step()
        took_s = time.perf_counter() - began
        self.record()
        return 1000 * took_s / num_steps

    def bare_ms(self, num_steps: int) -> float:
        """Milliseconds that the products and the attention of the last recorded step take by themselves."""
        began = time.perf_counter()
        for _ in range(num_steps):
            replay(self._recorded)
        return 1000 * (time.perf_counter() - began) / num_steps

    def _admit(self, seq: Sequence) -> None:
        if self._engine.reserve(seq) is None:
            raise BenchmarkError("the pool is too small")
        self._engine.admit_received(seq, seq.num_tokens, TokenSample(seq.token_ids[0]))


def measure(model: PreparedModel, batch: int, report: Report, options: Options, *, plain: bool) -> None:
    """One line: this model at this batch."""
    decoding = Decoding(model, batch, options.seed, plain=plain)
    for _ in range(_WARM_UP_STEPS):
        decoding.step()
    one_step_ms = decoding.step_ms(_WARM_UP_STEPS)
    decoding.check()
    decoding.bare_ms(_WARM_UP_STEPS)
    num_steps = max(1, min(_MAX_STEPS, round(_SAMPLE_MS / one_step_ms)))
    pairs = take_pairs(
        functools.partial(decoding.step_ms, num_steps),
        functools.partial(decoding.bare_ms, num_steps),
        options.num_pairs,
    )
    times = summarise(
        "step_ms",
        f"{model.name}:{model.weight_dtype.value}:batch{batch}",
        "ms",
        Better.LOWER,
        "bare",
        pairs,
        options.seed,
    )
    report.note(f"{times.variant}: a step takes {times.value:.3f} ms, its bare calls {times.baseline_value:.3f} ms")
    # The bare calls have no overhead; the ratio is what a step without any would cost, over what it does cost.
    report.add(replace(times, metric="step_overhead_share", unit="share", value=1.0 - times.ratio, baseline_value=0.0))


def models(given: str | None, cache_dir: Path, dtype: WeightDtype, report: Report) -> list[PreparedModel]:
    """The tiny model, and the one given or, without one, the larger one if somebody has prepared it before."""
    sources: list[str | Path] = [TINY_MODEL]
    if given is not None:
        sources.append(given)
    else:
        ready = [path for path in sorted(cache_dir.glob(f"{LARGER_MODEL}-*")) if is_prepared(path)]
        ready = [path for path in ready if open_prepared(path).weight_dtype is dtype]
        sources += ready[:1]
        if not ready:
            report.note(f"{LARGER_MODEL} is not prepared; --model {LARGER_MODEL} prepares and measures it")
    return [prepare_model(source, cache_dir, lambda stage, fraction: None, dtype) for source in sources]


def main(argv: list[str] | None = None) -> None:
    """Run it. Raises BenchmarkError when a replay does not give what the step gave."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a second model: directory, .gguf file, prepared directory or known alias")
    parser.add_argument("--cache-dir", type=Path, default=DEFAULT_CACHE_DIR, help="where prepared models are kept")
    parser.add_argument("--weight-dtype", type=WeightDtype, default=WeightDtype.FP32, help="fp32, bf16, fp16 or int8")
    parser.add_argument("--plain", action="store_true", help="without the C kernels")
    options, given = Options.parse(parser, argv)
    torch.set_num_threads(1)
    with Report(options) as report:
        for model in models(given.model, given.cache_dir.expanduser(), given.weight_dtype, report):
            for batch in BATCHES:
                measure(model, batch, report, options, plain=given.plain)


if __name__ == "__main__":
    main()

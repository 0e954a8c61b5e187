"""Engines over one model that is loaded once, for benchmarks that compare pools. One thread."""

import argparse
from collections.abc import Iterable
from pathlib import Path

from bench.common.harness import BenchmarkError, Report
from bench.step_overhead import models
from engine.attention.native import best_cpu_attention
from engine.engine import Engine
from engine.model_runner import Model, ModelRunner
from engine.options import DEFAULT_CACHE_DIR
from engine.paged_cache import PagedCache
from engine.prepared_model import PreparedModel
from engine.sampler import Sampler
from engine.scheduler import SchedulerConfig
from engine.sequence import SamplingParams, Sequence
from engine.weight_dtypes import WeightDtype
from kv_cache.block_hash import BlockHasher
from kv_cache.block_manager import BlockManager
from kv_cache.layout import KVCacheLayout, KVDtype

BLOCK_SIZE = 16


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """`--model` and `--cache-dir`."""
    parser.add_argument("--model", help="directory, .gguf file, prepared directory or known alias")
    parser.add_argument("--cache-dir", type=Path, default=DEFAULT_CACHE_DIR, help="where prepared models are kept")


def chosen_model(given: argparse.Namespace, report: Report) -> PreparedModel:
    """What `--model` names; without it SmolLM2-135M if it has been prepared before, else the tiny model."""
    return models(given.model, given.cache_dir.expanduser(), WeightDtype.FP32, report)[-1]


def layout_of(model: PreparedModel, dtype: KVDtype, block_size: int = BLOCK_SIZE) -> KVCacheLayout:
    """Of a pool for this model."""
    shape = model.shape
    return KVCacheLayout(
        model.name, model.revision, shape.num_layers, shape.num_kv_heads, shape.head_dim, block_size, dtype
    )


def small_engine(
    prepared: PreparedModel,
    model: Model,
    layout: KVCacheLayout,
    num_tokens: int,
    config: SchedulerConfig,
    *,
    prefix_caching: bool = True,
) -> Engine:
    """An engine with a pool for so many tokens. `model`: `prepared`, loaded."""
    num_blocks = layout.blocks_for(num_tokens)
    attention = best_cpu_attention(PagedCache(layout, num_blocks), prepared.shape.attention)
    return Engine(
        config,
        BlockManager(num_blocks, layout.block_size, prefix_caching=prefix_caching),
        BlockHasher.for_layout(layout),
        ModelRunner(model, attention, Sampler(), layout.block_size),
    )


def greedy(name: str, tokens: Iterable[int], num_output_tokens: int) -> Sequence:
    """A sequence that gets exactly so many tokens, the likeliest each time."""
    given = list(tokens)
    sampling = SamplingParams(max_tokens=num_output_tokens, temperature=0.0, ignore_eos=True)
    return Sequence(name, given, sampling, max_context_tokens=len(given) + num_output_tokens)


def run_to_end(engine: Engine, sequences: Iterable[Sequence]) -> None:
    """Add them all and step until they are done. Raises BenchmarkError if one fails."""
    for seq in sequences:
        engine.add(seq)
    while engine.has_work:
        step(engine)


def step(engine: Engine) -> None:
    """One step, as a worker takes it. Raises BenchmarkError if a sequence fails."""
    schedule = engine.schedule()
    for output in engine.publish(schedule, engine.run(schedule)):
        if output.error is not None:
            raise BenchmarkError(f"{output.seq.seq_id} failed: {output.error}")

"""Text by an engine with the kernels of a GPU, on a GPU or in Triton's interpreter.

Run as a program, in the interpreter, with a file for the results, a model and a folder for what is prepared.
"""

import json
import mmap
import sys
from pathlib import Path

from engine.build import EnginePlan, build_engine, plan_engine
from engine.engine import Engine
from engine.execution.build import build_on_device
from engine.execution.device import CpuDevice
from engine.execution.graphs import GraphShape
from engine.options import EngineOptions
from engine.scheduler import SchedulerConfig
from engine.sequence import SamplingParams, Sequence
from kv_cache.block_hash import BlockHasher
from kv_cache.block_manager import BlockManager

MAX_ROWS = 3
SAMPLINGS = (
    SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=3, temperature=0.8, top_p=0.9, seed=3, ignore_eos=True),
    SamplingParams(max_tokens=3, temperature=0.0, repetition_penalty=1.2, ignore_eos=True),
)
PROMPTS = ([5, 9, 33, 12, 7, 7, 61, 80, 4, 21, 15], [40, 3], [18, 22, 90, 31, 8, 8, 19])


def options_for(model: Path, cache_dir: Path, device: str = "cpu") -> EngineOptions:
    """Small, so that prompts are cut and there are few sizes to capture."""
    return EngineOptions(
        model=str(model),
        cache_dir=cache_dir,
        num_blocks=16,
        block_size=8,
        token_budget=9,
        max_num_seqs=MAX_ROWS,
        device=device,
    )


def built(options: EngineOptions, plan: EnginePlan) -> Engine:
    """An engine as a worker has it."""
    return build_engine(options, plan, memoryview(mmap.mmap(-1, plan.pool_bytes)), prefill_only=False)


def interpreted(options: EngineOptions, plan: EnginePlan) -> Engine:
    """An engine of a GPU's parts, all but the GPU."""
    shape = GraphShape(MAX_ROWS, plan.limits.max_context_tokens, options.block_size)
    pool = memoryview(mmap.mmap(-1, plan.pool_bytes))
    parts = build_on_device(plan.model, plan.layout, pool, shape, CpuDevice(reads_host=False))
    return Engine(
        SchedulerConfig(options.token_budget, options.max_num_seqs, options.max_waiting),
        BlockManager(plan.num_blocks, options.block_size),
        BlockHasher.for_layout(plan.layout),
        parts.runner,
        parts.mirror,
    )


def texts(engine: Engine) -> list[list[int]]:
    """Tokens of a few sequences."""
    seqs = [
        Sequence(str(i), prompt, sampling, max_context_tokens=100)
        for i, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLINGS, strict=True))
    ]
    for seq in seqs:
        engine.add(seq)
    while engine.has_work:
        schedule = engine.schedule()
        engine.publish(schedule, engine.run(schedule))
        engine.check_integrity()
    return [seq.output_token_ids for seq in seqs]


def main() -> None:
    file, model, cache_dir = (Path(argument) for argument in sys.argv[1:])
    options = options_for(model, cache_dir)
    plan = plan_engine(options, available_bytes=None)
    file.write_text(json.dumps(texts(interpreted(options, plan))))


if __name__ == "__main__":
    main()

"""What a cluster's text is compared with: one process of this engine, and `transformers.generate`.

Both run in a process of their own (`run_in_process`), so that the command line never loads torch itself and the two can
use a core each.
"""

import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

from runtime.errors import ErrorCode, KvferryError

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class ReferenceCase:
    """One prompt as token ids. `seed` None = greedy; else sampled with SAMPLED_TEMPERATURE and SAMPLED_TOP_P."""

    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    seed: int | None = None


SAMPLED_TEMPERATURE = 0.8
SAMPLED_TOP_P = 0.95


@dataclass(frozen=True, slots=True)
class ReferenceAnswer:
    """Token ids, and the log probability of each under the model's own distribution; none when they are not known."""

    token_ids: list[int]
    logprobs: list[float]


def run_in_process(function: Callable[..., _Result], *args: Any) -> "Future[_Result]":
    """Call a module-level function in a fresh process; its exceptions come back through the future."""
    pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
    future = pool.submit(function, *args)
    pool.shutdown(wait=False)
    return future


def one_process(model: str, cache_dir: Path, cases: Sequence[ReferenceCase]) -> list[ReferenceAnswer]:
    """What this engine generates without any cluster, each prompt alone in the pool and nothing cached."""
    from engine.build import build_engine, plan_engine
    from engine.options import EngineOptions
    from engine.sequence import SamplingParams, Sequence
    from kv_transfer.region import MemoryRegion

    longest = max(len(case.prompt_token_ids) + case.max_tokens for case in cases)
    options = EngineOptions(model=model, cache_dir=cache_dir, num_blocks=longest // 16 + 2, token_budget=8192)
    plan = plan_engine(options, available_bytes=None)
    pool = MemoryRegion.allocate(plan.pool_bytes, shared=False)
    engine = build_engine(options, plan, pool.buffer, prefill_only=False)
    answers = []
    for number, case in enumerate(cases):
        sampling = SamplingParams(
            max_tokens=case.max_tokens,
            temperature=0.0 if case.seed is None else SAMPLED_TEMPERATURE,
            top_p=1.0 if case.seed is None else SAMPLED_TOP_P,
            seed=case.seed or 0,
            num_logprobs=0,
        )
        sequence = Sequence(
            f"reference/{number}",
            case.prompt_token_ids,
            sampling,
            max_context_tokens=plan.limits.max_context_tokens,
            eos_token_ids=plan.limits.eos_token_ids,
            cache_salt=number.to_bytes(4, "big"),  # nothing of one prompt is found by the next
        )
        engine.add(sequence)
        logprobs: list[float] = []
        while engine.has_work:
            schedule = engine.schedule()
            outputs = engine.publish(schedule, engine.run(schedule))
            logprobs += [sample.logprob or 0.0 for output in outputs for sample in output.samples]
        answers.append(ReferenceAnswer(list(sequence.output_token_ids), logprobs))
    return answers


def split_sizes(model: str) -> tuple[int, ...]:
    """Numbers of processes that the model of a prepared directory can be split over, ascending from 1."""
    from engine.parallel.shard import possible_sizes
    from engine.prepared_model import open_prepared

    return possible_sizes(open_prepared(Path(model)).shape)


def transformers_greedy(model: str, cases: Sequence[ReferenceCase]) -> list[ReferenceAnswer]:
    """Tokens of `transformers.generate` in fp32, greedy. Reads the original checkpoint, not the prepared one: a wrong
    conversion would show. Raises KvferryError for an unknown model, or UNAVAILABLE when a package is missing."""
    from engine.model_source import SourceKind, resolve_source

    source = resolve_source(model)
    packages = ("transformers", "accelerate", "gguf") if source.kind is SourceKind.GGUF else ("transformers",)
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise KvferryError(
            ErrorCode.UNAVAILABLE,
            f"to compare with transformers, `pip install {' '.join(missing)}`, or leave it out with --no-transformers",
        )
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if source.kind is SourceKind.GGUF:
            path, options = source.path.parent, {"gguf_file": source.path.name}
        else:
            path, options = source.path, {}
        network = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options)
        network.train(False)
        answers = []
        for case in cases:
            prompt = torch.tensor([case.prompt_token_ids])
            output = network.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                max_new_tokens=case.max_tokens,
                pad_token_id=0,
            )
            answers.append(ReferenceAnswer(output[0, prompt.shape[1] :].tolist(), []))
    return answers

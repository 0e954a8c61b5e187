"""Rows and logits for sampler tests, and transformers' own filters as the reference."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.sampler import Sampler, SampleRow, filter_tokens
from engine.sequence import SamplingParams, TokenSample

VOCAB = 40
GREEDY = SamplingParams(max_tokens=100, temperature=0.0)
RANDOM = SamplingParams(max_tokens=100, temperature=1.0, seed=7)


def row(
    sampling: SamplingParams,
    prompt: Sequence[int] = (1, 2, 3),
    output: Sequence[int] = (),
    eos: frozenset[int] = frozenset(),
    position: int | None = None,
) -> SampleRow:
    return SampleRow(sampling, prompt, output, len(prompt) + len(output) if position is None else position, eos)


def random_logits(seed: int, rows: int = 1, vocab: int = VOCAB, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def sample_one(logits: torch.Tensor, sample_row: SampleRow) -> TokenSample:
    (result,) = Sampler().sample(logits, [sample_row])
    assert isinstance(result, TokenSample)
    return result


def kept_ids(logits: torch.Tensor, sampling: SamplingParams) -> list[int]:
    kept, scaled = filter_tokens(logits[0].numpy(), sampling)
    ids: list[int] = list(range(logits.shape[1])) if kept is None else kept.tolist()
    assert len(ids) == len(scaled)
    assert ids == sorted(ids)
    return ids


def transformers_kept(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Logits after transformers' own warpers in double precision; -inf where a token is out."""
    steps: list[Any] = [TemperatureLogitsWarper(sampling.temperature)]
    if sampling.top_k:
        steps.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        steps.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0.0:
        steps.append(MinPLogitsWarper(sampling.min_p))
    scores = logits.double()
    for step in steps:
        scores = step(torch.zeros(1, 1, dtype=torch.long), scores)
    return scores[0]

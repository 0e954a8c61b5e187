"""Rows of logits to sample from, and what the host's sampler chooses."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from engine.sampler import Sampler, SampleRow
from engine.sequence import SamplingParams, TokenSample

_ROWS = 4


@dataclass(frozen=True, slots=True)
class Case:
    """Rows of `kind` ("peaked", "flat", "tied", "equal" or "broken") with seeds and positions of their own."""

    params: SamplingParams
    vocab_size: int = 700
    kind: str = "peaked"


def _case(vocab_size: int = 700, kind: str = "peaked", **params: float) -> Case:
    return Case(replace(SamplingParams(max_tokens=1), **params), vocab_size, kind)  # type: ignore[arg-type]


CASES = {
    "the most likely": _case(temperature=0.0),
    "the most likely of equals": _case(temperature=0.0, kind="tied"),
    "temperature 1": _case(),
    "a high temperature": _case(temperature=2.0, vocab_size=5000),
    "hardly any temperature": _case(temperature=1e-40),
    "all tokens equal": _case(kind="equal"),
    "top-k": _case(top_k=5),
    "top-k of more than a tile has": _case(top_k=4200, vocab_size=4999, kind="flat"),
    "top-k with ties at its border": _case(top_k=3, kind="tied"),
    "top-k of all tokens equal": _case(top_k=3, kind="equal"),
    "top-k of one": _case(top_k=1, kind="flat"),
    "top-k of all": _case(top_k=700),
    "top-p": _case(top_p=0.8, vocab_size=4500),
    "top-p of the most likely only": _case(top_p=1e-6, kind="flat"),
    "top-p with ties at its border": _case(top_p=0.6, kind="tied"),
    "top-p of all tokens equal": _case(top_p=0.1, kind="equal"),
    "top-p of a flat row": _case(top_p=0.05, kind="flat", temperature=1.5),
    "min-p": _case(min_p=0.2, temperature=1.3),
    "min-p of 1": _case(min_p=1.0, kind="tied"),
    "all at once": _case(top_k=20, top_p=0.9, min_p=0.02, temperature=0.7, vocab_size=4500),
    "all at once on a flat row": _case(top_k=300, top_p=0.5, min_p=0.3, kind="flat"),
    "one token": _case(vocab_size=1, top_p=0.5),
    "broken rows": _case(kind="broken", top_k=3, top_p=0.5),
}


def _logits(case: Case) -> Tensor:
    """fp32 [rows, vocab]."""
    random = np.random.default_rng(5)
    shape = (_ROWS, case.vocab_size)
    if case.kind == "flat":
        return torch.from_numpy(random.standard_normal(shape, np.float32) * np.float32(0.5))
    if case.kind == "tied":
        tied: Tensor = torch.from_numpy(random.integers(-3, 4, shape).astype(np.float32))
        return tied * 0.5
    if case.kind == "equal":
        return torch.full(shape, -2.5)
    logits = random.standard_normal(shape, np.float32) * np.float32(3)
    logits[:, case.vocab_size // 2 :: 3] = -np.inf
    logits[:, case.vocab_size // 3] = 0.0
    if case.kind == "broken":
        logits[0, 5] = np.nan
        logits[1, 600] = np.inf
        logits[2] = -np.inf
        logits[3, :-1] = -np.inf
        logits[3, -1] = -7.0
    return torch.from_numpy(logits)


def _params(case: Case) -> list[SamplingParams]:
    return [replace(case.params, seed=seed) for seed in (0, (1 << 64) - 5, 1 << 63, 12345)]


def _positions() -> list[int]:
    return [7 * row * row for row in range(_ROWS)]


def run(case: Case, device: str) -> dict[str, Tensor]:
    """The tokens that the kernel chose."""
    from engine.kernels.sampling import sample, sampling_rows  # Not for those who import the cases only.

    rows = sampling_rows(_params(case), _positions(), torch.device(device))
    # Rows that are part of a wider matrix.
    wide = torch.zeros((_ROWS, case.vocab_size + 12), device=device)
    wide[:, : case.vocab_size] = _logits(case)
    return {"tokens": sample(wide[:, : case.vocab_size], rows).cpu()}


def check(case: Case, result: dict[str, Tensor]) -> None:
    """Raises AssertionError where they are not those of the host."""
    rows = [SampleRow(params, (), (), at) for params, at in zip(_params(case), _positions(), strict=True)]
    samples = Sampler().sample(_logits(case), rows)
    expected = [sample.token_id if isinstance(sample, TokenSample) else -1 for sample in samples]
    assert result["tokens"].tolist() == expected

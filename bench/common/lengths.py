"""Lengths of prompts and answers: drawn by the published statistics of public traces, or read from a trace's own file.

The percentiles were taken of the Azure LLM inference traces of 2023 (Patel et al., Splitwise, ISCA 2024; CC-BY-4.0)
and of the conversation trace of Mooncake (FAST 2025; Apache-2.0). Prompt and answer are drawn independently: in Azure's
they are hardly correlated (-0.11 and 0.00).
"""

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

_SHARES = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)


class Lengths(NamedTuple):
    """Tokens of one request."""

    prompt: int
    output: int


class TraceError(Exception):
    """The file is no trace of a known form."""


@dataclass(frozen=True, slots=True)
class TraceStatistics:
    """Percentiles of a trace: the least, 1, 5, 25, 50, 75, 90, 95, 99, and the most."""

    prompt: tuple[float, ...]
    output: tuple[float, ...]

    def draw(self, count: int, generator: np.random.Generator) -> list[Lengths]:
        """So many requests. Between two percentiles the logarithm of the length is evenly spread."""
        prompts, outputs = (
            np.exp(np.interp(generator.random(count), _SHARES, np.log(points))).round().astype(int).tolist()
            for points in (self.prompt, self.output)
        )
        return [Lengths(max(1, prompt), max(1, output)) for prompt, output in zip(prompts, outputs, strict=True)]

    @property
    def longest(self) -> Lengths:
        """The longest prompt and the longest answer, which need not be of one request."""
        return Lengths(round(self.prompt[-1]), round(self.output[-1]))


TRACES = {
    "azure_conv": TraceStatistics(
        (1, 29, 181, 396, 1020, 1189, 2734.5, 4083, 4142, 14050), (1, 16, 41, 85, 129, 395, 424, 451, 601, 1000)
    ),
    "azure_code": TraceStatistics(
        (1, 17, 75, 578, 1469, 2744.5, 5187.6, 7303.3, 7436, 7437), (1, 6, 6, 9, 13, 24, 55, 90, 251.5, 1899)
    ),
    "mooncake_conversation": TraceStatistics(
        (890, 894, 901, 2306.5, 6909, 15367, 27367, 39550.5, 85400.4, 126195),
        (1, 3, 10, 156.5, 350, 472, 597, 698, 1118.5, 2000),
    ),
}


def read_lengths(path: Path) -> list[Lengths]:
    """The requests of a trace, in its order: Mooncake's .jsonl (`input_length`, `output_length`) or Azure's .csv
    (`ContextTokens`, `GeneratedTokens`). Raises TraceError for anything else, and OSError."""
    with path.open(encoding="utf-8", newline="") as file:
        try:
            rows = list(_rows(path.suffix, file))
        except (KeyError, TypeError, ValueError) as error:
            raise TraceError(f"{path} is neither Mooncake's .jsonl nor Azure's .csv: {error!r}") from error
    if not rows:
        raise TraceError(f"{path} has no requests")
    return [Lengths(max(1, prompt), max(1, output)) for prompt, output in rows]


def longest(requests: Sequence[Lengths]) -> Lengths:
    """The longest prompt and the longest answer, which need not be of one request."""
    return Lengths(max(each.prompt for each in requests), max(each.output for each in requests))


def _rows(suffix: str, file: Iterator[str]) -> Iterator[tuple[int, int]]:
    if suffix == ".csv":
        for row in csv.DictReader(file):
            yield int(row["ContextTokens"]), int(row["GeneratedTokens"])
        return
    for line in file:
        request = json.loads(line)
        yield int(request["input_length"]), int(request["output_length"])

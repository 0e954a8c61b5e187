"""The one form of all benchmarks: options, pairs taken in turn, a ratio with its interval, one JSON line a result.

    options = Options.parse(parser, argv)
    with Report(options) as report:                               JSON lines to stdout, a table to stderr at the end
        pairs = take_pairs(treatment, baseline, options.num_pairs)        A B A B ...
        report.add(summarise("metric", "variant", "GB/s", Better.HIGHER, "baseline", pairs, options.seed))

A ratio above 1 always means that kvferry is better, whatever the unit. A benchmark reports; it does not judge.
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Self, TextIO, TypeVar

import numpy as np

from bench.common.origin import commit, machine

MIN_PAIRS = 5
_RESAMPLES = 2000
_SIGNIFICANT_DIGITS = 6

T = TypeVar("T")


class BenchmarkError(Exception):
    """The benchmark cannot give a number: two ways that must agree did not, or a part of it failed."""


class Better(Enum):
    """Which way a value is better."""

    HIGHER = "higher"
    LOWER = "lower"


@dataclass(frozen=True, slots=True)
class Options:
    """How long to measure, and the seed of everything random."""

    seed: int = 0
    quick: bool = False
    long: bool = False

    @classmethod
    def parse(cls, parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> tuple[Self, argparse.Namespace]:
        """Add the common flags to `parser` and read them; the namespace has the benchmark's own."""
        length = parser.add_mutually_exclusive_group()
        length.add_argument("--quick", action="store_true", help="fewer pairs and variants; at most a minute")
        length.add_argument("--long", action="store_true", help="more pairs and variants; no limit")
        parser.add_argument("--seed", type=int, default=0, help="seed of contents, orders and intervals")
        given = parser.parse_args(argv)
        return cls(given.seed, given.quick, given.long), given

    def pick(self, quick: T, normal: T, long: T) -> T:
        """The one of the three that was asked for."""
        if self.quick:
            return quick
        return long if self.long else normal

    @property
    def num_pairs(self) -> int:
        """Pairs to take for one ratio."""
        return self.pick(MIN_PAIRS, 11, 31)


@dataclass(frozen=True, slots=True)
class Pair:
    """One sample of kvferry and the sample of the baseline taken right after it, in the same unit."""

    value: float
    baseline: float


@dataclass(frozen=True, slots=True)
class Result:
    """One line. `ratio` is the median over `n` pairs, `ci95` its interval; `value` and `baseline_value` are medians."""

    metric: str
    variant: str
    value: float
    unit: str
    baseline: str
    baseline_value: float
    ratio: float
    n: int
    ci95: tuple[float, float]


def take_pairs(treatment: Callable[[], float], baseline: Callable[[], float], num_pairs: int) -> list[Pair]:
    """Samples in turn, treatment first. Both must have been run before: nothing here is a warm-up.

    Raises ValueError for fewer than MIN_PAIRS pairs.
    """
    if num_pairs < MIN_PAIRS:
        raise ValueError(f"{num_pairs} pairs are too few; the least is {MIN_PAIRS}")
    # The elements of a call are evaluated left to right: A B A B.
    return [Pair(treatment(), baseline()) for _ in range(num_pairs)]


def take_rounds(samples: Mapping[str, Callable[[], float]], num_rounds: int) -> dict[str, list[float]]:
    """As `take_pairs` for several ways at once: one sample of each in every round, in this order; those of one round
    make pairs. Raises ValueError for fewer than MIN_PAIRS rounds.
    """
    if num_rounds < MIN_PAIRS:
        raise ValueError(f"{num_rounds} rounds are too few; the least is {MIN_PAIRS}")
    taken: dict[str, list[float]] = {name: [] for name in samples}
    for _ in range(num_rounds):
        for name, sample in samples.items():
            taken[name].append(sample())
    return taken


def pair_ratio(pair: Pair, better: Better) -> float:
    """How many times better kvferry was in this pair. Raises BenchmarkError for a sample that is not positive."""
    if not (0.0 < pair.value < math.inf and 0.0 < pair.baseline < math.inf):
        raise BenchmarkError(f"no ratio of {pair.value} to {pair.baseline}")
    return pair.value / pair.baseline if better is Better.HIGHER else pair.baseline / pair.value


def bootstrap_interval(ratios: Sequence[float], seed: int) -> tuple[float, float]:
    """The 95 % interval of the median: percentiles of the medians of seeded resamples."""
    chosen = np.random.default_rng(seed).integers(0, len(ratios), (_RESAMPLES, len(ratios)))
    medians = np.median(np.asarray(ratios, np.float64)[chosen], axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return float(low), float(high)


def summarise(
    metric: str, variant: str, unit: str, better: Better, baseline: str, pairs: Sequence[Pair], seed: int
) -> Result:
    """The result of some pairs. Raises BenchmarkError for a sample that is not positive."""
    ratios = [pair_ratio(pair, better) for pair in pairs]
    return Result(
        metric=metric,
        variant=variant,
        value=statistics.median(pair.value for pair in pairs),
        unit=unit,
        baseline=baseline,
        baseline_value=statistics.median(pair.baseline for pair in pairs),
        ratio=statistics.median(ratios),
        n=len(pairs),
        ci95=bootstrap_interval(ratios, seed),
    )


def json_line(result: Result, options: Options) -> str:
    """The result in the form that all benchmarks share. Raises ValueError for a number that JSON does not have."""
    low, high = result.ci95
    line = {
        "metric": result.metric,
        "variant": result.variant,
        "value": _rounded(result.value),
        "unit": result.unit,
        "baseline": result.baseline,
        "baseline_value": _rounded(result.baseline_value),
        "ratio": _rounded(result.ratio),
        "n": result.n,
        "ci95": [_rounded(low), _rounded(high)],
        "seed": options.seed,
        "machine": machine(),
        "commit": commit(),
    }
    return json.dumps(line, allow_nan=False)


class Report:
    """Where results go: each to stdout as it comes, all of them as a table to stderr on leaving."""

    def __init__(self, options: Options, *, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self._options = options
        self._out = out or sys.stdout
        self._err = err or sys.stderr
        self._results: list[Result] = []

    def add(self, result: Result) -> None:
        """Print one line."""
        self._results.append(result)
        self._out.write(json_line(result, self._options) + "\n")
        self._out.flush()

    def missing(self, baseline: str, reason: str) -> None:
        """Say in a line that there is nothing to compare with under this name."""
        facts = {"metric": "missing", "baseline": baseline, "reason": reason, "seed": self._options.seed}
        self._out.write(json.dumps({**facts, "machine": machine(), "commit": commit()}) + "\n")
        self._out.flush()

    def note(self, text: str) -> None:
        """Tell the person who waits."""
        self._err.write(text + "\n")
        self._err.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._results:
            self.note(table(self._results))


def table(results: Sequence[Result]) -> str:
    """The results for a person to read."""
    rows = [("metric", "variant", "value", "baseline", "ratio", "95 % interval", "pairs")]
    rows += [
        (
            result.metric,
            result.variant,
            f"{result.value:.4g} {result.unit}",
            f"{result.baseline_value:.4g} ({result.baseline})",
            f"{result.ratio:.3f}",
            f"{result.ci95[0]:.3f} .. {result.ci95[1]:.3f}",
            str(result.n),
        )
        for result in results
    ]
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines)


def _rounded(number: float) -> float:
    return float(f"{number:.{_SIGNIFICANT_DIGITS}g}")

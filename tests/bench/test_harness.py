"""The form that all benchmarks share: pairs, intervals, lines. What is measured is not tested here."""

import argparse
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.common.harness import (
    MIN_PAIRS,
    BenchmarkError,
    Better,
    Options,
    Pair,
    Report,
    Result,
    bootstrap_interval,
    json_line,
    pair_ratio,
    summarise,
    take_pairs,
    take_rounds,
)
from bench.common.origin import ROOT, commit, machine

KEYS = {"metric", "variant", "value", "unit", "baseline", "baseline_value", "ratio", "n", "ci95", "seed", "machine"}
RESULT = Result("m", "shm:1MB", 2.0, "GB/s", "memcpy", 4.0, 0.5, 5, (0.25, 0.75))


def options(*argv: str) -> Options:
    return Options.parse(argparse.ArgumentParser(), list(argv))[0]


def test_samples_are_taken_in_turn_and_kvferry_goes_first() -> None:
    taken: list[str] = []

    def sample(name: str, value: float) -> float:
        taken.append(name)
        return value + len(taken)

    pairs = take_pairs(lambda: sample("A", 0), lambda: sample("B", 100), 5)
    assert taken == ["A", "B"] * 5
    assert pairs == [Pair(n, 101 + n) for n in (1, 3, 5, 7, 9)]


def test_fewer_than_five_pairs_are_refused() -> None:
    with pytest.raises(ValueError, match="too few"):
        take_pairs(lambda: 1.0, lambda: 1.0, MIN_PAIRS - 1)


def test_rounds_take_one_sample_of_each_way_in_turn() -> None:
    taken: list[str] = []

    def sample(name: str) -> float:
        taken.append(name)
        return float(len(taken))

    found = take_rounds({"A": lambda: sample("A"), "B": lambda: sample("B")}, MIN_PAIRS)
    assert taken == ["A", "B"] * MIN_PAIRS
    assert found == {"A": [1, 3, 5, 7, 9], "B": [2, 4, 6, 8, 10]}
    with pytest.raises(ValueError, match="too few"):
        take_rounds({"A": lambda: 1.0}, MIN_PAIRS - 1)


@pytest.mark.parametrize(("better", "ratio"), [(Better.HIGHER, 2.0), (Better.LOWER, 0.5)])
def test_a_ratio_above_one_means_that_kvferry_is_better(better: Better, ratio: float) -> None:
    assert pair_ratio(Pair(6.0, 3.0), better) == ratio


@pytest.mark.parametrize("pair", [Pair(0.0, 1.0), Pair(1.0, 0.0), Pair(-1.0, 1.0), Pair(float("nan"), 1.0)])
def test_a_sample_that_cannot_be_compared_is_an_error(pair: Pair) -> None:
    with pytest.raises(BenchmarkError):
        pair_ratio(pair, Better.HIGHER)


def test_the_ratio_is_the_median_of_the_pairs_not_the_ratio_of_the_medians() -> None:
    pairs = [Pair(1, 1), Pair(10, 5), Pair(100, 20), Pair(2, 20), Pair(3, 1)]
    result = summarise("m", "v", "GB/s", Better.HIGHER, "b", pairs, seed=0)
    assert (result.value, result.baseline_value, result.ratio, result.n) == (3, 5, 2.0, 5)


def test_the_interval_holds_the_median_and_repeats_with_its_seed() -> None:
    ratios = [0.5, 0.8, 0.9, 1.0, 1.1, 1.2, 3.0]
    low, high = bootstrap_interval(ratios, seed=3)
    assert 0.5 <= low < 1.0 < high <= 3.0
    assert bootstrap_interval(ratios, seed=3) == (low, high)
    assert bootstrap_interval([2.0] * 5, seed=0) == (2.0, 2.0)


def test_more_pairs_make_the_interval_narrower() -> None:
    spread = [0.8, 0.9, 1.0, 1.1, 1.2]
    few, many = bootstrap_interval(spread, 0), bootstrap_interval(spread * 20, 0)
    assert many[1] - many[0] < few[1] - few[0]


def test_a_line_has_exactly_the_agreed_keys() -> None:
    line = json.loads(json_line(RESULT, Options(seed=7)))
    assert set(line) == KEYS | {"commit"}
    assert (line["ratio"], line["ci95"], line["n"], line["seed"]) == (0.5, [0.25, 0.75], 5, 7)
    assert line["machine"].keys() >= {"cpu", "cores", "kernel", "python"}


def test_a_number_that_json_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        json_line(Result("m", "v", float("inf"), "ms", "b", 1.0, 1.0, 5, (1.0, 1.0)), Options())


def test_lines_go_to_stdout_at_once_and_the_table_to_stderr_at_the_end() -> None:
    out, err = io.StringIO(), io.StringIO()
    with Report(Options(), out=out, err=err) as report:
        report.add(RESULT)
        assert [json.loads(line)["metric"] for line in out.getvalue().splitlines()] == ["m"]
        assert err.getvalue() == ""
        report.add(RESULT)
    assert len(out.getvalue().splitlines()) == 2
    header, *rows = err.getvalue().splitlines()
    assert header.split()[:3] == ["metric", "variant", "value"]
    assert [row.split()[1] for row in rows] == ["shm:1MB"] * 2


def test_what_was_measured_before_an_error_is_still_shown() -> None:
    err = io.StringIO()
    report = Report(Options(), out=io.StringIO(), err=err)

    def measure() -> None:
        with report:
            report.add(RESULT)
            raise BenchmarkError("the second variant failed")

    with pytest.raises(BenchmarkError):
        measure()
    assert "shm:1MB" in err.getvalue()


def test_quick_and_long_choose_the_number_of_pairs() -> None:
    assert options("--quick").num_pairs >= MIN_PAIRS
    assert options("--quick").num_pairs < options().num_pairs < options("--long").num_pairs
    assert options("--seed", "5") == Options(seed=5)


def test_quick_and_long_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options("--quick", "--long")
    assert "not allowed" in capsys.readouterr().err


def test_the_commit_is_unknown_where_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert commit(tmp_path) == "unknown"
    monkeypatch.setenv("PATH", "")
    assert commit(tmp_path / "missing") == "unknown"


def test_torch_is_named_only_if_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert "torch" not in machine()


BENCHMARKS = sorted(ROOT.glob("bench/[a-z]*.py"))

# What takes longest to load is loaded once, and each benchmark then begins as `python FILE --help` would.
STARTER = """
import os, runpy, sys
import numpy, torch
for path in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        out = os.open(os.path.basename(path) + ".help", os.O_WRONLY | os.O_CREAT)
        os.dup2(out, 1)
        sys.argv, sys.path[0] = [path, "--help"], os.path.dirname(path)
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as end:
            sys.stdout.flush()
            os._exit(end.code or 0)  # Without taking down what was loaded: that takes longer than the rest.
        os._exit(1)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"{path} failed")
"""


@pytest.fixture(scope="module")
def help_texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each benchmark says of itself, started from somewhere else."""
    folder = tmp_path_factory.mktemp("elsewhere")
    command = [sys.executable, "-c", STARTER, *map(str, BENCHMARKS)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return {file.stem: (folder / f"{file.name}.help").read_text() for file in BENCHMARKS}


@pytest.mark.timeout(300)  # for all of them, on a machine that is busy
@pytest.mark.parametrize("name", [file.stem for file in BENCHMARKS])
def test_every_benchmark_starts_from_anywhere_and_knows_the_common_flags(name: str, help_texts: dict[str, str]) -> None:
    """Some have the name of a package that they import: started by path, they must not find themselves."""
    assert {"--quick", "--long", "--seed"} <= set(help_texts[name].replace("]", " ").split())

"""What stays of a transfer behind a prefill: the formula, its lines, and a run on the tiny model."""

import argparse
import io
import json
from pathlib import Path

import pytest

from bench import overlap
from bench.common.harness import Options, Report


@pytest.mark.parametrize(
    ("transfer_ms", "exposed_ms"),
    [
        (50.0, 5.0),  # The link keeps up: the last of ten units.
        (100.0, 10.0),
        (300.0, 30.0 + 200.0 * 0.9),
    ],
)
def test_the_formula_leaves_one_unit_and_what_the_link_is_behind(transfer_ms: float, exposed_ms: float) -> None:
    assert overlap.formula_ms(100.0, transfer_ms, 10) == pytest.approx(exposed_ms)


def test_a_transfer_that_is_hidden_wholly_has_a_line_too() -> None:
    out, options = io.StringIO(), Options(quick=True)
    samples = [overlap.Sample(100.0, 0.0, 5.0)] * 5
    with Report(options, out=out, err=io.StringIO()) as report:
        overlap.report_case(report, overlap.Case(0.5, 1), samples, 50.0, 10, seed=0)
    against, share = (json.loads(line) for line in out.getvalue().splitlines())
    assert (against["metric"], against["value"], against["baseline_value"]) == ("exposed_vs_formula", 0.0, 5.0)
    assert against["ratio"] == pytest.approx(1.05)
    assert (share["metric"], share["value"], share["baseline_value"]) == ("exposed_share", 0.0, 0.1)


def test_a_throttled_link_is_measured_with_a_real_prefill(tmp_path: Path) -> None:
    out, options = io.StringIO(), Options(quick=True)
    given = argparse.Namespace(model=str(overlap.TINY_MODEL), cache_dir=tmp_path)
    with Report(options, out=out, err=io.StringIO()) as report:
        overlap.run(given, 2, (3.0,), options, report)
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [(line["metric"], line["variant"]) for line in lines] == [
        ("exposed_vs_formula", "kappa=3,chunks=2"),
        ("exposed_share", "kappa=3,chunks=2"),
    ]
    assert all(line["n"] == 5 and line["baseline_value"] > 0 for line in lines)

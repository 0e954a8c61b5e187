"""The cost of fingerprints is measured on hand-offs that bring the content, with fingerprints and without."""

import io
import json

import numpy as np
import pytest

from bench.common import transfer_peer as peers
from bench.common.harness import Options, Report
from bench.fingerprint_cost import layout_for, measure, two_ends
from kv_transfer.pages import PageRun, PagesAt


@pytest.mark.parametrize("page_kb", [4, 8, 64, 256])
def test_pages_have_the_size_that_the_variant_names(page_kb: int) -> None:
    assert layout_for(page_kb).page_bytes == page_kb * 1024


def test_a_page_size_gives_a_line_for_each_metric() -> None:
    out, options = io.StringIO(), Options(quick=True)
    with Report(options, out=out, err=io.StringIO()) as report, two_ends(layout_for(4), 4, seed=1) as ends:
        ends.use((3, 1), (0, 2))
        measure(ends, "4KiB", report, options)
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [(line["metric"], line["variant"], line["baseline"]) for line in lines] == [
        ("fingerprints_vs_memcpy", "4KiB", "memcpy"),
        ("fingerprint_share", "4KiB", "unchecked"),
    ]
    assert lines[1]["value"] == pytest.approx(1.0 - lines[1]["ratio"], abs=1e-5)


def test_switched_off_every_page_counts_as_zero_and_is_copied_all_the_same() -> None:
    run = PageRun(range(2), range(2))
    source = PagesAt(run, 256, memoryview(b"x" * 1024), np.array([512, 0]))
    target = PagesAt(run, 256, memoryview(bytearray(1024)), np.array([0, 512]))
    switched = peers.SwitchedFingerprinter()
    before = switched.fingerprints(source, 7).tolist()
    switched.enabled = False
    assert switched.fingerprints(source, 7).tolist() == switched.copy(source, target, 7).tolist() == [0] * 4
    assert target.memory == source.memory
    switched.enabled = True
    assert switched.fingerprints(target, 7).tolist() == before
    assert 0 not in before

"""The plan of a run of chaos, and what it does to links: the same for a seed, everything in it, nothing hopeless."""

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chaos.faults import link_state, links_of
from tests.chaos.plan import DECODE, LONG, NODES, ROUTER, SHORT, Fault, FaultKind, Pace, steps
from tests.chaos.report import FaultRecord, Report, percentiles
from tests.chaos.switch import LinkState, slower

SEEDS = st.integers(0, 2**32)


@given(seed=SEEDS, pace=st.sampled_from([LONG, SHORT]))
@settings(max_examples=30, deadline=None)
def test_a_seed_says_everything(seed: int, pace: Pace) -> None:
    first, second = (list(itertools.islice(steps(seed, pace), 40)) for _ in range(2))
    assert first == second
    assert first != list(itertools.islice(steps(seed + 1, pace), 40))


@given(seed=SEEDS)
@settings(max_examples=30, deadline=None)
def test_every_kind_comes_as_often_as_every_other(seed: int) -> None:
    kinds = [fault.kind for step in itertools.islice(steps(seed, LONG), 200) for fault in step.faults]
    counts = Counter(kinds)
    assert set(counts) == set(FaultKind)
    assert max(counts.values()) - min(counts.values()) <= 2


@given(seed=SEEDS, pace=st.sampled_from([LONG, SHORT]))
@settings(max_examples=30, deadline=None)
def test_two_faults_at_a_time_leave_somebody_who_decodes_and_last_as_long_as_the_pace_says(
    seed: int, pace: Pace
) -> None:
    drawn = list(itertools.islice(steps(seed, pace), 100))
    assert any(len(step.faults) == 2 for step in drawn)
    for step in drawn:
        assert pace.calm_s[0] <= step.calm_s <= pace.calm_s[1]
        nodes = [node for fault in step.faults for node in (fault.node, fault.peer) if node]
        assert len(nodes) == len(set(nodes))
        slow = (FaultKind.LOSS, FaultKind.DELAY, FaultKind.CAP)
        assert not set(DECODE) <= {fault.node for fault in step.faults if fault.kind not in slow}
        for fault in step.faults:
            assert fault.duration_s == 0 or pace.duration_s[0] <= fault.duration_s <= pace.duration_s[1]


def test_only_chosen_kinds_come() -> None:
    kinds = [FaultKind.LOSS, FaultKind.KILL]
    drawn = {fault.kind for step in itertools.islice(steps(3, LONG, kinds), 20) for fault in step.faults}
    assert drawn == set(kinds)


@pytest.mark.parametrize(
    ("kind", "ways"), [(FaultKind.MUTE, "out"), (FaultKind.DEAF, "in"), (FaultKind.PARTITION, "out in")]
)
def test_a_partition_is_one_way_or_two_way_and_clients_still_reach_the_router(kind: FaultKind, ways: str) -> None:
    links = links_of(Fault(kind, ROUTER, duration_s=1))
    others = [name for name in NODES if name != ROUTER]
    expected = {(ROUTER, other) for other in others if "out" in ways} | {
        (one, ROUTER) for one in others if "in" in ways
    }
    assert links == expected
    assert link_state(Fault(kind, ROUTER)).blocked


def test_a_cut_is_between_two_nodes() -> None:
    links = links_of(Fault(FaultKind.CUT, "prefill-0", "decode-1"))
    assert links == {("prefill-0", "decode-1"), ("decode-1", "prefill-0")}


def test_faults_of_a_link_add_up() -> None:
    both = slower(LinkState(loss=0.1, bytes_per_s=5000), LinkState(delay_s=0.2, bytes_per_s=9000))
    assert both == LinkState(loss=0.1, delay_s=0.2, bytes_per_s=5000)
    assert slower(both, LinkState(blocked=True)).blocked


def test_a_report_counts_faults_by_kind_and_is_good_only_without_violations() -> None:
    report = Report(7, "long", duration_s=90, requests={"good": 5}, failures={"status 503": 2})
    report.records = [
        FaultRecord(0.0, ("loss of 10%: decode-0 for 1.0 s", "kill: prefill-1"), 2.0),
        FaultRecord(9.0, ("kill: decode-1",), 4.0),
        FaultRecord(20.0, ("full disk: all for 2.0 s",), None),
    ]
    facts = report.as_dict()
    assert facts["faults"] == 4
    assert facts["faults_by_kind"] == {"full disk": 1, "kill": 2, "loss": 1}
    assert (facts["recovery_s_p50"], facts["recovery_s_p99"]) == (3.0, 4.0)
    assert report.is_good
    assert "nothing was violated" in report.lines()[-1]
    report.violations.append("wrong text: x")
    assert not report.is_good
    assert "  VIOLATED: wrong text: x" in report.lines()


def test_percentiles_of_nothing_are_none() -> None:
    assert percentiles([]) == (None, None)
    assert percentiles([3.0, 1.0, 2.0]) == (2.0, 3.0)

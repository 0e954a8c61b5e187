"""Schedules of two simulated workers: late, lost, doubled, reordered and forged messages, stops and kills."""

from collections import Counter

import pytest

from tests.support.handoff_sim import HandoffSim, Way

SCHEDULES = 400


def run_schedules(*, way: Way, faults: bool, seeds: range, steps: int = 150) -> Counter[str]:
    endings: Counter[str] = Counter()
    for seed in seeds:
        sim = HandoffSim(seed, way=way, faults=faults)
        try:
            sim.run(steps)
        except Exception as error:
            raise AssertionError(f"seed {seed}, way={way}, faults={faults}: {error!r}") from error
        endings.update(events[0] for events in sim.received.values())
    return endings


@pytest.mark.parametrize("way", Way, ids=lambda way: way.value)
@pytest.mark.parametrize("faults", [False, True], ids=["clean", "faults"])
def test_no_schedule_writes_after_a_fence_or_leaves_a_hand_off_without_its_one_ending(way: Way, faults: bool) -> None:
    endings = run_schedules(way=way, faults=faults, seeds=range(SCHEDULES))
    # A simulation in which nothing ever succeeds, or nothing ever fails, would prove nothing.
    assert endings["ReportCommitted"] > SCHEDULES / 2
    assert endings["ReportFailed"] > SCHEDULES / 2

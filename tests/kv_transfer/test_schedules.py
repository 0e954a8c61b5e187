"""Schedules of simulated workers: late, lost, doubled, reordered, stale and forged messages, stops, kills, partitions.

A failing seed is named with the command that replays it.
"""

from collections import Counter

import pytest

from kv_transfer.refusals import Refusal
from tests.support.handoff_sim import HandoffSim
from tests.support.sim_network import Way

SCHEDULES = 425
STEPS = 320
RARE = (Refusal.OUTSIDE, Refusal.REUSED)  # Others test these.
CASES = [(way, faults, part) for way in Way for faults in (False, True) for part in range(4)]
REPLAY = """python -c "from tests.kv_transfer.test_schedules import replay; replay({seed}, '{way}', {faults})\""""


def schedule(seed: int, way: Way, *, faults: bool) -> Counter[str]:
    """Run one; what happened in it."""
    sim = HandoffSim(seed, way=way, faults=faults)
    sim.run(STEPS)
    return sim.world.seen


def replay(seed: int, way: str, faults: bool) -> Counter[str]:
    """What the message of a failing test says to run."""
    return schedule(seed, Way(way), faults=faults)


@pytest.mark.parametrize(
    ("way", "faults", "part"), CASES, ids=lambda value: value.value if isinstance(value, Way) else str(value)
)
def test_no_schedule_breaks_a_promise(way: Way, faults: bool, part: int) -> None:
    """Both books in order at the end, every hand-off ended once on each side, nothing written late, no KV wrong."""
    seen: Counter[str] = Counter()
    for seed in range(part * SCHEDULES, (part + 1) * SCHEDULES):
        try:
            seen += schedule(seed, way, faults=faults)
        except Exception as error:
            command = REPLAY.format(seed=seed, way=way.value, faults=faults)
            raise AssertionError(f"seed {seed}, {way.value}, faults={faults}: {error!r}\nreplay: {command}") from error
    # A simulation in which nothing ever succeeds, nothing ever fails, or nothing ever happens would prove nothing.
    for side, good in (("decode", "ReportCommitted"), ("prefill", "ReportSent")):
        endings = seen[f"{side}: {good}"], seen[f"{side}: ReportFailed"]
        assert min(endings) > 0.25 * sum(endings), (side, endings)
        assert sum(endings) > 2 * SCHEDULES, (side, endings)
    assert {kind: seen[kind] for kind in _expected(way, faults=faults) if not seen[kind]} == {}


def _expected(way: Way, *, faults: bool) -> list[str]:
    """What must have happened in a few hundred schedules."""
    kinds = [
        "cancelled at decode", "cancelled at prefill", "clock jumped", "decode killed", "prefill killed", "stopped",
        "link broken", "died writing", "decode pool full", "prefill pool full", "held back", "ticket never used",
        "ticket replayed", "stale incarnation", "forged",
        *(f"refused: {kind.value}" for kind in Refusal if kind not in RARE),
    ]  # fmt: skip
    if way is not Way.LANDED:
        kinds += ["partition: up", "partition: down", "partition: both", "healed", "keepalive", "cut short"]
    return [*kinds, "doubled", "dropped", "reordered", "corrupted"] if faults else kinds


def test_there_are_as_many_schedules_as_promised() -> None:
    assert len(CASES) * SCHEDULES >= 10_000

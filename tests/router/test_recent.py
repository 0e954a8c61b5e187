"""What the live page says of the last minute."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.observation.recent import RecentBytes, RecentTimes


def test_percentiles_are_by_nearest_rank_and_in_milliseconds() -> None:
    times = RecentTimes()
    assert times.percentiles(100.0).count == 0
    assert times.percentiles(100.0).p50_ms is None
    for index in range(100):
        times.add(100.0, (index + 1) / 1000)
    found = times.percentiles(100.0)
    assert (found.p50_ms, found.p99_ms, found.count) == (pytest.approx(50), pytest.approx(99), 100)


def test_times_older_than_a_minute_do_not_count_and_others_do() -> None:
    times = RecentTimes()
    times.add(10.0, 5.0)
    times.add(50.0, 1.0)
    assert times.percentiles(70.0, [(69.0, 2.0), (9.0, 9.0)]).count == 2
    assert times.percentiles(70.0, [(69.0, 2.0)]).p99_ms == 2000
    assert times.percentiles(111.0).count == 0


def test_few_of_very_many_times_are_kept() -> None:
    times = RecentTimes()
    for index in range(10_000):
        times.add(1.0, index / 1000)
    assert times.percentiles(1.0).count == 4096


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 40_000), st.integers(0, 1000)), min_size=1, max_size=60))
def test_bytes_are_counted_in_the_second_in_which_they_came(steps: list[tuple[int, int]]) -> None:
    recent, now, added = RecentBytes(), 1000.0, []
    for gap_ms, size in steps:
        now += gap_ms / 1000
        recent.add(now, size)
        added.append((int(now), size))
    expected = [sum(size for second, size in added if second == wanted) for wanted in range(int(now) - 60, int(now))]
    assert recent.per_second(now) == expected

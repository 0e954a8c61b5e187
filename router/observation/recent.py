"""What happened in the last minute: times with their percentiles, and bytes for each second. Time is passed in."""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

WINDOW_S = 60
_MAX_KEPT = 4096


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of `count` durations, in milliseconds; None when there is none."""

    p50_ms: float | None
    p99_ms: float | None
    count: int


class RecentTimes:
    """Durations that ended in the last minute: the last 4,096 of them at most."""

    def __init__(self) -> None:
        self._times: deque[tuple[float, float]] = deque(maxlen=_MAX_KEPT)

    def add(self, ended_at: float, duration_s: float) -> None:
        """Take one in."""
        self._times.append((ended_at, duration_s))

    def percentiles(self, now: float, others: Iterable[tuple[float, float]] = ()) -> Percentiles:
        """By nearest rank, `others` (when it ended, duration in seconds) included."""
        since = now - WINDOW_S
        durations = sorted(duration for times in (self._times, others) for at, duration in times if at > since)
        if not durations:
            return Percentiles(None, None, 0)
        p50, p99 = (durations[math.ceil(len(durations) * share) - 1] * 1000 for share in (0.5, 0.99))
        return Percentiles(p50, p99, len(durations))


class RecentBytes:
    """Bytes moved, by whole seconds of the clock."""

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}  # By second, the oldest first.

    def add(self, now: float, size_bytes: int) -> None:
        """Count bytes in the second that `now` is in. `now` never goes back."""
        second = math.floor(now)
        self._sizes[second] = self._sizes.get(second, 0) + size_bytes
        while (oldest := next(iter(self._sizes))) < second - WINDOW_S:
            del self._sizes[oldest]

    def per_second(self, now: float) -> list[int]:
        """Bytes of each of the last 60 whole seconds, the oldest first; the second that runs is not among them."""
        end = math.floor(now)
        return [self._sizes.get(second, 0) for second in range(end - WINDOW_S, end)]

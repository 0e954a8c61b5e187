"""Time as an argument: deciders get a number, services get a `Clock`, tests get a hand-moved one."""

import time
from typing import Protocol


class Clock(Protocol):
    """Source of monotonic time in seconds. Never wall time: only durations cross the wire."""

    def now(self) -> float:
        """Seconds since an arbitrary start; never goes back. Any thread may call."""


class SystemClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that moves only when told to. For tests and simulations."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Move forward. Raises ValueError for a negative step: monotonic time never goes back."""
        if seconds < 0:
            raise ValueError(f"time cannot go back ({seconds} s)")
        self._now += seconds

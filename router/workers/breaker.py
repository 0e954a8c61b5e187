"""Whether a worker that keeps failing gets more requests. Pure: times (in seconds) and jitter are passed in.

    CLOSED      it gets what the policy gives it; `MAX_FAILURES` in a row open the breaker
    OPEN        it gets nothing that another worker can take, for a while that grows with each time it opens again
    HALF_OPEN   the while is over: one request goes there as a probe; its end closes the breaker or opens it again

A worker whose process is gone is detached at once, and one that is silent is found by its reports; this is for one that
reports well and fails what it is given. An open breaker never leaves a request without a worker: where all are open,
the policy takes one of them all the same.
"""

from enum import Enum

MAX_FAILURES = 3
"""In a row, without a request that ended well between them."""
FIRST_OPEN_S = 1.0
LONGEST_OPEN_S = 30.0


class BreakerState(Enum):
    """See above."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half open"


class Breaker:
    """Of one worker in one life of its process. Event-loop thread only."""

    def __init__(self) -> None:
        self._failures = 0
        self._times_opened = 0
        self._open_until: float | None = None  # None = closed.
        self._probes = 0

    def state(self, now: float) -> BreakerState:
        """What it lets through now."""
        if self._open_until is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self._open_until else BreakerState.HALF_OPEN

    def lets_through(self, now: float) -> bool:
        """Whether a request may go to the worker as to any other: as a probe, if no other one is on its way."""
        state = self.state(now)
        return state is BreakerState.CLOSED or (state is BreakerState.HALF_OPEN and not self._probes)

    def entered(self) -> bool:
        """A request goes to the worker; `left` follows. Whether it is a probe: the breaker is not closed."""
        is_probe = self._open_until is not None
        self._probes += is_probe
        return is_probe

    def left(self, was_probe: bool) -> None:
        """It is over, in whatever way."""
        self._probes -= was_probe

    def succeeded(self) -> None:
        """The worker did what it had to for one request."""
        self._failures = self._times_opened = 0
        self._open_until = None

    def failed(self, now: float, jitter: float) -> None:
        """The worker is to blame for a failure. `jitter`, 0 to 1, spreads the probes of several routers."""
        self._failures += 1
        is_probe = self.state(now) is BreakerState.HALF_OPEN
        if self.state(now) is BreakerState.OPEN or (not is_probe and self._failures < MAX_FAILURES):
            return
        open_s = min(LONGEST_OPEN_S, FIRST_OPEN_S * 2.0 ** min(self._times_opened, 16))
        self._times_opened += 1
        self._open_until = now + open_s * (0.75 + 0.5 * jitter)

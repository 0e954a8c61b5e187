"""Bounds on trying again: how often, how soon, and never as a storm."""

import random

from kvferry_rpc.common_pb2 import ErrorCode
from runtime.clock import Clock
from runtime.errors import KvferryError

MAX_ATTEMPTS = 3
"""In a row that fail without a token: an answer that got further starts to count anew."""
MAX_FAILURES = 8
"""Of one request in all. It may be the request that kills the workers."""
BUDGET_RATIO = 0.1
BUDGET_FLOOR_PER_S = 1.0
_FIRST_BACKOFF_S = 0.02
_LONGEST_BACKOFF_S = 1.0

# Another worker, or the same one a moment later, may do better. All else is the request's own fault, or a defect that
# would only be met again.
_RETRIABLE = frozenset({ErrorCode.UNAVAILABLE, ErrorCode.HANDOFF_FAILED})


class RetryBudget:
    """Retries are a tenth of the requests in the long run, and a few a second at any time.

    The bucket holds `capacity` and starts full, so that the loss of one worker with everything it was running is
    made good at once; only a cluster that keeps failing is left alone.
    """

    def __init__(self, capacity: int, clock: Clock) -> None:
        self._capacity = float(capacity)
        self._tokens = float(capacity)
        self._clock = clock
        self._refilled_at = clock.now()

    def deposit(self) -> None:
        """A request came: it pays for a tenth of a retry."""
        self._add(BUDGET_RATIO)

    def withdraw(self) -> bool:
        """Take one retry; False when there is none left."""
        now = self._clock.now()
        self._add((now - self._refilled_at) * BUDGET_FLOOR_PER_S)
        self._refilled_at = now
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True

    def _add(self, tokens: float) -> None:
        self._tokens = min(self._capacity, self._tokens + tokens)


def is_retriable(error: KvferryError) -> bool:
    """Whether the request may be tried again after this failure of a worker."""
    return error.code in _RETRIABLE


def backoff_s(failures: int, rng: random.Random) -> float:
    """How long to wait after that many failures (1 or more): growing, with full jitter above a half."""
    return min(_LONGEST_BACKOFF_S, _FIRST_BACKOFF_S * 2.0 ** (failures - 1)) * rng.uniform(0.5, 1.5)

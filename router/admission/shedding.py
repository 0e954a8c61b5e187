"""Who is refused at once, and when to come back: estimates from what was measured. Pure: time is passed in."""

import math
from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum

MIN_RETRY_AFTER_MS, MAX_RETRY_AFTER_MS = 1_000, 60_000
# A wait is called hopeless only when it is estimated at so many times the time that is left.
HOPELESS = 1.5
# An answer's length before any was seen, in tokens.
DEFAULT_OUTPUT_TOKENS = 256

_HALF_LIFE_S = 15.0
# Before so much was seen there is no rate: the first places that come free say little.
_MIN_SECONDS, _MIN_REQUESTS = 2.0, 4
_MAX_TENANTS = 1024
_MIN_ANSWERS = 8
_NEWEST_WEIGHT = 0.05


class ShedReason(Enum):
    """Why a request was refused although nothing is wrong with it."""

    QUEUE_FULL = "queue_full"
    QUEUE_TOKENS = "queue_tokens"
    TENANT_TOKENS = "tenant_tokens"
    DEADLINE = "deadline"
    TTFT = "ttft"
    NO_ROOM = "no_room"


class DrainRate:
    """How fast the queue empties: tokens of the requests that workers took, by the time in which somebody waited.

    Only such time counts: without a queue the rate is that of arrivals, and says nothing of what the cluster can do.
    What was seen loses half its weight in 15 s.
    """

    def __init__(self, now: float) -> None:
        self._at = now
        self._waiting_since: float | None = None
        self._tokens = 0.0
        self._requests = 0.0
        self._seconds = 0.0

    def queue_is(self, waiting: bool, now: float) -> None:
        """From `now` on somebody waits, or nobody."""
        self._advance(now)
        if not waiting:
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = now

    def served(self, tokens: int, now: float) -> None:
        """A worker took a request of so many tokens."""
        self._advance(now)
        if self._waiting_since is not None:
            self._tokens += tokens
            self._requests += 1

    def tokens_per_s(self, now: float) -> float | None:
        """None while too little was seen."""
        self._advance(now)
        if self._seconds < _MIN_SECONDS or self._requests < _MIN_REQUESTS:
            return None
        return self._tokens / self._seconds

    def wait_s(self, tokens_ahead: int, now: float) -> float | None:
        """How long until so many tokens have gone, in seconds. None when nothing is known, or nothing moves."""
        rate = self.tokens_per_s(now)
        return tokens_ahead / rate if rate else None

    def retry_after_ms(self, tokens_ahead: int, now: float) -> int:
        """When a retry is worth it: when what waits now will have gone. 1 s to 60 s.

        While the rate is not known it is assumed that it will take as long again as the queue stands already.
        """
        wait_s = self.wait_s(tokens_ahead, now)
        if wait_s is None:
            wait_s = now - self._waiting_since if self._waiting_since is not None else 0.0
        return min(MAX_RETRY_AFTER_MS, max(MIN_RETRY_AFTER_MS, math.ceil(wait_s * 1000)))

    def _advance(self, now: float) -> None:
        elapsed_s = max(0.0, now - self._at)
        self._at = max(self._at, now)
        if self._waiting_since is None or not elapsed_s:
            return
        kept = 0.5 ** (elapsed_s / _HALF_LIFE_S)
        self._tokens *= kept
        self._requests *= kept
        # What passed counts for the less the longer ago it is, as the tokens do.
        self._seconds = self._seconds * kept + (1 - kept) * _HALF_LIFE_S / math.log(2)


def is_hopeless(wait_s: float | None, remaining_s: float) -> bool:
    """Whether a request that must begin within `remaining_s` clearly cannot. An unknown wait is never hopeless."""
    return wait_s is not None and wait_s > HOPELESS * remaining_s


@dataclass(slots=True)
class _Lengths:
    count: int = 0
    mean: float = 0.0
    deviation: float = 0.0  # Mean distance from the mean.

    def note(self, num_tokens: int) -> None:
        self.count += 1
        weight = max(_NEWEST_WEIGHT, 1 / self.count)
        self.deviation += weight * (abs(num_tokens - self.mean) - self.deviation) if self.count > 1 else 0.0
        self.mean += weight * (num_tokens - self.mean)


class OutputLengths:
    """How long answers become: for each tenant, and over all where a tenant has too few. Bounded: the tenants seen
    last."""

    def __init__(self) -> None:
        self._all = _Lengths()
        self._tenants: OrderedDict[str, _Lengths] = OrderedDict()

    def note(self, tenant: str, num_tokens: int) -> None:
        """An answer was complete."""
        self._all.note(num_tokens)
        self._tenants.setdefault(tenant, _Lengths()).note(num_tokens)
        self._tenants.move_to_end(tenant)
        if len(self._tenants) > _MAX_TENANTS:
            self._tenants.popitem(last=False)

    def expect(self, tenant: str, most: int) -> int:
        """Tokens that an answer will probably not exceed, `most` at most: the running mean and the mean distance
        from it, about the upper fifth of what comes."""
        lengths = self._tenants.get(tenant)
        if lengths is None or lengths.count < _MIN_ANSWERS:
            lengths = self._all
        if lengths.count < _MIN_ANSWERS:
            return min(most, DEFAULT_OUTPUT_TOKENS)
        return max(1, min(most, math.ceil(lengths.mean + lengths.deviation)))

"""When the Python client asks again, and whom: decisions only, no waiting and no network.

A call is tried again only where that cannot change anything: the router or its workers were not there (UNAVAILABLE) or
had no room (OVERLOADED), and no part of an answer has come. Everything else is the caller's to judge.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from kvferry_rpc.common_pb2 import ErrorCode
from runtime.clock import Clock, SystemClock
from runtime.errors import KvferryError

_SAFE: Final = frozenset({ErrorCode.UNAVAILABLE, ErrorCode.OVERLOADED})


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """At most `max_tries` of one call (but each address once, unless that is 1), all within the call's timeout.

    Waits grow from `first_wait_s` to `longest_wait_s`, each drawn between 0 and that, and come on top of what the
    router asks for (`retry_after_ms`). Another router is asked at once where one does not answer.
    """

    max_tries: int = 4
    first_wait_s: float = 0.1
    longest_wait_s: float = 5.0
    clock: Clock = field(default_factory=SystemClock)
    rng: random.Random = field(default_factory=random.Random)


ONE_TRY: Final = RetryPolicy(max_tries=1)


class Route:
    """The routers that a client knows, side by side, and which of them it asks. Threads may share it: at worst two of
    them move on at the same time."""

    def __init__(self, addresses: str | Sequence[str], policy: RetryPolicy) -> None:
        """Raises ValueError when there is no address."""
        self.addresses = (addresses,) if isinstance(addresses, str) else tuple(addresses)
        if not self.addresses:
            raise ValueError("a client needs the address of a router")
        self.policy = policy
        self.index = 0

    @property
    def address(self) -> str:
        """Of the router that is asked next."""
        return self.addresses[self.index]

    def begin(self, timeout_s: float) -> "Attempts":
        """A call begins, which may take so long with all its tries."""
        return Attempts(self, self.policy.clock.now() + timeout_s)

    def leave(self, index: int) -> None:
        """The router of this index does not answer: ask the next one from now on."""
        if self.index == index:
            self.index = (index + 1) % len(self.addresses)


class Attempts:
    """The tries of one call."""

    def __init__(self, route: Route, deadline: float) -> None:
        """`deadline` is on the clock of the route's policy."""
        self._route = route
        self._deadline = deadline
        self._failures = 0
        self._unavailable = 0
        self._waits = 0

    @property
    def remaining_s(self) -> float:
        """What is left of the call's time; never below 0."""
        return max(0.0, self._deadline - self._route.policy.clock.now())

    def wait_after(self, failure: KvferryError, index: int) -> float:
        """How long to wait before the next try, in seconds, after the router of this index gave this failure. Raises
        `failure` when there is no next one."""
        self._failures += 1
        if failure.code not in _SAFE or self._failures >= self._max_tries():
            raise failure
        wait_s = self._wait_s(failure, index)
        if wait_s >= self.remaining_s:
            raise failure
        return wait_s

    def _max_tries(self) -> int:
        max_tries = self._route.policy.max_tries
        return max_tries if max_tries <= 1 else max(max_tries, len(self._route.addresses))

    def _wait_s(self, failure: KvferryError, index: int) -> float:
        policy, num_addresses = self._route.policy, len(self._route.addresses)
        if failure.code == ErrorCode.UNAVAILABLE:
            self._route.leave(index)
            self._unavailable += 1
            if self._unavailable % num_addresses:
                return 0.0  # Another one has not been asked yet.
        longest_s = min(policy.longest_wait_s, policy.first_wait_s * 2.0**self._waits)
        self._waits += 1
        return failure.retry_after_ms / 1000 + policy.rng.uniform(0.0, longest_s)

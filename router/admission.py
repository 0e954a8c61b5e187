"""Two bounded queues before the workers: for a place in this router, and for room on a worker that said it is full.

Both are first come, first served, and a request whose caller is gone leaves them at once, so nobody ever works
through a queue of dead requests. Event-loop thread only.
"""

import asyncio
import bisect
import itertools
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from kvferry_rpc.common_pb2 import ErrorCode
from runtime.errors import KvferryError

RETRY_AFTER_MS = 1000


class Admission:
    """At most `max_in_flight` requests run; at most `max_queued` more, of `max_queued_tokens` in all, wait."""

    def __init__(self, max_in_flight: int, max_queued: int, max_queued_tokens: int) -> None:
        self._max_in_flight = max_in_flight
        self._max_queued = max_queued
        self._max_queued_tokens = max_queued_tokens
        self._in_flight = 0
        self._queued_tokens = 0
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def in_flight(self) -> int:
        """Requests that hold a place."""
        return self._in_flight

    @property
    def queued(self) -> int:
        """Requests that wait for a place."""
        return len(self._waiters)

    @asynccontextmanager
    async def place(self, num_tokens: int, timeout_s: float) -> AsyncIterator[None]:
        """Hold a place for the length of the block, after waiting for one if need be.

        Raises KvferryError: OVERLOADED at once when the queue is full, DEADLINE_EXCEEDED after `timeout_s`.
        """
        if self._in_flight < self._max_in_flight:
            self._take()
        else:
            await self._wait(num_tokens, timeout_s)
        try:
            yield
        finally:
            self._leave()

    async def wait_idle(self) -> None:
        """Return when no request runs or waits. The caller sets the deadline."""
        await self._idle.wait()

    async def _wait(self, num_tokens: int, timeout_s: float) -> None:
        too_many = len(self._waiters) >= self._max_queued
        if too_many or self._queued_tokens + num_tokens > self._max_queued_tokens:
            raise KvferryError(
                ErrorCode.OVERLOADED,
                f"{self._in_flight} requests run and {len(self._waiters)} wait, which is the limit",
                retry_after_ms=RETRY_AFTER_MS,
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(turn)
        self._queued_tokens += num_tokens
        try:
            async with asyncio.timeout(timeout_s):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self._leave()  # The place came in the same moment: it goes to the next.
            elif turn in self._waiters:
                self._waiters.remove(turn)
            if isinstance(error, TimeoutError):
                raise KvferryError(ErrorCode.DEADLINE_EXCEEDED, "the deadline passed in the queue") from None
            raise
        finally:
            self._queued_tokens -= num_tokens

    def _take(self) -> None:
        self._in_flight += 1
        self._idle.clear()

    def _leave(self) -> None:
        """Give the place to the next in the queue, or free it."""
        while self._waiters:
            turn = self._waiters.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._in_flight -= 1
        if self._in_flight == 0:
            self._idle.set()


class RoomQueue:
    """Requests that no worker has room for. Each sign of room (a request left a worker, a load report) wakes one.

    Whoever is woken tries; if that worked, it calls `wake` for the next, if not it queues again. The queue is ordered
    by arrival at the router, so nobody loses a turn by trying. So a full cluster sees one probe at a time, not all
    waiting requests at once.
    """

    def __init__(self) -> None:
        self._waiters: list[_Waiter] = []
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._waiters)

    async def wait(self, timeout_s: float, arrived_at: float) -> bool:
        """Wait to be woken. False when `timeout_s` passed instead. It is queued before the first suspension."""
        waiter = _Waiter(arrived_at, next(self._numbers), asyncio.get_running_loop().create_future())
        bisect.insort(self._waiters, waiter)
        try:
            async with asyncio.timeout(timeout_s):
                await waiter.turn
        except BaseException as error:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            elif not waiter.turn.cancelled():
                self.wake()  # The turn came too late for this request: it goes to the next.
            if isinstance(error, TimeoutError):
                return False
            raise
        return True

    def wake(self) -> None:
        """Let the first in the queue try."""
        while self._waiters:
            turn = self._waiters.pop(0).turn
            if not turn.done():
                turn.set_result(None)
                return

    def wake_all(self) -> None:
        """Let all try: a worker is gone, and some may have nobody left to wait for."""
        while self._waiters:
            self.wake()


@dataclass(frozen=True, slots=True, order=True)
class _Waiter:
    arrived_at: float
    number: int
    turn: asyncio.Future[None] = field(compare=False)

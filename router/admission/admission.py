"""Who may try now: places among the requests that run, and one fair queue of those that wait.

Life of a request here, a `Seat`:
1. It enters the queue (`fair_queue.py`). If it is its turn, a place is free and a worker will probably hold it, it is
   let through in the same call and waits for nothing.
2. Otherwise the bounds of the queue are checked, and whether it could begin in time (`shedding.py`): refused at once,
   with a time to come back, or it waits for its turn.
3. Let through, it holds a place, finds a worker and tells what came of it: `taken`, or `wait_for_room`. A request that
   has nothing yet gives its place back and has its old turn in the queue again; one in the middle of its answer keeps
   its place and is first at the next sign of room.
4. Its end, however it ends, frees the place and lets the next one through: one release path, `_leave`.

A worker that refuses although room was forecast makes the cluster *full*: from then on each sign of room (a request
left, a load report, a request was taken) lets one request through, so a full cluster sees one probe at a time. That
ends when nobody waits any more. When nothing runs, the first in the queue is let through whatever the forecast says.

A request whose caller is gone leaves the queue at once, so nobody ever works through a queue of dead requests.
Event-loop thread only.
"""

import asyncio
import bisect
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from kvferry_rpc.common_pb2 import ErrorCode
from router.admission.fair_queue import FairQueue, QueueBounds, TenantShares, Waiting, equal_shares
from router.admission.kv_ledger import Expectation
from router.admission.shedding import DrainRate, ShedReason, is_hopeless
from router.admission.slo import NO_CLASS, SloClass
from runtime.clock import Clock
from runtime.errors import KvferryError


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """At most `max_in_flight` requests hold a place; at most `max_queued` more, of `max_queued_tokens` in all (prompt
    and expected answer), wait. `max_room_wait_s`: how long one may wait when all that lacks is room on a worker."""

    max_in_flight: int
    max_queued: int
    max_queued_tokens: int
    max_room_wait_s: float = 120.0
    share_of: TenantShares = equal_shares


@dataclass(frozen=True, slots=True)
class Entry:
    """A request as it comes to the queue. `deadline` is on the router's clock; `arrived_at` orders those that are in
    the middle of their answers."""

    tenant: str
    priority: int
    deadline: float
    arrived_at: float
    expectation: Expectation
    slo: SloClass | None = None
    request_id: str = ""


@dataclass(slots=True, eq=False)
class Seat:
    """One request from its entry to its end. Made by `Admission.seat`."""

    entry: Entry
    waiting: Waiting
    has_place: bool = False
    was_taken: bool = False
    turn: asyncio.Future[None] | None = field(default=None, repr=False)
    room_wait_since: float | None = None


class Rooms(Protocol):
    """Which worker will probably hold a request. `placing.py` has the real one."""

    def reserve(self, expectation: Expectation) -> bool:
        """Whether one will; if so the request counts there from now on."""

    def release(self, expectation: Expectation, *, was_taken: bool) -> None:
        """It counts nowhere any more. Idempotent."""


class Admission:
    """Places and the queue before them. Event-loop thread only."""

    def __init__(
        self,
        limits: AdmissionLimits,
        rooms: Rooms,
        clock: Clock,
        on_shed: Callable[[ShedReason, str], None] = lambda reason, slo: None,
    ) -> None:
        """`on_shed` is told of each request refused here: why, and the name of its class."""
        self._limits = limits
        self._rooms = rooms
        self._clock = clock
        self._on_shed = on_shed
        self._queue = FairQueue(QueueBounds(limits.max_queued, limits.max_queued_tokens), limits.share_of)
        self._seats: dict[Waiting, Seat] = {}  # In the queue.
        self._resuming: list[Seat] = []  # In the middle of their answers, without a worker; they hold places.
        self._in_flight = 0
        self._full = False
        self._missed_sign = False  # A request left when nobody waited, and nobody was let through since.
        self._drain = DrainRate(clock.now())
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def in_flight(self) -> int:
        """Requests that hold a place."""
        return self._in_flight

    @property
    def queued(self) -> int:
        """Requests that wait for a place."""
        return len(self._queue)

    @property
    def resuming(self) -> int:
        """Of those that hold a place, the ones that wait for room to go on."""
        return len(self._resuming)

    @property
    def queued_tokens(self) -> int:
        """Tokens of the requests that wait for a place: prompts and expected answers."""
        return self._queue.tokens

    def depths(self) -> Counter[str]:
        """Requests that wait for a place, by the name of their class."""
        return Counter(_class_name(seat.entry) for seat in self._seats.values())

    def ahead(self) -> dict[str, int]:
        """How many requests are before each one that waits for a place, by its id; tenants' shares may change that."""
        in_order = sorted(self._seats.values(), key=lambda seat: seat.waiting.key)
        return {seat.entry.request_id: number for number, seat in enumerate(in_order)}

    def retry_after_ms(self) -> int:
        """When a request that is refused now had best come back."""
        return self._drain.retry_after_ms(self._queue.tokens, self._clock.now())

    @asynccontextmanager
    async def seat(self, entry: Entry) -> AsyncIterator[Seat]:
        """Hold a place for the length of the block, after waiting for it if need be.

        Raises KvferryError: OVERLOADED at once when the queue is full or the request clearly cannot begin in time;
        OVERLOADED or DEADLINE_EXCEEDED when it waited too long; what `fail_waiting` was given.
        """
        seat = self._enter(entry)
        try:
            await self._wait_turn(seat)
            yield seat
        finally:
            self._leave(seat)

    def taken(self, seat: Seat) -> None:
        """A worker took the request: there may be room for another."""
        seat.room_wait_since = None
        if not seat.was_taken:
            seat.was_taken = True
            self._drain.served(seat.waiting.cost, self._clock.now())
        self._let_through(sign_of_room=True)

    async def wait_for_room(self, seat: Seat, *, begun: bool) -> None:
        """No worker has room for the request: wait for its next turn. `begun`: its caller has a part of the answer.

        Raises KvferryError as `seat` does.
        """
        self._full = True
        self._rooms.release(seat.entry.expectation, was_taken=False)
        seat.room_wait_since = seat.room_wait_since or self._clock.now()
        if begun:
            bisect.insort(self._resuming, seat, key=_by_arrival)
            seat.turn = asyncio.get_running_loop().create_future()
        else:
            self._in_flight -= 1
            seat.has_place = False
            self._queue.put_back(seat.waiting)
            self._line_up(seat)
        if self._missed_sign:
            # It left between the worker's refusal and this line, and may have been the last to leave for long.
            self._let_through(sign_of_room=True)
        await self._wait_turn(seat)

    def room_changed(self) -> None:
        """A sign of room: let a request through, or all that will fit while the cluster is not full."""
        if self._seats or self._resuming:
            self._let_through(sign_of_room=True)

    def fail_waiting(self, error: Callable[[], KvferryError]) -> None:
        """Nobody is left to wait for: all that wait are told so. Those in the middle of their answers try once more,
        since they know best what went before."""
        for seat in list(self._seats.values()):
            if seat.turn is not None and not seat.turn.done():
                seat.turn.set_exception(error())
        for seat in self._resuming:
            _wake(seat)
        self._resuming.clear()

    async def wait_idle(self) -> None:
        """Return when no request runs or waits. The caller sets the deadline."""
        await self._idle.wait()

    # ---- inside ----

    def _enter(self, entry: Entry) -> Seat:
        self._idle.clear()
        expectation = entry.expectation
        cost = expectation.num_tokens + expectation.remaining
        seat = Seat(entry, self._queue.push(entry.tenant, entry.priority, cost))
        self._seats[seat.waiting] = seat
        self._let_through()
        if not seat.has_place:
            try:
                self._check_queue(seat)
            except KvferryError:
                self._leave(seat)
                raise
            self._line_up(seat)
        return seat

    def _check_queue(self, seat: Seat) -> None:
        """Refuse a request that would have to wait, and should not. Raises KvferryError (OVERLOADED)."""
        now = self._clock.now()
        if (excess := self._queue.excess(seat.waiting)) is not None:
            message = f"{self._in_flight} requests run and {len(self._queue) - 1} wait, which is the limit"
            raise self._shed(seat, ShedReason(excess.value), message, self._queue.tokens)
        ahead = self._queue.tokens_ahead(seat.waiting)
        wait_s = self._drain.wait_s(ahead, now)
        slo = seat.entry.slo
        if is_hopeless(wait_s, seat.entry.deadline - now):
            raise self._shed(seat, ShedReason.DEADLINE, "the queue is longer than the deadline allows", ahead)
        if slo is not None and slo.sheds_by_ttft and is_hopeless(wait_s, slo.ttft_s):
            message = f"the queue is longer than class {slo.name} allows ({slo.ttft_s:g} s to the first token)"
            raise self._shed(seat, ShedReason.TTFT, message, ahead)

    def _shed(self, seat: Seat, reason: ShedReason, message: str, tokens_ahead: int) -> KvferryError:
        self._on_shed(reason, _class_name(seat.entry))
        retry_after_ms = self._drain.retry_after_ms(tokens_ahead, self._clock.now())
        return KvferryError(ErrorCode.OVERLOADED, message, retry_after_ms=retry_after_ms)

    def _line_up(self, seat: Seat) -> None:
        """It is in the queue and will be woken."""
        now = self._clock.now()
        self._seats[seat.waiting] = seat
        seat.turn = asyncio.get_running_loop().create_future()
        if seat.room_wait_since is None and self._in_flight < self._limits.max_in_flight:
            seat.room_wait_since = now
        self._drain.queue_is(True, now)

    async def _wait_turn(self, seat: Seat) -> None:
        """Wait until it is let through. Raises KvferryError."""
        turn = seat.turn
        if turn is None:
            return
        entry, now = seat.entry, self._clock.now()
        patience_s = entry.deadline - now
        if seat.room_wait_since is not None:
            patience_s = min(patience_s, seat.room_wait_since + self._limits.max_room_wait_s - now)
        try:
            async with asyncio.timeout(patience_s):
                await turn
        except TimeoutError:
            if entry.deadline <= self._clock.now():
                raise KvferryError(ErrorCode.DEADLINE_EXCEEDED, "the deadline passed in the queue") from None
            message = f"no worker had room for {self._limits.max_room_wait_s:g} s"
            raise self._shed(seat, ShedReason.NO_ROOM, message, self._queue.tokens) from None
        finally:
            seat.turn = None

    def _let_through(self, *, sign_of_room: bool = False) -> None:
        """Let through whoever may try now: one, on a sign of room, while the cluster is full."""
        while self._resuming or self._seats:
            if self._full and not sign_of_room:
                break
            sign_of_room = False
            if self._resuming:
                self._missed_sign = False
                _wake(self._resuming.pop(0))
                continue
            if self._in_flight >= self._limits.max_in_flight:
                break
            waiting = self._queue.pop(self._may_go)
            if waiting is None:
                break
            seat = self._seats.pop(waiting)
            seat.has_place = True
            self._missed_sign = False
            self._in_flight += 1
            _wake(seat)
        self._note_queue()

    def _may_go(self, waiting: Waiting) -> bool:
        return self._rooms.reserve(self._seats[waiting].entry.expectation) or not self._in_flight

    def _leave(self, seat: Seat) -> None:
        """The one way out."""
        self._rooms.release(seat.entry.expectation, was_taken=seat.was_taken)
        if seat.has_place:
            self._in_flight -= 1
            self._queue.finished(seat.waiting)
            if seat in self._resuming:
                self._resuming.remove(seat)
        else:
            self._queue.remove(seat.waiting)
            self._seats.pop(seat.waiting, None)
        # A place that comes free is a sign of room; so is a turn that came to one who was leaving.
        self._missed_sign = self._missed_sign or seat.has_place
        self._let_through(sign_of_room=seat.has_place)
        if not self._in_flight and not self._seats:
            self._idle.set()

    def _note_queue(self) -> None:
        if not self._seats:
            self._drain.queue_is(False, self._clock.now())
            self._full = self._full and bool(self._resuming)


def _wake(seat: Seat) -> None:
    if seat.turn is not None and not seat.turn.done():
        seat.turn.set_result(None)


def _by_arrival(seat: Seat) -> tuple[float, tuple[int, int]]:
    return seat.entry.arrived_at, seat.waiting.key


def _class_name(entry: Entry) -> str:
    return entry.slo.name if entry.slo is not None else NO_CLASS

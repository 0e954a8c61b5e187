"""The admission of a router, by itself, with rooms that are told how much they hold."""

import asyncio
from typing import Any

from router.admission.admission import Admission, AdmissionLimits, Entry, Seat
from router.admission.kv_ledger import Expectation
from runtime.clock import ManualClock


class Rooms:
    """Workers that hold `room` requests; None = any number."""

    def __init__(self, room: int | None = None) -> None:
        self.room = room
        self.inside: set[Expectation] = set()

    def reserve(self, expectation: Expectation) -> bool:
        if self.room is not None and len(self.inside) >= self.room:
            return False
        self.inside.add(expectation)
        return True

    def release(self, expectation: Expectation, *, was_taken: bool) -> None:
        self.inside.discard(expectation)


class Desk:
    """An admission, and requests that take a place under a name."""

    def __init__(self, rooms: Rooms | None = None, **limits: Any) -> None:
        self.clock = ManualClock(100.0)
        self.rooms = rooms or Rooms()
        self.shed: list[tuple[str, str]] = []
        bounds = {"max_in_flight": 2, "max_queued": 100, "max_queued_tokens": 100_000, **limits}
        self.admission = Admission(
            AdmissionLimits(**bounds), self.rooms, self.clock, lambda why, slo: self.shed.append((why.value, slo))
        )
        self.order: list[str] = []
        self.seats: dict[str, Seat] = {}
        self.release: dict[str, asyncio.Event] = {}

    def entry(
        self, tenant: str = "", priority: int = 0, tokens: int = 10, timeout_s: float = 60.0, **more: Any
    ) -> Entry:
        expectation = Expectation(tokens, 0, 100, lambda worker_id: 0)
        now = self.clock.now()
        return Entry(tenant, priority, now + timeout_s, now, expectation, **more)

    def come(self, name: str, **entry: Any) -> asyncio.Task[None]:
        """A request comes, holds its place once it has one, until it is released."""
        self.release[name] = asyncio.Event()
        return asyncio.create_task(self._hold(name, self.entry(**entry)))

    async def _hold(self, name: str, entry: Entry) -> None:
        async with self.admission.seat(entry) as seat:
            self.order.append(name)
            self.seats[name] = seat
            self.admission.taken(seat)
            await self.release[name].wait()

    async def end(self, *names: str) -> None:
        for name in names:
            self.release[name].set()
        await settle()

    def at_rest(self) -> bool:
        counts = (
            self.admission.in_flight,
            self.admission.queued,
            self.admission.queued_tokens,
            self.admission.resuming,
        )
        return counts == (0, 0, 0, 0) and not self.rooms.inside


async def settle() -> None:
    """Let what can run, run."""
    for _ in range(8):
        await asyncio.sleep(0)

"""Changing the workers of a running cluster without cutting a stream.

    add      the launcher starts a process; it is up when every router knows it
    replace  add, then remove the worker that it stands in for
    remove   a router drains the worker; once it holds nothing of any request, the launcher ends its process
    flip     a router tells the worker to take the other role: it drains, and attaches again, the same process
    scale    flips where one role has too many and the other too few, then adds, then removes

A drain has no time limit of its own here: each request has a deadline, and running answers move to other decode workers
with their KV. A worker that is not free after `patience_s` is told to take work again, and the change has failed.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field

from kvferry.launchers.launcher import Launcher
from kvferry.scaling.fleet_admin import FleetAdmin
from kvferry.scaling.fleet_view import ROLES, FleetView, WorkerFacts
from kvferry_rpc.common_pb2 import ErrorCode
from runtime.clock import Clock, SystemClock
from runtime.errors import KvferryError
from runtime.role_file import Role

DRAIN_PATIENCE_S = 900.0
_ATTACH_PATIENCE_S = 30.0
# Workers report four times a second: what is seen so long after an order is from after it.
_POLL_S = 0.3


@dataclass(slots=True)
class Changes:
    """What `scale` did, by worker."""

    flipped: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)


class Fleet:
    """The workers of one cluster. Event-loop thread only; one change at a time, others wait for their turn."""

    def __init__(
        self,
        launcher: Launcher,
        admin: FleetAdmin,
        say: Callable[[str], None] = lambda text: None,
        *,
        clock: Clock | None = None,
        patience_s: float = DRAIN_PATIENCE_S,
    ) -> None:
        """`say` is told of each step, in words for a person."""
        self._launcher = launcher
        self._admin = admin
        self._say = say
        self._clock = clock or SystemClock()
        self._patience_s = patience_s
        self._turn = asyncio.Lock()

    @property
    def is_changing(self) -> bool:
        """Whether a change is under way."""
        return self._turn.locked()

    async def view(self) -> FleetView:
        """What the routers know. Raises KvferryError when none answers."""
        return await self._admin.view()

    def names(self) -> tuple[str, ...]:
        """The workers that the launcher keeps running, attached or not."""
        return tuple(worker.name for worker in self._launcher.workers())

    async def add(self, role: Role) -> str:
        """Start one more worker; its name, once it is ready. Raises LaunchError."""
        async with self._turn:
            return await self._add(role)

    async def remove(self, name: str, *, force: bool = False) -> None:
        """Drain this worker and end its process. `force`: even the last one of its role.

        Raises KvferryError (INVALID_REQUEST for a worker that is unknown or cannot be spared, DEADLINE_EXCEEDED when it
        did not become free: it takes work again).
        """
        async with self._turn:
            await self._remove(name, force)

    async def flip(self, name: str, role: Role, *, force: bool = False) -> None:
        """Let this worker take the other role, and wait until it has. Raises KvferryError as `remove`; UNAVAILABLE when
        it kept its role."""
        async with self._turn:
            await self._flip(name, role, force)

    async def replace(self, name: str) -> str:
        """Start a worker of this one's role, and then remove this one; the name of the new one. Raises as `add` and
        `remove`."""
        async with self._turn:
            worker = (await self._admin.view()).get(name)
            process = next((one for one in self._launcher.workers() if one.name == name), None)
            if process is None:
                raise KvferryError(
                    ErrorCode.INVALID_REQUEST, f"{name} is none of this launcher's workers", field="worker"
                )
            added = await self._add(worker.role if worker is not None else process.role)
            await self._remove(name, force=False)
        return added

    async def replace_all(self) -> dict[str, str]:
        """Replace every worker that there is now, one after the other; the new names by the old. Raises as `replace`:
        those that were replaced by then stay so."""
        return {name: await self.replace(name) for name in self.names()}

    async def replace_router(self, replace: Callable[[], Awaitable[None]]) -> None:
        """Have the launcher replace its router, by `replace`, and follow to the new one. Raises as that does."""
        async with self._turn:
            self._say("starting another router beside the one there is")
            await replace()
            await self._admin.follow(self._launcher.internal_addresses)
            self._say("the router is replaced")

    async def scale(self, prefill: int | None, decode: int | None) -> Changes:
        """Have so many workers of each role; None: as many as there are.

        Raises as the other methods, and ValueError for numbers that cannot be.
        """
        if (decode is not None and decode < 1) or (prefill is not None and prefill < 0):
            raise ValueError("a cluster needs --decode 1 or more and --prefill 0 or more")
        changes = Changes()
        async with self._turn:
            view = await self._admin.view()
            wanted: dict[Role, int] = {
                "prefill": len(self._of("prefill", view)) if prefill is None else prefill,
                "decode": len(self._of("decode", view)) if decode is None else decode,
            }
            await self._flip_surplus(wanted, changes)
            for role in ROLES:
                for _ in range(wanted[role] - len(self._of(role, await self._admin.view()))):
                    changes.added.append(await self._add(role))
            for role in ROLES:
                surplus = len(self._of(role, await self._admin.view())) - wanted[role]
                for _ in range(surplus):
                    name = self._least_loaded(role, await self._admin.view())
                    await self._remove(name, force=wanted[role] == 0)
                    changes.removed.append(name)
        return changes

    # ---- one change ----

    async def _flip_surplus(self, wanted: dict[Role, int], changes: Changes) -> None:
        """Flip workers for as long as one role has too many and the other too few."""
        while True:
            view = await self._admin.view()
            missing = {role: wanted[role] - len(self._of(role, view)) for role in ROLES}
            giver = next((role for role in ROLES if missing[role] < 0), None)
            taker = next((role for role in ROLES if missing[role] > 0), None)
            if giver is None or taker is None:
                return
            name = self._least_loaded(giver, view)
            await self._flip(name, taker, force=wanted[giver] == 0)
            changes.flipped.append(name)

    async def _add(self, role: Role) -> str:
        self._say(f"starting one more {role} worker")
        name = await self._launcher.add(role)
        await self._until(name, lambda worker: worker is not None and worker.is_ready, _ATTACH_PATIENCE_S)
        self._say(f"{name} is ready")
        return name

    async def _remove(self, name: str, force: bool) -> None:
        if name not in self.names():
            raise KvferryError(ErrorCode.INVALID_REQUEST, f"{name} is none of this launcher's workers", field="worker")
        # One that is not attached has no requests: it may be starting again just now.
        if (await self._admin.view()).get(name) is not None:
            self._say(f"draining {name}")
            await self._admin.drain(name, force=force)
            await self._until_given_up(name, lambda worker: worker is None or worker.is_at_rest)
        self._say(f"ending {name}")
        await self._launcher.remove(name)
        await self._until(name, lambda worker: worker is None, _ATTACH_PATIENCE_S)

    async def _flip(self, name: str, role: Role, force: bool) -> None:
        before = (await self._admin.view()).get(name)
        if before is None:
            raise KvferryError(ErrorCode.INVALID_REQUEST, f"{name} is not attached", field="worker")
        if before.role == role:
            return
        self._say(f"{name} drains, to become a {role} worker")
        await self._admin.set_role(name, role, force=force)
        # Over when it is there in another life; or takes work again in this one, and so could not be had.
        after = await self._until_given_up(
            name,
            lambda worker: (
                worker is not None
                and worker.is_ready
                and (worker.role == role or worker.incarnation == before.incarnation)
            ),
        )
        if after is None or after.role != role:
            raise KvferryError(ErrorCode.UNAVAILABLE, f"{name} could not become free, and keeps its role")
        self._say(f"{name} is a {role} worker now")

    async def _until_given_up(self, name: str, condition: Callable[[WorkerFacts | None], bool]) -> WorkerFacts | None:
        """`_until`, at the end of which a worker that was asked to drain is asked to take work again."""
        try:
            return await self._until(name, condition, self._patience_s)
        except (KvferryError, asyncio.CancelledError):
            with suppress(KvferryError):
                await asyncio.shield(self._admin.drain(name, over=True))
            raise

    async def _until(
        self, name: str, condition: Callable[[WorkerFacts | None], bool], patience_s: float
    ) -> WorkerFacts | None:
        """Look at a worker until this holds of it, None = it is not attached. Raises KvferryError (DEADLINE_EXCEEDED).

        A router that is away, or knows a part only, is asked again.
        """
        deadline = self._clock.now() + patience_s
        while self._clock.now() < deadline:
            await asyncio.sleep(_POLL_S)
            try:
                view = await self._admin.view()
            except KvferryError:
                view = None
            if view is not None and view.is_complete and condition(worker := view.get(name)):
                return worker
        raise KvferryError(ErrorCode.DEADLINE_EXCEEDED, f"{name} was not as far within {patience_s:g} s")

    # ---- whose role is what ----

    def _of(self, role: Role, view: FleetView) -> list[str]:
        """The launcher's workers that have this role now; of those not attached, that they are started in."""
        names = []
        for process in self._launcher.workers():
            worker = view.get(process.name)
            if (worker.role if worker is not None else process.role) == role:
                names.append(process.name)
        return names

    def _least_loaded(self, role: Role, view: FleetView) -> str:
        """Of these, one that is not attached, or has the least to finish; of equal ones the newest."""
        names = self._of(role, view)
        loads = {name: worker.load_key[:2] if (worker := view.get(name)) else (-1, 0) for name in names}
        return min(reversed(names), key=lambda name: loads[name])

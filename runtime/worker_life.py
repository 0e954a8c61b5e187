"""One life of a worker in one role, from its first step to the last word on its streams.

1. The engine's thread starts, the gRPC server listens, membership dials the routers; once all have accepted, its health
   says SERVING and the ready line of the process is written.
2. A router's Drain: all routers are told, new work is refused, what runs goes on; until the drain is over again.
3. A router's SetRole: as a drain. Once nothing runs and no block is held any more, this life ends, for one in the other
   role. It waits as long as that takes: each request has a deadline of its own, so no stream is ever cut for it.
4. SIGTERM: as a drain, but what has not finished within the drain timeout is cut off. A dead engine thread ends the
   life at once.

Failure exits: blocks that stay held when nothing runs any more (a peer that is stopped may still write to them): the
worker stays what it is. A pool that somebody may still write to when the life ends: there must be no other one on it.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol

import grpc

from kvferry_rpc.internal_pb2 import LoadReport, Register, Role, RouterMessage
from runtime.grpc_life import GrpcServer
from runtime.in_flight import InFlight
from runtime.kv_event_log import KVEventLog
from runtime.membership import MembershipClient
from runtime.process import write_ready_line
from runtime.router_names import parse_routers
from runtime.tls import ChannelTls

if TYPE_CHECKING:
    from runtime.worker_host import HostOptions

ROLES = {Role.PREFILL: "prefill", Role.DECODE: "decode"}
STOP_GRACE_S = 1.0
CLOSE_TIMEOUT_S = 10.0

# An engine takes a snapshot of itself at least this often, so that what is seen then is from after the last request.
_SNAPSHOT_S = 0.3
_LOOKS_FOR_REST = 200

_log = logging.getLogger(__name__)


class HostedWorker(Protocol):
    """What a role gives to its host. All methods are called on the event loop and must not block, `close` apart."""

    @property
    def in_flight(self) -> InFlight:
        """Requests that draining must wait for."""
        ...

    @property
    def is_at_rest(self) -> bool:
        """Whether, in the last snapshot, no sequence was known and no block held or in quarantine."""
        ...

    @property
    def kv_events(self) -> KVEventLog:
        """Changes of the prefix cache."""
        ...

    @property
    def transports(self) -> tuple[str, ...]:
        """KV transports on offer, best first."""
        ...

    @property
    def num_blocks(self) -> int:
        """Size of the pool."""
        ...

    def add_services(self, server: GrpcServer) -> None:
        """Offer the role's gRPC service."""
        ...

    def start(self, on_fatal: Callable[[], None]) -> None:
        """Start the engine thread. `on_fatal` is called, by any thread, if that thread dies."""
        ...

    def describe(self, address: str) -> Register:
        """The registration of this worker, reachable at `address`."""
        ...

    def load_report(self) -> LoadReport:
        """What the worker does now, from snapshots only."""
        ...

    def set_draining(self, draining: bool) -> None:
        """Refuse new requests from now on, or take them again. Idempotent."""
        ...

    def end_drain(self) -> None:
        """No request runs any more, or none may: end the streams that outlast requests, behind their last messages."""
        ...

    def close(self, timeout_s: float) -> bool:
        """Stop threads and links, those of the role. Blocks; called in a thread, last. Returns whether nobody can touch
        the pool any more, here or elsewhere."""
        ...


@dataclass(frozen=True, slots=True)
class Access:
    """How the processes of a cluster know each other."""

    secret: bytes
    tls: ChannelTls | None
    credentials: grpc.ServerCredentials | None


class LifeEnd(Enum):
    """How a life ended. OTHER_ROLE: the process goes on, in the role that is not this one."""

    STOPPED = "stopped"
    OTHER_ROLE = "other role"
    FAILED = "failed"


class WorkerLife:
    """Event-loop thread only."""

    def __init__(
        self, options: "HostOptions", role: str, worker: HostedWorker, access: Access, shutdown: asyncio.Event
    ) -> None:
        """`shutdown`: set when the process is to end."""
        self._options = options
        self._role = role
        self._worker = worker
        self._access = access
        self._shutdown = shutdown
        self._news = asyncio.Event()
        self._is_dead = False
        self._drain_ordered = False
        self._is_switching = False  # A router wants the other role.
        self._draining = False
        self._resting: asyncio.Task[bool] | None = None

    async def run(self, *, first: bool) -> LifeEnd:
        """Live. `first`: of this process, which says on standard output that it is ready. Raises OSError when the
        address cannot be had."""
        loop = asyncio.get_running_loop()
        worker, options, access = self._worker, self._options, self._access

        def on_fatal() -> None:
            loop.call_soon_threadsafe(self._die)

        worker.start(on_fatal)
        server = GrpcServer(options.host, options.port, secret=access.secret, credentials=access.credentials)
        worker.add_services(server)
        await server.start()
        membership = MembershipClient(
            parse_routers(options.routers),
            access.secret,
            worker.describe(server.address),
            worker.load_report,
            worker.kv_events,
            on_order=self._take_order,
            tls=access.tls,
        )
        membership.start()
        announcing = self._announce(server, membership, first=first)
        tasks = [asyncio.create_task(self._watch_shutdown()), asyncio.create_task(announcing)]
        try:
            end = await self._until_over(membership)
        finally:
            for task in tasks:
                task.cancel()
            is_clean = await self._close(server, membership)
        return LifeEnd.FAILED if end is LifeEnd.OTHER_ROLE and not is_clean else end

    # ---- what happens meanwhile ----

    def _die(self) -> None:
        self._is_dead = True
        self._news.set()

    async def _watch_shutdown(self) -> None:
        await self._shutdown.wait()
        self._news.set()

    def _take_order(self, order: RouterMessage) -> None:
        """Remember what a router wants. Any of them speaks for all."""
        if order.WhichOneof("kind") == "drain":
            self._drain_ordered = not order.drain.over
            self._is_switching = self._is_switching and self._drain_ordered
        elif order.set_role.role in ROLES:
            self._is_switching = ROLES[order.set_role.role] != self._role
        self._news.set()

    async def _announce(self, server: GrpcServer, membership: MembershipClient, *, first: bool) -> None:
        """Say so once every router knows this worker, to those who ask for its health and, the first time, in the ready
        line: whoever waits for either may send requests then, or stop another worker."""
        await membership.wait_attached()
        await server.set_serving(True)
        if first:
            write_ready_line(
                self._role,
                worker_id=self._options.worker_id,
                address=server.address,
                num_blocks=self._worker.num_blocks,
                transports=list(self._worker.transports),
            )

    # ---- the life ----

    async def _until_over(self, membership: MembershipClient) -> LifeEnd:
        try:
            while True:
                if self._is_dead:
                    _log.critical("the engine thread has died; exiting")
                    return LifeEnd.FAILED
                if self._shutdown.is_set():
                    return await self._leave(membership)
                if self._has_come_to_rest():
                    _log.info("this worker is free, and takes the other role")
                    return LifeEnd.OTHER_ROLE
                self._obey(membership)
                await self._news.wait()
                self._news.clear()
        finally:
            self._rest(False)

    def _obey(self, membership: MembershipClient) -> None:
        """Drain, or drain no more, as the routers wish."""
        self._rest(self._is_switching)
        wanted = self._drain_ordered or self._is_switching
        if wanted == self._draining:
            return
        self._draining = wanted
        self._worker.set_draining(wanted)
        membership.announce_draining(wanted)
        _log.info("a router lets this worker %s", "take no new work" if wanted else "take work again")

    def _rest(self, wanted: bool) -> None:
        """Begin, or give up, waiting until the worker is free."""
        if wanted and self._resting is None:
            self._resting = asyncio.create_task(self._come_to_rest())
            self._resting.add_done_callback(lambda _: self._news.set())
        elif not wanted and self._resting is not None:
            self._resting.cancel()
            self._resting = None

    def _has_come_to_rest(self) -> bool:
        """Whether this life may end for the other role. If it turned out that it cannot, the worker stays."""
        resting = self._resting
        if resting is None or not self._is_switching or not resting.done():
            return False
        if resting.result():
            return True
        _log.error("KV blocks are still held although nothing runs any more: this worker keeps its role")
        self._is_switching = False
        return False

    async def _come_to_rest(self) -> bool:
        """Wait until nothing runs, and then until nothing is held. False: something stays held."""
        await self._worker.in_flight.wait_zero(None)
        # The engine's thread offers nothing to wait on, so this looks again and again.
        for _ in range(_LOOKS_FOR_REST):
            await asyncio.sleep(_SNAPSHOT_S)
            if self._worker.is_at_rest:
                return True
        return False

    async def _leave(self, membership: MembershipClient) -> LifeEnd:
        """Drain within the drain timeout."""
        self._worker.set_draining(True)
        membership.announce_draining()
        drained = asyncio.create_task(self._worker.in_flight.wait_zero(self._options.drain_timeout_s))
        drained.add_done_callback(lambda _: self._news.set())
        try:
            while not drained.done():
                if self._is_dead:
                    return LifeEnd.FAILED
                await self._news.wait()
                self._news.clear()
            if not drained.result():
                _log.warning("%d requests were cut off by the drain timeout", self._worker.in_flight.count)
            return LifeEnd.FAILED if self._is_dead else LifeEnd.STOPPED
        finally:
            drained.cancel()

    async def _close(self, server: GrpcServer, membership: MembershipClient) -> bool:
        if not self._is_dead:
            # First the streams end: a router that hears on another connection that this worker is gone would take what
            # was told last, and is still on its way, for lost.
            self._worker.end_drain()
            await server.stop(STOP_GRACE_S)
        await membership.stop()
        await server.stop(STOP_GRACE_S)
        return await asyncio.to_thread(self._worker.close, CLOSE_TIMEOUT_S)

"""The worker's side of membership: one `Attach` stream to each router, kept open for as long as the worker lives.

1. Dial, send Register, wait for Registered. A refusal (version, layout, secret) is logged and retried slowly, and so is
   a router whose version this worker refuses.
2. Send a snapshot of the prefix cache, then every interval its changes and a LoadReport, which is the heartbeat.
3. Obey Resync (snapshot again); Drain and SetRole are for the worker, which says with Draining what it makes of them.
4. When the stream breaks, from either end: back to 1 after a jittered, growing, capped wait. It never gives up, and a
   router that is away stops neither the worker nor its other links.
5. Routers that share a name (`router_names.py`) are looked up every few seconds: a new address gets a link of its own,
   one that is named no more loses it once its stream has ended. A lookup that fails changes nothing.
"""

import asyncio
import itertools
import logging
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import grpc
from grpc.aio import EOF

from kvferry_rpc import internal_pb2_grpc
from kvferry_rpc.internal_pb2 import Draining, KVEvent, KVEvents, LoadReport, Register, RouterMessage, WorkerMessage
from runtime.grpc_life import channel
from runtime.kv_event_log import CacheChange, KVEventLog
from runtime.protocol_version import CONTROL_VERSION, control_version
from runtime.router_names import Lookup, RouterNames
from runtime.tls import ChannelTls

_log = logging.getLogger(__name__)

MAX_EVENTS_PER_MESSAGE = 4096
_REGISTER_TIMEOUT_S = 10.0
_WRITE_TIMEOUT_S = 20.0
_REPORTS_UNTIL_HEALTHY = 4  # a router that accepts and hangs up at once does not reset the growing waits

# The router looked at what we are and said no; trying again at once cannot help.
_REFUSALS = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)

_Stream = grpc.aio.StreamStreamCall[WorkerMessage, RouterMessage]


@dataclass(frozen=True, slots=True)
class RetryTimes:
    """Waits between attempts to attach, in seconds, each shortened by a random share of up to a half; and between two
    lookups of a name."""

    first_s: float = 0.1
    longest_s: float = 3.0
    after_refusal_s: float = 15.0
    lookup_s: float = 3.0

    def delay_s(self, failures: int, rng: random.Random) -> float:
        """The wait after that many failures in a row (1 or more)."""
        grown = self.first_s * 2.0 ** min(failures - 1, 30)
        return min(grown, self.longest_s) * rng.uniform(0.5, 1.0)

    def refusal_delay_s(self, rng: random.Random) -> float:
        """The wait after a refusal."""
        return self.after_refusal_s * rng.uniform(0.5, 1.0)


class _RefusedRouterError(Exception):
    """This worker does not want to be attached to that router; the message says why."""


class MembershipClient:
    """Keeps this worker attached to its routers. All methods: event-loop thread only."""

    def __init__(
        self,
        router_addresses: Sequence[str | RouterNames],
        secret: bytes,
        register: Register,
        load: Callable[[], LoadReport],
        kv_events: KVEventLog,
        on_order: Callable[[RouterMessage], None],
        *,
        tls: ChannelTls | None = None,
        report_interval_s: float = 0.25,
        retry: RetryTimes | None = None,
    ) -> None:
        """`load` is called on the event loop each interval and link: it must only read a snapshot.

        `on_order` is called with each `drain` and `set_role` that a router sends; several routers may send the same.
        The protocol's version and `pid` of `register` are filled in here.
        """
        message = Register()
        message.CopyFrom(register)
        message.protocol_version, message.protocol_minor = CONTROL_VERSION.major, CONTROL_VERSION.minor
        message.pid = os.getpid()
        state = _Worker(secret, tls, message, load, kv_events, on_order, report_interval_s)
        rng = random.Random(message.incarnation)
        self._worker = state
        self._retry = retry or RetryTimes()
        self._rng = rng
        self._fixed = frozenset(address for address in router_addresses if isinstance(address, str))
        self._lookups = [Lookup(names) for names in router_addresses if not isinstance(names, str)]
        self._links: dict[str, _RouterLink] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._others: set[asyncio.Task[None]] = set()  # lookups, and links that are ending

    @property
    def num_attached(self) -> int:
        """Routers that this worker is registered with right now."""
        return sum(link.attached.is_set() for link in self._links.values())

    def start(self) -> None:
        """Begin dialling every router; returns at once."""
        self._follow()
        for lookup in self._lookups:
            self._others.add(asyncio.create_task(self._look_up(lookup), name=f"lookup {lookup.names}"))

    async def wait_attached(self) -> None:
        """Return when every router has accepted this worker at least once since `start`; of those that share a name,
        every one that it had when it was first looked up."""
        for lookup in self._lookups:
            await lookup.answered.wait()
        for link in list(self._links.values()):
            await link.attached_once.wait()

    def announce_draining(self, draining: bool = True) -> None:
        """Tell every router, now and after any reconnect, to send no new work; or that this is over. Heartbeats go on.
        Idempotent."""
        self._worker.draining = draining
        for link in self._links.values():
            link.wake.set()

    async def stop(self) -> None:
        """Detach from all routers. Idempotent."""
        tasks = [*self._tasks.values(), *self._others]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks = {}
        self._others = set()

    async def _look_up(self, lookup: Lookup) -> None:
        """Runs until cancelled."""
        while True:
            if await lookup.once():
                self._follow()
            await asyncio.sleep(self._retry.lookup_s)

    def _follow(self) -> None:
        """Have a link to every router there is, and to no other that does not hold one up by itself."""
        wanted = self._fixed.union(*(lookup.found for lookup in self._lookups))
        for address in sorted(wanted):
            link = self._links.get(address) or _RouterLink(address, self._worker, self._retry, self._rng)
            link.is_wanted = True
            if address not in self._links or self._tasks[address].done():
                self._links[address] = link
                self._tasks[address] = asyncio.create_task(link.run(), name=f"membership {address}")
        for address in self._links.keys() - wanted:
            self._links[address].is_wanted = False
            if not self._links[address].attached.is_set():
                self._drop(address)

    def _drop(self, address: str) -> None:
        _log.info("router %s is gone", address)
        # Whoever waits for it to accept this worker waits for nothing.
        self._links.pop(address).attached_once.set()
        task = self._tasks.pop(address)
        self._others.add(task)
        task.add_done_callback(self._others.discard)
        task.cancel()


@dataclass(slots=True)
class _Worker:
    """What all links share."""

    secret: bytes
    tls: ChannelTls | None
    register: Register
    load: Callable[[], LoadReport]
    kv_events: KVEventLog
    on_order: Callable[[RouterMessage], None]
    report_interval_s: float
    draining: bool = False


class _RouterLink:
    """One router: its stream, its place in the event log and its own sequence numbers."""

    def __init__(self, address: str, worker: _Worker, retry: RetryTimes, rng: random.Random) -> None:
        self.address = address
        self.attached = asyncio.Event()
        self.attached_once = asyncio.Event()
        self.wake = asyncio.Event()
        self.is_wanted = True  # Once it is not, the stream there is goes on to its end, and no other is begun.
        self._worker = worker
        self._retry = retry
        self._rng = rng
        self._failures = 0
        self._next_sequence = 0  # goes on over reconnects: numbers are consecutive over the incarnation
        self._cursor: int | None = None
        self._sent_draining = False

    async def run(self) -> None:
        while self.is_wanted:
            delay_s = await self._attach_once()
            await asyncio.sleep(delay_s)

    async def _attach_once(self) -> float:
        """One life of the stream; returns how long to wait before the next."""
        try:
            async with channel(self.address, self._worker.secret, tls=self._worker.tls) as link:
                stream: _Stream = internal_pb2_grpc.MembershipStub(link).Attach()
                try:
                    await self._register(stream)
                    await self._serve(stream)
                finally:
                    self.attached.clear()
                    stream.cancel()
            reason = "the router closed the stream"
        except grpc.aio.AioRpcError as error:
            if error.code() in _REFUSALS:
                self._failures = 0
                delay_s = self._retry.refusal_delay_s(self._rng)
                _log.error("router %s refuses this worker: %s", self.address, error.details())
                return delay_s
            reason = f"{error.code().name}: {error.details()}"
        except _RefusedRouterError as refusal:
            self._failures = 0
            _log.error("this worker does not attach to router %s: %s", self.address, refusal)
            return self._retry.refusal_delay_s(self._rng)
        except (TimeoutError, asyncio.InvalidStateError, grpc.aio.UsageError) as error:
            reason = f"no answer in time ({type(error).__name__})"
        except Exception:
            _log.exception("membership link to router %s failed", self.address)
            reason = "internal error"
        self._failures += 1
        # One line an outage, not one an attempt.
        _log.log(
            logging.WARNING if self._failures == 1 else logging.DEBUG,
            "not attached to router %s (%s); trying again until it is back", self.address, reason,
        )  # fmt: skip
        return self._retry.delay_s(self._failures, self._rng)

    async def _register(self, stream: _Stream) -> None:
        async with asyncio.timeout(_REGISTER_TIMEOUT_S):
            await _write(stream, WorkerMessage(register=self._worker.register))
            answer = await stream.read()
        if not isinstance(answer, RouterMessage):
            await _raise_status(stream)
            return
        _check_router(answer)
        self._cursor = None
        self._sent_draining = False
        self.attached.set()
        self.attached_once.set()
        _log.info("attached to router %s", self.address)
        self._obey(answer)

    async def _serve(self, stream: _Stream) -> None:
        """Read and report until the stream ends. Raises AioRpcError when it breaks."""
        reader = asyncio.create_task(self._read(stream))
        reporter = asyncio.create_task(self._report(stream))
        try:
            await asyncio.wait((reader, reporter), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (reader, reporter):
                task.cancel()
            outcomes = await asyncio.gather(reader, reporter, return_exceptions=True)
        # A write to a broken stream fails with an empty InvalidStateError; the reader knows the real status.
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome

    async def _read(self, stream: _Stream) -> None:
        while True:
            message = await stream.read()
            if message is EOF or not isinstance(message, RouterMessage):
                await _raise_status(stream)
                return
            self._obey(message)

    def _obey(self, message: RouterMessage) -> None:
        kind = message.WhichOneof("kind")
        if kind == "resync":
            self._cursor = None
            self.wake.set()
        elif kind in ("drain", "set_role"):
            self._worker.on_order(message)

    async def _report(self, stream: _Stream) -> None:
        for reports in itertools.count():
            if reports == _REPORTS_UNTIL_HEALTHY:
                self._failures = 0
            self.wake.clear()
            if self._worker.draining != self._sent_draining:
                self._sent_draining = self._worker.draining
                await _write(stream, WorkerMessage(draining=Draining(over=not self._sent_draining)))
            for message in self._event_messages():
                await _write(stream, message)
            await _write(stream, WorkerMessage(load=self._worker.load()))
            with suppress(TimeoutError):
                async with asyncio.timeout(self._worker.report_interval_s):
                    await self.wake.wait()

    def _event_messages(self) -> Iterator[WorkerMessage]:
        """Everything new for this router, in messages of bounded size; a snapshot marks only its first message."""
        while True:
            read = self._worker.kv_events.read(self._cursor, MAX_EVENTS_PER_MESSAGE)
            self._cursor = read.cursor
            if not read.changes and not read.snapshot:
                return
            snapshot = read.snapshot
            for start in range(0, max(len(read.changes), 1), MAX_EVENTS_PER_MESSAGE):
                part = read.changes[start : start + MAX_EVENTS_PER_MESSAGE]
                yield WorkerMessage(kv_events=self._number(part, snapshot))
                snapshot = False

    def _number(self, changes: Sequence[CacheChange], snapshot: bool) -> KVEvents:
        first = self._next_sequence
        self._next_sequence += len(changes)
        events = [KVEvent(block_hash=block_hash, removed=removed) for block_hash, removed in changes]
        return KVEvents(first_sequence=first, snapshot=snapshot, events=events)


def _check_router(answer: RouterMessage) -> None:
    """Raises _RefusedRouterError. A router that answers with something else, before anything, is none of ours."""
    registered = answer.registered
    theirs = control_version(registered.protocol_version, registered.protocol_minor)
    if refusal := CONTROL_VERSION.refusal(theirs, "the protocol between routers and workers"):
        raise _RefusedRouterError(refusal)


async def _write(stream: _Stream, message: WorkerMessage) -> None:
    """Write with a deadline: a router that is stopped, not dead, accepts bytes until its buffers are full."""
    async with asyncio.timeout(_WRITE_TIMEOUT_S):
        await stream.write(message)


async def _raise_status(stream: _Stream) -> None:
    """Raise the AioRpcError of a stream that has ended; return if it ended well."""
    code = await stream.code()
    if code is not grpc.StatusCode.OK:
        details = await stream.details()
        raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)

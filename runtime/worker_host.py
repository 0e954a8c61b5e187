"""The life of a worker process around its engine: load, listen, attach, drain, stop. The same for both roles.

1. `build` makes the worker in a thread, so that signals are answered while weights load.
2. The gRPC server listens; membership dials the routers; once all have accepted, the ready line is written.
3. On SIGTERM (or a router's Drain): routers are told, new work is refused, what runs finishes within the drain timeout.
4. The worker closes, the server stops, the process exits 0. A dead engine thread exits 1 at once.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from kvferry_rpc.internal_pb2 import LoadReport, Register
from runtime.clock import SystemClock
from runtime.config import flag, required_flag
from runtime.errors import KvferryError
from runtime.grpc_life import GrpcServer
from runtime.in_flight import InFlight
from runtime.kv_event_log import KVEventLog
from runtime.membership import MembershipClient
from runtime.process import write_ready_line
from runtime.secret import read_secret_file
from runtime.tls import InternalTlsOptions, internal_channel_tls, server_credentials
from runtime.tracing import TracingOptions

_log = logging.getLogger(__name__)

_STOP_GRACE_S = 1.0
_CLOSE_TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class HostOptions(InternalTlsOptions, TracingOptions):
    """Flags that every worker has."""

    worker_id: str = required_flag("Name of this worker, unique in the cluster and stable over restarts.")
    host: str = flag("127.0.0.1", "Address to listen on; routers and other workers must reach it.")
    port: int = flag(0, "Port of the gRPC service; 0 takes a free one.")
    routers: tuple[str, ...] = required_flag("Routers to attach to, host:port of their internal service.")
    cluster_secret_file: Path = required_flag("File with the secret that all processes of the cluster share.")
    drain_timeout_s: float = flag(60.0, "Longest time to finish running requests after SIGTERM.")
    log_level: Literal["debug", "info", "warning", "error"] = flag("info", "Least severe log lines to write.")
    log_json: bool = flag(False, "Write log lines as JSON.")
    exit_on_stdin_close: bool = flag(False, "Drain and exit when standard input closes.")

    def validate(self) -> None:
        """Raises ValueError naming the flag."""
        InternalTlsOptions.validate(self)
        TracingOptions.validate(self)
        if not self.worker_id or len(self.worker_id) > 128:
            raise ValueError("--worker-id must have 1 to 128 characters")
        if self.host in ("", "0.0.0.0", "::"):
            raise ValueError("--host is where others reach this worker: a wildcard address cannot be told to them")
        if not 0 <= self.port <= 65535:
            raise ValueError("--port must be 0 to 65535")
        if not self.routers:
            raise ValueError("--routers must name at least one router")
        if self.drain_timeout_s <= 0:
            raise ValueError("--drain-timeout-s must be positive")


class HostedWorker(Protocol):
    """What a role gives to its host. All methods are called on the event loop and must not block, `close` apart."""

    @property
    def in_flight(self) -> InFlight:
        """Requests that draining must wait for."""
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

    def begin_drain(self) -> None:
        """Refuse new requests from now on. Idempotent."""
        ...

    def end_drain(self) -> None:
        """No request runs any more, or none may: end the streams that outlast requests, behind their last messages."""
        ...

    def close(self, timeout_s: float) -> None:
        """Stop threads and transports. Blocks; called in a thread, last."""
        ...


async def host_worker(
    options: HostOptions, role: str, build: Callable[[bytes], HostedWorker], shutdown: asyncio.Event
) -> int:
    """Run a worker until it has drained; returns the exit status. `build(secret)` runs in a thread."""
    try:
        secret = read_secret_file(options.cluster_secret_file)
        clock = SystemClock()
        tls = internal_channel_tls(options, clock)
        credentials = server_credentials(options.internal_tls, clock) if options.internal_tls else None
        worker = await asyncio.to_thread(build, secret)
    except (KvferryError, OSError, ValueError) as error:  # what a person can mend: one line, no traceback
        _log.error("cannot start: %s", error)
        return 1
    loop = asyncio.get_running_loop()
    dead = asyncio.Event()

    def on_fatal() -> None:
        loop.call_soon_threadsafe(dead.set)

    worker.start(on_fatal)
    server = GrpcServer(options.host, options.port, secret=secret, credentials=credentials)
    worker.add_services(server)
    await server.start()
    membership = MembershipClient(
        options.routers,
        secret,
        worker.describe(server.address),
        worker.load_report,
        worker.kv_events,
        on_drain=shutdown.set,
        tls=tls,
    )
    membership.start()
    await server.set_serving(True)
    announcing = asyncio.create_task(_announce(options, role, worker, server.address, membership))
    try:
        await _until_drained(worker, membership, shutdown, dead, options.drain_timeout_s)
    finally:
        announcing.cancel()
        if not dead.is_set():
            # First the streams end: a router that hears on another connection that this worker is gone would take
            # what was told last, and is still on its way, for lost.
            worker.end_drain()
            await server.stop(_STOP_GRACE_S)
        await membership.stop()
        await server.stop(_STOP_GRACE_S)
        await asyncio.to_thread(worker.close, _CLOSE_TIMEOUT_S)
    return 1 if dead.is_set() else 0


async def _announce(
    options: HostOptions, role: str, worker: HostedWorker, address: str, membership: MembershipClient
) -> None:
    """Write the ready line once every router knows this worker: whoever waits for it may send requests then."""
    await membership.wait_attached()
    write_ready_line(
        role,
        worker_id=options.worker_id,
        address=address,
        num_blocks=worker.num_blocks,
        transports=list(worker.transports),
    )


async def _until_drained(
    worker: HostedWorker,
    membership: MembershipClient,
    shutdown: asyncio.Event,
    dead: asyncio.Event,
    drain_timeout_s: float,
) -> None:
    stopped = asyncio.create_task(_wait(dead))
    waits: list[asyncio.Task[bool]] = [stopped, asyncio.create_task(_wait(shutdown))]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if dead.is_set():
            _log.critical("the engine thread has died; exiting")
            return
        worker.begin_drain()
        membership.announce_draining()
        drained = asyncio.create_task(worker.in_flight.wait_zero(drain_timeout_s))
        waits.append(drained)
        await asyncio.wait([drained, stopped], return_when=asyncio.FIRST_COMPLETED)
        if not drained.done() or not drained.result():
            _log.warning("%d requests were cut off by the drain timeout", worker.in_flight.count)
    finally:
        for task in waits:
            task.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


async def _wait(event: asyncio.Event) -> bool:
    return await event.wait()

"""The waiting end of `kvferry doctor --peer`: hands out tickets into a small pool of its own and says what arrived.

Whoever shows the cluster secret is served, several at once if there is room; each hand-off takes one slot of the pool
until it is over and fenced, so a peer that goes silent can hold a slot but never the listener.
"""

import asyncio
import logging
import secrets
import socket
from collections.abc import Callable
from typing import Any

import grpc

from kv_transfer.end_facts import end_facts, has_library
from kv_transfer.events import Committed, Failed, ReceiveEvent
from kv_transfer.identity import Identity
from kv_transfer.options import AUTO, TRANSPORTS, TransferOptions
from kv_transfer.receiver import HandoffReceiver
from kv_transfer.region import MemoryRegion
from kv_transfer.transport import Network
from kvferry import __version__
from kvferry.probe_wire import (
    LARGE_BLOCKS,
    LAYOUT,
    MAX_MESSAGE_BYTES,
    SERVICE,
    EndReport,
    OutcomeReply,
    OutcomeRequest,
    TicketReply,
    TicketRequest,
    decode,
    encode,
    versions,
)
from runtime.clock import Clock, SystemClock
from runtime.errors import KvferryError
from runtime.grpc_life import GrpcServer

_SLOTS = 4
_LEASE_S = 10.0
_OUTCOME_TIMEOUT_S = 30.0
_MAX_KEPT_OUTCOMES = 256
_STOP_GRACE_S = 1.0
_CLOSE_TIMEOUT_S = 10.0

_log = logging.getLogger(__name__)


def report_end(network: Network, options: TransferOptions) -> EndReport:
    """What this end is and has."""
    names = tuple(network.transports)
    probe_version, protocol_version = versions()
    return EndReport(
        probe_version=probe_version,
        protocol_version=protocol_version,
        kvferry_version=__version__,
        host_name=socket.gethostname(),
        transports=names,
        unusable={name: _why_not(name, options) for name in TRANSPORTS if name not in names},
        facts=end_facts(names),
    )


def _why_not(name: str, options: TransferOptions) -> str:
    if name in options.forbid_transports:
        return "forbidden"
    if not has_library(name):
        return "its library is not installed"
    return "its library does not load" if options.transports == (AUTO,) else "not among --transports"


class ProbeListener:
    """One listening end. `start` and `close` on the event loop, once each; the rest is for its own server."""

    def __init__(
        self, host: str, port: int, secret: bytes, options: TransferOptions, clock: Clock | None = None
    ) -> None:
        """Takes 64 MiB of memory. `host` is the address that peers reach. Raises ValueError, RegionError."""
        self._network = options.network(host)
        self._report = report_end(self._network, options)
        self._pool = MemoryRegion.allocate(LAYOUT.pool_bytes(_SLOTS * LARGE_BLOCKS), shared=True, name="probe-pool")
        self._receiver = HandoffReceiver(
            Identity("doctor", secrets.token_bytes(16), secret, LAYOUT, self._pool),
            bind_host=host,
            transports=tuple(self._network.transports),
            lease_s=_LEASE_S,
            clock=clock or SystemClock(),
            on_event=self._on_event,
            network=self._network,
        )
        self._server = GrpcServer(host, port, secret=secret, max_received_bytes=MAX_MESSAGE_BYTES)
        self._server.add_service(_register, self, SERVICE, internal=True)
        self._free = list(range(_SLOTS))
        self._held: dict[str, int] = {}
        self._outcomes: dict[str, asyncio.Future[str]] = {}
        self._count = 0

    @property
    def report(self) -> EndReport:
        """What this end is and has."""
        return self._report

    async def start(self) -> str:
        """Listen; returns host:port. Raises OSError when the address cannot be had."""
        self._loop = asyncio.get_running_loop()
        await self._server.start()
        self._receiver.start()
        await self._server.set_serving(True)
        return self._server.address

    async def close(self) -> None:
        """End calls, links and threads, and give the memory back."""
        await self._server.stop(_STOP_GRACE_S)
        await asyncio.to_thread(self._receiver.close, _CLOSE_TIMEOUT_S)
        await asyncio.to_thread(self._network.close)
        self._pool.close()

    # ---- the service

    async def introduce(self, request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        """Exchange reports."""
        peer = await _parsed(request, EndReport, context)
        _log.info("%s (%s, kvferry %s) asks", context.peer(), peer.host_name, peer.kvferry_version)
        return encode(self._report)

    async def ticket(self, request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        """A place in the pool, offered over one transport."""
        wanted = await _parsed(request, TicketRequest, context)
        if not 1 <= wanted.num_blocks <= LARGE_BLOCKS:
            return encode(TicketReply(b"", f"a hand-off has 1 to {LARGE_BLOCKS} blocks"))
        if not self._free:
            return encode(TicketReply(b"", "all places are taken by other peers, or held by one that went silent"))
        slot = self._free.pop()
        first = slot * LARGE_BLOCKS
        self._count += 1
        try:
            ticket = self._receiver.reserve(
                f"probe-{self._count}",
                1,
                0,
                range(first, first + wanted.num_blocks),
                wanted.num_blocks * LAYOUT.block_size,
            )
        except KvferryError as error:
            self._free.append(slot)
            return encode(TicketReply(b"", error.message))
        self._held[ticket.handoff_id] = slot
        self._outcomes[ticket.handoff_id] = self._loop.create_future()
        self._forget_old()
        offers = [offer for offer in ticket.transports if offer.name == wanted.transport]
        if not offers:
            self._receiver.abort(ticket.handoff_id, "not offered")
            return encode(TicketReply(b"", f"{wanted.transport} does not reach a pool of this kind"))
        del ticket.transports[:]
        ticket.transports.extend(offers)
        return encode(TicketReply(ticket.SerializeToString()))

    async def outcome(self, request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        """How a hand-off ended here."""
        asked = await _parsed(request, OutcomeRequest, context)
        future = self._outcomes.get(asked.handoff_id)
        if future is None:
            return encode(OutcomeReply("this hand-off is not known"))
        try:
            return encode(OutcomeReply(await asyncio.wait_for(asyncio.shield(future), _OUTCOME_TIMEOUT_S)))
        except TimeoutError:
            return encode(OutcomeReply(f"nothing was decided within {_OUTCOME_TIMEOUT_S:g} s"))

    # ---- the receiver's events

    def _on_event(self, event: ReceiveEvent) -> None:
        self._loop.call_soon_threadsafe(self._settle, event)

    def _settle(self, event: ReceiveEvent) -> None:
        future = self._outcomes.get(event.handoff_id)
        if future is not None and not future.done() and isinstance(event, Committed | Failed):
            future.set_result(event.error.message if isinstance(event, Failed) else "")
        if isinstance(event, Committed):
            self._receiver.release(event.handoff_id)
        if not isinstance(event, Failed):  # Committed or Fenced: nobody writes there any more.
            slot = self._held.pop(event.handoff_id, None)
            if slot is not None:
                self._free.append(slot)

    def _forget_old(self) -> None:
        for handoff_id in list(self._outcomes)[: max(0, len(self._outcomes) - _MAX_KEPT_OUTCOMES)]:
            del self._outcomes[handoff_id]


async def _parsed(request: bytes, kind: Any, context: grpc.aio.ServicerContext[bytes, bytes]) -> Any:
    try:
        return decode(request, kind)
    except ValueError as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))


def _register(listener: ProbeListener, server: grpc.aio.Server) -> None:
    methods: dict[str, Callable[..., Any]] = {
        "Introduce": listener.introduce,
        "Ticket": listener.ticket,
        "Outcome": listener.outcome,
    }
    handlers: dict[str, Any] = {name: grpc.unary_unary_rpc_method_handler(method) for name, method in methods.items()}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

"""The asking end of `kvferry doctor --peer`: tries every transport that either end has with small real hand-offs.

1. Both ends report what they are. 2. For each transport: one hand-off of one block makes the link and warms it up, one
more gives the fixed cost, one of 16 MiB the speed; the listener verifies the content of each. 3. What a prefill worker
here would choose for a decode worker there is compared with what should have worked.
"""

import asyncio
import os
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import grpc
import msgspec
from google.protobuf.message import DecodeError

from kv_transfer.choice import Pair, candidates, degraded, expected
from kv_transfer.events import CommitRecord, Drained, Failed, SendEvent, Sent
from kv_transfer.identity import Identity
from kv_transfer.network import build_network
from kv_transfer.options import TRANSPORTS, TransferOptions
from kv_transfer.region import MemoryRegion
from kv_transfer.sender import HandoffSender
from kvferry.peer_listener import report_end
from kvferry.probe_wire import (
    LARGE_BLOCKS,
    LAYOUT,
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
from kvferry_rpc.common_pb2 import ErrorCode
from kvferry_rpc.internal_pb2 import Ticket
from runtime.clock import SystemClock
from runtime.errors import KvferryError
from runtime.grpc_life import channel

_RPC_TIMEOUT_S = 10.0
_OUTCOME_TIMEOUT_S = 35.0
_HANDOFF_TIMEOUT_S = 20.0
_CLOSE_TIMEOUT_S = 5.0
_SMALL_BLOCKS = 1

Reply = TypeVar("Reply")


@dataclass(frozen=True, slots=True)
class Trial:
    """One transport tried. `failure` is empty when it works; the figures are None then otherwise.

    `fixed_ms` is a whole hand-off of one block over a link that is up; `gigabytes_per_s` one of 16 MiB.
    """

    transport: str
    failure: str = ""
    detail: str = ""
    fixed_ms: float | None = None
    gigabytes_per_s: float | None = None

    @property
    def works(self) -> bool:
        """Whether blocks arrived and were verified."""
        return not self.failure


@dataclass(frozen=True, slots=True)
class PeerReport:
    """All that was found out about one pair of hosts. `chosen` is empty when nothing works."""

    peer: EndReport
    own: EndReport
    trials: tuple[Trial, ...]
    chosen: str
    expected: str
    warning: str


def judge(own: EndReport, peer: EndReport, trials: Sequence[Trial]) -> PeerReport:
    """What workers of these two hosts would use, against what they should. Pure."""
    pair = Pair.of(own.facts, peer.facts)
    working = {trial.transport: trial for trial in trials if trial.works}
    best = expected(peer.transports, own.transports, pair)
    chosen = next((name for name in candidates(peer.transports, own.transports, pair) if name in working), "")
    warning = ""
    if not chosen:
        warning = "no transport works between these hosts"
    elif degraded(chosen, best):
        reason = next((trial.failure for trial in trials if trial.transport == best), "")
        warning = f"{best} was expected, {chosen} will be used: {reason}"
    return PeerReport(peer, own, tuple(trials), chosen, best, warning)


async def probe(address: str, secret: bytes, options: TransferOptions) -> PeerReport:
    """Try everything with the listener at `address` (host:port). Minutes at most, if nothing answers in time.

    Raises KvferryError: UNAVAILABLE when it cannot be reached, UNAUTHENTICATED for another secret, INVALID_REQUEST for
    another version; ValueError for options that this host cannot have.
    """
    local_host = await asyncio.to_thread(address_towards, address)
    network = options.network(local_host)
    own = report_end(network, options)
    network.close()  # Each trial opens its own.
    async with channel(address, secret) as calls:
        control = _Control(calls, address)
        peer = await control.call("Introduce", own, EndReport)
        check_versions(own, peer)
        trials = []
        for name in TRANSPORTS:
            if name not in own.transports and name not in peer.transports:
                continue
            trials.append(await _try(name, own, peer, control, secret, local_host))
    return judge(own, peer, trials)


def check_versions(own: EndReport, peer: EndReport) -> None:
    """Raises KvferryError (INVALID_REQUEST) naming both when the ends cannot talk."""
    if (peer.probe_version, peer.protocol_version) != versions():
        raise KvferryError(
            ErrorCode.INVALID_REQUEST,
            f"the peer runs kvferry {peer.kvferry_version} (hand-off protocol {peer.protocol_version}), this is "
            f"kvferry {own.kvferry_version} (protocol {own.protocol_version}): install the same version on both",
        )


def address_towards(address: str) -> str:
    """The local address from which packets go to `address`. Sends nothing. Raises KvferryError (UNAVAILABLE)."""
    host, _, port = address.rpartition(":")
    try:
        family, kind, _, _, target = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as sock:
            sock.connect(target)
            return str(sock.getsockname()[0])
    except (OSError, ValueError) as error:
        raise KvferryError(ErrorCode.UNAVAILABLE, f"{address} is no address that can be reached: {error}") from error


class _Control:
    """Calls to the listener."""

    def __init__(self, calls: grpc.aio.Channel, address: str) -> None:
        self._calls = calls
        self._address = address

    async def call(
        self, method: str, request: msgspec.Struct, kind: type[Reply], timeout_s: float = _RPC_TIMEOUT_S
    ) -> Reply:
        """One call. Raises KvferryError."""
        try:
            rpc: Any = self._calls.unary_unary(f"/{SERVICE}/{method}")
            return decode(await rpc(encode(request), timeout=timeout_s), kind)
        except grpc.aio.AioRpcError as error:
            raise _explained(error, self._address) from error
        except ValueError as error:
            raise KvferryError(ErrorCode.INVALID_REQUEST, f"{self._address} answers something else: {error}") from error


def _explained(error: grpc.aio.AioRpcError, address: str) -> KvferryError:
    status = error.code()
    if status is grpc.StatusCode.UNIMPLEMENTED:
        text = f"{address} is no `kvferry doctor --listen`, or one of another version"
        return KvferryError(ErrorCode.INVALID_REQUEST, text)
    if status is grpc.StatusCode.UNAUTHENTICATED:
        return KvferryError(ErrorCode.UNAUTHENTICATED, f"{address} has another cluster secret than this end")
    if status is grpc.StatusCode.UNAVAILABLE:
        text = f"{address} cannot be reached: start `kvferry doctor --listen` there ({error.details()})"
        return KvferryError(ErrorCode.UNAVAILABLE, text)
    return KvferryError.from_rpc(error, address)


async def _try(name: str, own: EndReport, peer: EndReport, control: _Control, secret: bytes, local_host: str) -> Trial:
    for end, whose in ((own, "here"), (peer, "at the peer")):
        if name not in end.transports:
            return Trial(name, f"{whose}: {end.unusable.get(name, 'not there')}"[:500])
    try:
        hand_offs = await asyncio.to_thread(_HandOffs, name, secret, local_host)
    except Exception as error:  # Whatever a library says when it cannot start must not keep the others from a try.
        return Trial(name, f"here: {error}")
    try:
        return await _measure(name, hand_offs, control)
    except KvferryError as error:
        return Trial(name, error.message)
    finally:
        await asyncio.to_thread(hand_offs.close)


async def _measure(name: str, hand_offs: "_HandOffs", control: _Control) -> Trial:
    trial = Trial(name)
    for step, num_blocks in enumerate((_SMALL_BLOCKS, _SMALL_BLOCKS, LARGE_BLOCKS, LARGE_BLOCKS)):
        reply = await control.call("Ticket", TicketRequest(name, num_blocks), TicketReply)
        if reply.refusal:
            raise KvferryError(ErrorCode.UNAVAILABLE, f"at the peer: {reply.refusal}")
        ticket = _parsed(reply.ticket)
        sent, seconds = await asyncio.to_thread(hand_offs.send, ticket)
        answer = await control.call("Outcome", OutcomeRequest(ticket.handoff_id), OutcomeReply, _OUTCOME_TIMEOUT_S)
        if answer.failure:
            raise KvferryError(ErrorCode.HANDOFF_FAILED, f"at the peer: {answer.failure}")
        trial = replace(trial, detail=sent.stats.transport_detail)
        if step == 1:
            trial = replace(trial, fixed_ms=seconds * 1000)
        elif num_blocks == LARGE_BLOCKS:  # The first of the two touches both pools' memory for the first time.
            trial = replace(trial, gigabytes_per_s=sent.stats.size_bytes / seconds / 1e9)
    return trial


def _parsed(ticket: bytes) -> Ticket:
    try:
        return Ticket.FromString(ticket)
    except DecodeError as error:
        raise KvferryError(ErrorCode.HANDOFF_FAILED, f"at the peer: a malformed ticket: {error}") from error


class _HandOffs:
    """A sender with one transport, used from one thread, one hand-off at a time."""

    def __init__(self, name: str, secret: bytes, local_host: str) -> None:
        """Takes 16 MiB. Raises ValueError, RegionError."""
        self._network = build_network((name,), local_host)
        self._pool = MemoryRegion.allocate(LAYOUT.pool_bytes(LARGE_BLOCKS), shared=False, name="probe-source")
        self._pool.buffer[:] = os.urandom(self._pool.size_bytes)
        self._clock = SystemClock()
        self._changed = threading.Condition()
        self._events: list[SendEvent] = []
        self._sender = HandoffSender(
            Identity("doctor-peer", secrets.token_bytes(16), secret, LAYOUT, self._pool),
            transports=(name,),
            clock=self._clock,
            on_event=self._on_event,
            network=self._network,
        )

    def send(self, ticket: Ticket) -> tuple[Sent, float]:
        """One whole hand-off, and the seconds from opening it to the peer's word that it is verified.

        Raises KvferryError when it fails; that is bounded in time.
        """
        num_blocks = len(ticket.block_ids)
        num_tokens = num_blocks * LAYOUT.block_size
        self._events = []
        started = time.monotonic()
        try:
            self._sender.open(ticket, num_tokens, self._clock.now() + _HANDOFF_TIMEOUT_S)
            self._sender.push(ticket.handoff_id, 0, range(num_blocks), range(LAYOUT.num_layers))
            self._sender.commit(ticket.handoff_id, CommitRecord(num_tokens, b""))
        except ValueError as error:  # A ticket that makes no sense: the peer is another version, or worse.
            raise KvferryError(ErrorCode.HANDOFF_FAILED, str(error)) from error
        with self._changed:
            self._changed.wait_for(lambda: self._find(Sent, Failed) is not None, 2 * _HANDOFF_TIMEOUT_S)
            outcome, seconds = self._find(Sent, Failed), time.monotonic() - started
            self._changed.wait_for(lambda: self._find(Drained) is not None, _HANDOFF_TIMEOUT_S)
        if isinstance(outcome, Sent):
            return outcome, seconds
        if isinstance(outcome, Failed):
            raise outcome.error
        raise KvferryError(ErrorCode.DEADLINE_EXCEEDED, f"nothing was decided within {2 * _HANDOFF_TIMEOUT_S:g} s")

    def close(self) -> None:
        """End the link and give everything back."""
        self._sender.close(_CLOSE_TIMEOUT_S)
        self._network.close()
        self._pool.close()

    def _on_event(self, event: SendEvent) -> None:
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()

    def _find(self, *kinds: type) -> SendEvent | None:
        return next((event for event in self._events if isinstance(event, kinds)), None)

"""The two processes of the failover benchmark: one that sends hand-offs and one that receives them into its own pool.

Each obeys commands that come through a pipe, and tells through the same pipe whatever happens to its hand-offs. Either
can be killed or stopped at any moment; neither knows about it.
"""

import ctypes
import functools
import heapq
import itertools
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from bench.common.failover_messages import (
    BEGUN,
    PREFILL,
    Audit,
    Command,
    Go,
    Happened,
    Leave,
    Message,
    Piece,
    Prepare,
    Prepared,
    Ready,
    Recheck,
    Rechecked,
    Reserve,
    Reserved,
    Setup,
    Tell,
)
from bench.common.failover_pool import Pool
from bench.common.transfer_peer import HOST
from kv_transfer.events import CommitRecord, Committed, Drained, Failed, Fenced, ReceiveEvent, SendEvent
from kv_transfer.faults import FaultPlan
from kv_transfer.network import build_network
from kv_transfer.receiver import HandoffReceiver
from kv_transfer.sender import HandoffSender
from kvferry_rpc.internal_pb2 import Ticket
from runtime.clock import SystemClock
from runtime.errors import KvferryError

_PATIENCE_S = 60.0  # Of a hand-off: far longer than anything here, so that failures are found, not timed out.
_CLOSE_S = 3.0
_PR_SET_PDEATHSIG = 1


def serve(connection: "Connection[Any, Any]", setup: Setup) -> None:
    """The body of one process. Ends when told to, or when the other end of the pipe is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A stopped process does not see that the pipe has ended: without this it would outlive a killed benchmark.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.dup2(2, 1)  # UCX logs to stdout, which is for results.
    logging.basicConfig(level=logging.ERROR)
    lock = threading.Lock()

    def tell(message: Message) -> None:
        with lock:
            connection.send(message)

    end: _Prefill | _Decode = _Prefill(setup, tell) if setup.role == PREFILL else _Decode(setup, tell)
    threading.Thread(target=_listen, args=(connection, end.inbox), name="commands", daemon=True).start()
    tell(Ready())
    try:
        while end.step():
            pass
    except OSError:  # Nobody listens any more.
        return


def _listen(connection: "Connection[Any, Any]", inbox: "queue.SimpleQueue[Any]") -> None:
    try:
        while True:
            inbox.put(connection.recv())
    except (EOFError, OSError):
        inbox.put(Leave())


def _number(handoff_id: str) -> int:
    return int(handoff_id.partition("/")[0])


@dataclass(slots=True)
class _Outgoing:
    prepare: Prepare
    ticket: Ticket
    blocks: list[int]

    @property
    def num_tokens(self) -> int:
        return int(self.ticket.layout.block_size) * len(self.blocks)


@dataclass(order=True, slots=True)
class _Due:
    at_s: float
    order: int
    act: Callable[[], None] = field(compare=False)


class _Prefill:
    """Sends by schedule. One thread, which alone touches the block manager; the sender's events come to its inbox."""

    def __init__(self, setup: Setup, tell: Tell) -> None:
        self.inbox: queue.SimpleQueue[Command | tuple[float, SendEvent]] = queue.SimpleQueue()
        self._tell = tell
        self._pool = Pool(setup)
        self._outgoing: dict[int, _Outgoing] = {}
        self._waiting: list[_Outgoing] = []
        self._due: list[_Due] = []
        self._orders = itertools.count()
        self._network = build_network([setup.transport], HOST)
        self._sender = HandoffSender(
            self._pool.identity("failover-prefill", setup.incarnation),
            transports=(setup.transport,),
            clock=SystemClock(),
            on_event=lambda event: self.inbox.put((time.monotonic(), event)),
            network=self._network,
            io_timeout_s=setup.io_timeout_s,
            faults=FaultPlan(bytes_per_second=setup.bytes_per_second),
        )

    def step(self) -> bool:
        """Wait for the next thing and do it. False at the end."""
        while self._due and self._due[0].at_s <= time.monotonic():
            heapq.heappop(self._due).act()
        timeout_s = max(0.0, self._due[0].at_s - time.monotonic()) if self._due else None
        try:
            item = self.inbox.get(timeout=timeout_s)
        except queue.Empty:
            return True
        if isinstance(item, Leave):
            self._sender.close(_CLOSE_S)
            self._network.close()
            return False
        self._handle(item)
        return True

    def _handle(self, item: Command | tuple[float, SendEvent]) -> None:
        if isinstance(item, Prepare):
            self._prepare(item)
        elif isinstance(item, Go):
            waiting, self._waiting = self._waiting, []
            for outgoing in waiting:
                self._schedule(outgoing, time.monotonic())
        elif isinstance(item, Audit):
            self._tell(self._pool.audit(self._sender.snapshot().handoffs))
        elif isinstance(item, tuple):
            self._on_event(*item)

    def _prepare(self, prepare: Prepare) -> None:
        ticket = Ticket.FromString(prepare.ticket)
        blocks = self._pool.take(prepare.number, len(ticket.block_ids))
        if blocks is None:
            raise RuntimeError("the prefill pool is too small for what it was told to send")
        self._pool.fill(prepare.number, blocks)
        outgoing = _Outgoing(prepare, ticket, blocks)
        self._outgoing[prepare.number] = outgoing
        self._waiting.append(outgoing)
        self._tell(Prepared(prepare.number))

    def _schedule(self, outgoing: _Outgoing, now: float) -> None:
        prepare = outgoing.prepare
        self._at(now + prepare.open_after_s, functools.partial(self._open, outgoing))
        for piece in prepare.pieces:
            self._at(now + piece.after_s, functools.partial(self._push, outgoing, piece))
        self._at(now + prepare.commit_after_s, functools.partial(self._commit, outgoing))

    def _at(self, at_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._due, _Due(at_s, next(self._orders), act))

    def _open(self, outgoing: _Outgoing) -> None:
        self._tell(Happened(BEGUN, outgoing.prepare.number, time.monotonic()))
        try:
            self._sender.open(outgoing.ticket, outgoing.num_tokens, time.monotonic() + _PATIENCE_S)
        except KvferryError as error:
            self._on_event(time.monotonic(), Failed(outgoing.ticket.handoff_id, error))
            self._on_event(time.monotonic(), Drained(outgoing.ticket.handoff_id))

    def _push(self, outgoing: _Outgoing, piece: Piece) -> None:
        blocks = outgoing.blocks[piece.blocks.start : piece.blocks.stop]
        self._sender.push(outgoing.ticket.handoff_id, piece.blocks.start, blocks, piece.layers)

    def _commit(self, outgoing: _Outgoing) -> None:
        self._sender.commit(outgoing.ticket.handoff_id, CommitRecord(outgoing.num_tokens, b""))

    def _on_event(self, at_s: float, event: SendEvent) -> None:
        number = _number(event.handoff_id)
        if isinstance(event, Drained):
            outgoing = self._outgoing.pop(number)
            self._pool.manager.free(str(number))
            self._pool.give_back(outgoing.blocks)
        reason = event.error.message if isinstance(event, Failed) else ""
        self._tell(Happened(type(event).__name__, number, at_s, reason=reason))


class _Decode:
    """Receives into blocks of its own. One thread, which alone touches the block manager; events come to its inbox."""

    def __init__(self, setup: Setup, tell: Tell) -> None:
        self.inbox: queue.SimpleQueue[Command | tuple[float, ReceiveEvent]] = queue.SimpleQueue()
        self._tell = tell
        self._layout = setup.layout
        self._pool = Pool(setup)
        self._blocks: dict[int, list[int]] = {}
        self._quarantines: dict[int, int] = {}
        self._committed: set[int] = set()
        self._network = build_network([setup.transport], HOST)
        self._receiver = HandoffReceiver(
            self._pool.identity("failover-decode", setup.incarnation),
            bind_host=HOST,
            transports=(setup.transport,),
            lease_s=setup.lease_s,
            clock=SystemClock(),
            on_event=lambda event: self.inbox.put((time.monotonic(), event)),
            network=self._network,
            io_timeout_s=setup.io_timeout_s,
        )
        self._receiver.start()

    def step(self) -> bool:
        """Wait for the next thing and do it. False at the end."""
        item = self.inbox.get()
        if isinstance(item, Leave):
            self._receiver.close(_CLOSE_S)
            self._network.close()
            return False
        if isinstance(item, Reserve):
            self._tell(self._reserve(item.number, item.num_blocks))
        elif isinstance(item, Recheck):
            self._tell(self._recheck())
        elif isinstance(item, Audit):
            counts = self._receiver.snapshot().handoffs
            held = counts.reserved + counts.transferring + counts.quarantined + counts.committed
            self._tell(self._pool.audit(held))
        elif isinstance(item, tuple):
            self._on_event(*item)
        return True

    def _reserve(self, number: int, num_blocks: int) -> Reserved:
        blocks = self._pool.take(number, num_blocks)
        if blocks is None:
            return Reserved(number, b"", f"{num_blocks} blocks are not free: {self._pool.manager.usage()}")
        num_tokens = num_blocks * self._layout.block_size
        try:
            ticket = self._receiver.reserve(str(number), 1, 0, blocks, num_tokens)
        except (ValueError, KvferryError) as error:
            return Reserved(number, b"", str(error))
        self._blocks[number] = blocks
        return Reserved(number, ticket.SerializeToString())

    def _on_event(self, at_s: float, event: ReceiveEvent) -> None:
        number = _number(event.handoff_id)
        right, reason = True, ""
        if isinstance(event, Committed):
            # Kept until `Recheck`, as a decoding sequence would: a late writer has time to show itself.
            right = self._pool.holds(number, self._blocks[number])
            self._committed.add(number)
            self._receiver.release(event.handoff_id)
        elif isinstance(event, Failed):
            reason = event.error.message
            self._quarantines[number] = self._pool.manager.quarantine(str(number))
        elif isinstance(event, Fenced):
            self._pool.manager.release_quarantine(self._quarantines.pop(number))
            self._pool.give_back(self._blocks.pop(number))
        self._tell(Happened(type(event).__name__, number, at_s, right, reason))

    def _recheck(self) -> Rechecked:
        changed = tuple(n for n in sorted(self._committed) if not self._pool.holds(n, self._blocks[n]))
        for number in self._committed:
            self._pool.manager.free(str(number))
            self._pool.give_back(self._blocks.pop(number))
        self._committed.clear()
        return Rechecked(changed)

"""The prefill worker's end of hand-offs.

1. `open` takes a ticket; a link to its decode worker is made if there is none, and the hand-off opened on it.
2. `push` queues pages that are final; the link's writer fingerprints and writes them, run by run.
3. `commit` sends the commit record when the last page is out.       4. The decode worker accepts: `Sent`, `Drained`.
Failure exits: `abort`, the deadline, the decode worker's refusal or Abort, a broken or silent link. All of them lead to
`Failed` and, when no thread reads the local pool for it any more, `Drained`. What may happen when is decided in
send_table.py; here are the threads and bytes.

Threads: one timer, and for each link one that connects and then writes, and one that reads.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kv_cache.layout import KVDtype
from kv_transfer.backlog import DEFAULT_MAX_BACKLOG_BYTES
from kv_transfer.choice import Pair
from kv_transfer.convert import wire_layout
from kv_transfer.end_facts import end_facts
from kv_transfer.events import CommitRecord, Drained, EventDelivery, Failed, SendEvent, Sent
from kv_transfer.faults import FaultPlan, PayloadFaults
from kv_transfer.fingerprinter import Fingerprinter
from kv_transfer.handoff import (
    CloseLink,
    Effect,
    Failure,
    Post,
    ReportDrained,
    ReportFailed,
    ReportRoom,
    ReportSent,
    Wake,
)
from kv_transfer.handshake import greet
from kv_transfer.identity import Identity
from kv_transfer.outlet import Backoff, LinkView, Outlet, PeerKey
from kv_transfer.pages import PageRun
from kv_transfer.payload import PagePusher
from kv_transfer.send_table import SendTable
from kv_transfer.talk import GreetingRefused, Talk
from kv_transfer.tickets import outbound_handoff
from kv_transfer.timer import DueTimer
from kv_transfer.transport import Channel, LinkError, Network, Transport, TransportError, choose_transports
from kv_transfer.transport_tcp import TcpNetwork
from kv_transfer.wire import decode_from_receiver
from kvferry_rpc import internal_pb2
from kvferry_rpc.common_pb2 import ErrorCode
from runtime.clock import Clock
from runtime.errors import KvferryError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SenderSnapshot:
    """Hand-offs not yet drained, and for each decode worker linked now how payload goes there."""

    handoffs: int
    transports: dict[str, LinkView]


class HandoffSender:
    """Pushes KV blocks of a prefill worker into the pools of decode workers.

    Events of one hand-off: `Sent` or `Failed`, then `Drained`; exactly one of each pair for every `open` that returned.
    `on_event` is called from sender threads, or from a thread inside one of the methods; never with a lock held, one
    call at a time, in order. It must not block; what it raises is logged and the event is lost.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        transports: Sequence[str] = ("shm", "tcp"),
        forced: str | None = None,
        clock: Clock,
        on_event: Callable[[SendEvent], None],
        network: Network | None = None,
        io_timeout_s: float = 10.0,
        faults: FaultPlan | None = None,
        wire_dtype: KVDtype | None = None,
        max_backlog_bytes: int = DEFAULT_MAX_BACKLOG_BYTES,
        on_backlog: Callable[[], None] | None = None,
        fingerprinter: Fingerprinter | None = None,
    ) -> None:
        """Raises ValueError for a transport that the network does not have. `fingerprinter`: None for the best.

        `wire_dtype`: element type of pages on their way, where it is narrower than that of the receiver's pool and the
        transport is not one-sided. `on_backlog` is called as `on_event` is, whenever a link that had
        `max_backlog_bytes` to write has less again; see `may_push`.
        """
        self._identity = identity
        self._layout = identity.layout
        self._clock = clock
        self._network = network or TcpNetwork()
        self._io_timeout_s = io_timeout_s
        self._transports = choose_transports(self._network, transports if forced is None else (forced,))
        self._facts = end_facts(tuple(self._transports))
        self._wire_dtype = wire_dtype
        self._on_backlog = on_backlog
        self._has_room = False
        self._pusher = PagePusher(identity, PayloadFaults(faults or FaultPlan()), io_timeout_s, fingerprinter)
        self._events: EventDelivery[SendEvent] = EventDelivery(on_event)
        self._table = SendTable(answer_timeout_s=io_timeout_s, max_backlog_bytes=max_backlog_bytes)
        self._changed = threading.Condition()  # Guards the table and what follows.
        self._outlets: dict[PeerKey, Outlet] = {}
        self._backoff = Backoff()
        self._links: dict[int, Outlet] = {}
        self._closing = False
        self._timer = DueTimer("kv-renew", clock, next_due=self._next_due, act=self.sweep)
        self._timer.start()

    # ---- for the worker

    def open(self, ticket: internal_pb2.Ticket, num_tokens: int, deadline: float) -> None:
        """Begin the hand-off that `ticket` names; its lease is renewed from now on. Any thread; never blocks.

        `num_tokens` is the length of the prompt; its blocks must be those of the ticket. `deadline` is a time of the
        sender's clock. What goes wrong on the way to the peer arrives as `Failed`. Raises ValueError for a ticket that
        is for another prompt, makes no sense or is open already; KvferryError (HANDOFF_FAILED) when the pool's pages
        cannot become those of the ticket's, (UNAVAILABLE) while closing.
        """
        handoff = outbound_handoff(ticket, self._layout, num_tokens, deadline)
        key = (ticket.data_address, ticket.decode_worker_id, ticket.incarnation)
        with self._changed:
            if self._closing:
                raise KvferryError(ErrorCode.UNAVAILABLE, "the prefill worker is closing")
            if ticket.handoff_id in self._table:
                raise ValueError(f"hand-off {ticket.handoff_id} is open already")
            outlet = self._outlets.get(key)
            if outlet is None or outlet.link.broken is not None:  # Broken: its threads are on their way out.
                outlet = self._dial(key, ticket)
            handoff.link = outlet.link.number
            self._apply(self._table.open(handoff, self._clock.now()))
            if outlet.thread is None:
                self._start(outlet)
        self._timer.nudge()
        self._deliver()

    def push(self, handoff_id: str, first_block: int, block_ids: Sequence[int], layers: range) -> None:
        """KV of prompt blocks first_block, first_block + 1, ... in these layers is final, and stays so until `Drained`.

        block_ids are the local blocks that hold it; all are blocks of the local size. Never blocks. Those that the
        ticket does not ask for are ignored; so is a hand-off that is over. A block that comes from elsewhere than
        before fails it. Raises ValueError out of range, or after `commit`. Any thread.
        """
        num_blocks = self._identity.num_blocks
        for block_id in block_ids:
            if not 0 <= block_id < num_blocks:
                raise ValueError(f"block {block_id} is outside the pool of {num_blocks} blocks")
        self._run(lambda: self._table.push(handoff_id, first_block, block_ids, layers))

    def backlog_bytes(self, handoff_id: str) -> int:
        """Bytes pushed and not yet written on the link of this hand-off, by all its hand-offs. Any thread; cheap."""
        with self._changed:
            return self._table.backlog_bytes(handoff_id)

    def may_push(self, handoff_id: str) -> bool:
        """Whether that link has fewer than `max_backlog_bytes`; True for a hand-off that is over. Any thread; cheap."""
        with self._changed:
            return self._table.may_push(handoff_id)

    def commit(self, handoff_id: str, record: CommitRecord) -> None:
        """Everything was pushed: send the commit record when the last byte is out. Never blocks. Any thread.

        A page never pushed fails the hand-off. A hand-off that is over is ignored. Raises ValueError the second time.
        """
        self._run(lambda: self._table.commit(handoff_id, record))

    def abort(self, handoff_id: str, reason: str) -> None:
        """Give up: `Failed` (CANCELLED) and `Drained` follow. Any thread; never blocks; ignored when it is over."""
        self._run(lambda: self._table.abort(handoff_id, Failure(reason, ErrorCode.CANCELLED)))

    def sweep(self, now: float) -> None:
        """Renew leases and fail what is past its deadline. Any thread; the sender's own timer thread calls it too."""
        self._run(lambda: self._table.expire(now))

    def snapshot(self) -> SenderSnapshot:
        """What is held now. Any thread."""
        with self._changed:
            return SenderSnapshot(len(self._table), {o.worker_id: o.view for o in self._outlets.values()})

    def close(self, timeout_s: float) -> None:
        """Fail what is open, tell the peers, close links, end all threads. Idempotent. Close it before its pool."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._closing = True
        self._run(lambda: self._table.abort_all(Failure("the prefill worker is closing", ErrorCode.CANCELLED)))
        with self._changed:
            self._changed.wait_for(lambda: len(self._table) == 0, deadline - time.monotonic())
            outlets = list(self._links.values())
        for outlet in outlets:
            outlet.link.finish()  # What is posted goes out first: the peers learn that nobody writes any more.
        half = (deadline - time.monotonic()) / 2
        for patience_s in (half, half):
            until = time.monotonic() + max(0.0, patience_s)
            for outlet in outlets:
                if outlet.thread is not None:
                    outlet.thread.join(max(0.0, until - time.monotonic()))
            for outlet in outlets:
                outlet.link.break_off("the prefill worker is closing")
        self._timer.close(max(0.0, deadline - time.monotonic()))

    # ---- links

    def _dial(self, key: PeerKey, ticket: internal_pb2.Ticket) -> Outlet:
        outlet = Outlet(key, ticket, self._io_timeout_s)
        self._outlets[key] = self._links[outlet.link.number] = outlet
        self._table.link_added(outlet.link.number)
        return outlet

    def _start(self, outlet: Outlet) -> None:
        """Begin to make the link. Soon after it could not be made, fail what was opened on it instead."""
        refusal = self._backoff.refusal(outlet.key, time.monotonic())
        if refusal is None:
            thread = threading.Thread(target=self._serve, args=(outlet,), name="kv-send", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the process has no thread left to give
                refusal = Failure(f"no link to {outlet.worker_id}: {error}")
            else:
                outlet.thread = thread
                return
        self._apply(self._table.link_lost(outlet.link.number, refusal))
        del self._outlets[outlet.key], self._links[outlet.link.number]

    def _serve(self, outlet: Outlet) -> None:
        """One link from its first packet to its end."""
        channel: Channel | None = None
        try:
            channel = self._network.connect(outlet.address, self._io_timeout_s)
            outlet.link.attach(channel)
            transport = self._greet(outlet, channel)
        except LinkError as error:
            secret_wrong = isinstance(error, GreetingRefused) and error.code == ErrorCode.UNAUTHENTICATED
            code = ErrorCode.UNAUTHENTICATED if secret_wrong else ErrorCode.HANDOFF_FAILED
            self._unreachable(outlet, Failure(f"no link to {outlet.worker_id} at {outlet.address}: {error}", code))
        except Exception as error:
            _log.exception("making a link to %s failed", outlet.worker_id)
            self._unreachable(outlet, Failure(f"a defect while making a link: {error!r}", ErrorCode.INTERNAL))
        else:
            self._talk(outlet, channel, transport)
        finally:
            if channel is not None:
                channel.stop()
                channel.close()
            self._pusher.release(outlet.link.number)
            with self._changed:
                del self._links[outlet.link.number]
                self._changed.notify_all()

    def _greet(self, outlet: Outlet, channel: Channel) -> Transport:
        """Prove, check and choose. Raises LinkError."""
        talk = Talk(channel, self._io_timeout_s)
        peer = greet(talk, self._identity)
        if (peer.worker_id, peer.incarnation) != (outlet.worker_id, outlet.incarnation):
            raise LinkError(f"the ticket is of another life of {outlet.worker_id} than {peer.worker_id} lives now")
        pair, target = Pair.of(self._facts, peer.facts), peer.layout
        wire = wire_layout(target, self._wire_dtype)
        memory = self._pusher.memory(outlet.link.number, target, wire)
        return outlet.reach(talk, self._transports, pair, memory, target=target, wire=wire)

    def _talk(self, outlet: Outlet, channel: Channel, transport: Transport) -> None:
        link = outlet.link
        link.one_sided = transport.one_sided
        reader = threading.Thread(target=self._read, args=(outlet,), name="kv-listen", daemon=True)
        try:
            reader.start()
        except RuntimeError as error:  # the process has no thread left to give
            outlet.payload().close()
            self._unreachable(outlet, Failure(f"no link to {outlet.worker_id}: {error}"))
            return
        with self._changed:
            self._backoff.succeeded(outlet.key)
            now, view = self._clock.now(), outlet.view
            self._apply(
                self._table.link_ready(
                    link.number,
                    transport.name,
                    now,
                    detail=view.detail,
                    expected=view.expected,
                    wire=outlet.wire(),
                    write_bytes=transport.write_bytes,
                )
            )
        self._deliver()
        self._timer.nudge()
        link.run_writer(lambda: self._work(outlet))
        # Only now is it true that nothing of ours is in the peer's pool: closing the channel says so.
        outlet.payload().close()
        channel.stop()
        reader.join()

    def _read(self, outlet: Outlet) -> None:
        end = outlet.link.run_reader(lambda data, size: self._handle(outlet, data), max_payload_bytes=0)
        if (defect := outlet.defect) is not None:
            # The peer notices the closed link at once, maybe before the thread that met the defect comes to say so.
            self._run(lambda: self._table.abort(*defect))
        self._lost(outlet, Failure(f"the link to {outlet.worker_id} was lost: {outlet.link.broken or end}"))

    def _handle(self, outlet: Outlet, data: bytes) -> None:
        message = decode_from_receiver(data)
        self._run(lambda: self._table.handle(outlet.link.number, message, self._clock.now()))

    def _unreachable(self, outlet: Outlet, failure: Failure) -> None:
        with self._changed:
            self._backoff.failed(outlet.key, failure, time.monotonic())
        self._lost(outlet, failure)

    def _lost(self, outlet: Outlet, failure: Failure) -> None:
        with self._changed:
            if self._outlets.get(outlet.key) is outlet:
                del self._outlets[outlet.key]
            level = logging.INFO if self._closing else logging.WARNING
        _log.log(level, "%s", failure.message)
        self._run(lambda: self._table.link_lost(outlet.link.number, failure))

    # ---- payload

    def _work(self, outlet: Outlet) -> bool:
        """Do one thing that the table wants done on this link; False when there is nothing."""
        with self._changed:
            work = self._table.next_work(outlet.link.number, self._clock.now())
        if work is None:
            return False
        handoff = work.handoff
        if work.run is None:
            checksums, digest = self._pusher.fold(handoff)
            self._run(lambda: self._table.commit_built(handoff, checksums, digest))
            return True
        written: list[PageRun] = []
        try:
            self._pusher.write(outlet.payload(), handoff, work.run, written)
        except LinkError as error:
            outlet.link.break_off(str(error))
        except TransportError as error:
            failure = Failure(f"a write failed: {error}")
            self._run(lambda: self._table.abort(handoff.handoff_id, failure))
        except Exception as error:
            _log.exception("writing KV of %s failed", handoff.handoff_id)
            failure = Failure(f"a defect while writing: {error!r}", ErrorCode.INTERNAL)
            outlet.defect = (handoff.handoff_id, failure)
            outlet.payload().close()  # What was begun may be under way: it must not be when `Drained` is said.
            self._run(lambda: self._table.abort(handoff.handoff_id, failure))
            outlet.link.break_off(failure.message)
        self._run(lambda: self._table.work_done(handoff, written, self._clock.now()))
        return True

    # ---- the table and its effects

    def _next_due(self) -> float | None:
        with self._changed:
            return self._table.next_due()

    def _run(self, decide: Callable[[], list[Effect]]) -> None:
        """Let the table decide, under the lock, and carry out what it says, in order."""
        with self._changed:
            self._apply(decide())
        self._deliver()

    def _deliver(self) -> None:
        """Tell the worker what there is to tell. Called with no lock held."""
        self._events.deliver()
        with self._changed:
            has_room, self._has_room = self._has_room, False
        if has_room and self._on_backlog is not None:
            try:
                self._on_backlog()
            except Exception:
                _log.exception("the receiver of news of the backlog failed")

    def _apply(self, effects: list[Effect]) -> None:
        self._has_room |= any(isinstance(effect, ReportRoom) for effect in effects)
        for effect in effects:
            outlet = self._links.get(effect.link) if isinstance(effect, Post | Wake | CloseLink) else None
            if outlet is None:
                continue
            if isinstance(effect, Post):
                outlet.link.post(effect.message)
            elif isinstance(effect, Wake):
                outlet.link.wake()
            elif isinstance(effect, CloseLink):
                outlet.link.break_off(effect.reason)
        self._events.queue(_events(effects))
        self._changed.notify_all()


def _events(effects: Iterable[Effect]) -> Iterable[SendEvent]:
    for effect in effects:
        if isinstance(effect, ReportSent):
            yield Sent(effect.handoff_id, effect.stats)
        elif isinstance(effect, ReportFailed):
            yield Failed(effect.handoff_id, KvferryError(effect.failure.code, effect.failure.message))
        elif isinstance(effect, ReportDrained):
            yield Drained(effect.handoff_id)

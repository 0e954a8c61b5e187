"""The decode worker's end of hand-offs.

1. `reserve` holds a place and makes the ticket.             4. A Commit has the content verified, then `Committed`.
2. A sender dials in, greets, opens the hand-off.            5. `release` forgets it.
3. Payload lands: received here (tcp) or written by the sender alone (shm).
Failure exits: `abort`, the sender's Abort or Fence, a broken link, the lease. All of them lead to `Failed` and, when no
byte can land any more, `Fenced`. What may happen when is decided in receive_table.py; here are the threads and bytes.

Threads: one that accepts, one timer, and for each link one that reads and one that writes.
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kv_transfer import fingerprint
from kv_transfer.events import Committed, EventDelivery, Failed, Fenced, ReceiveEvent
from kv_transfer.handoff import (
    CloseLink,
    Effect,
    Failure,
    Post,
    ReportCommitted,
    ReportFailed,
    ReportFenced,
    Verify,
)
from kv_transfer.handshake import welcome
from kv_transfer.identity import Identity
from kv_transfer.link import Link
from kv_transfer.messages import Abort, Commit, Fence, Open, Opened, Refused, Renew, SenderMessage, Write
from kv_transfer.pages import max_write_bytes, views
from kv_transfer.receive_table import ReceiveCounts, ReceiveTable
from kv_transfer.timer import DueTimer
from kv_transfer.transport import Channel, LinkError, Listener, Network, PeerGone, choose_transports
from kv_transfer.transport_tcp import TcpNetwork
from kv_transfer.wire import decode_from_sender
from kvferry_rpc import internal_pb2
from kvferry_rpc.common_pb2 import ErrorCode
from runtime.clock import Clock
from runtime.errors import KvferryError

MAX_HANDOFFS = 4096
MAX_LINKS = 512

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReceiverSnapshot:
    """How many hand-offs hold something, and how many links are up. All zero when idle and alone."""

    handoffs: ReceiveCounts
    links: int


class HandoffReceiver:
    """Accepts KV blocks into the pool of a decode worker.

    Events of one hand-off, in this order: `Committed` alone, or `Failed` then `Fenced`. Exactly one of the two
    sequences arrives for every `reserve`, whatever the peer does; only `Fenced` may take long (a stopped process that
    has our memory mapped) or, at `close`, not come.
    `on_event` is called from receiver threads, or from a thread inside `abort`, `sweep` or `close`; never with a lock
    held, one call at a time, in order. It must not block; what it raises is logged and the event is lost.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        bind_host: str,
        port: int = 0,
        transports: Sequence[str] = ("shm", "tcp"),
        lease_s: float = 10.0,
        verify_checksums: bool = True,
        clock: Clock,
        on_event: Callable[[ReceiveEvent], None],
        network: Network | None = None,
        io_timeout_s: float = 10.0,
    ) -> None:
        """Raises ValueError for a transport that the network does not have."""
        self._identity = identity
        self._layout = identity.layout
        self._bind = (bind_host, port)
        self._lease_s = lease_s
        self._clock = clock
        self._network = network or TcpNetwork()
        self._io_timeout_s = io_timeout_s
        self._transports = choose_transports(self._network, transports)
        self._events: EventDelivery[ReceiveEvent] = EventDelivery(on_event)
        self._table = ReceiveTable(
            num_blocks=identity.num_blocks,
            num_layers=self._layout.num_layers,
            page_bytes=self._layout.page_bytes,
            incarnation=identity.incarnation,
            lease_s=lease_s,
            verify=verify_checksums,
        )
        self._changed = threading.Condition()  # Guards the table and what follows.
        self._listener: Listener | None = None
        self._acceptor = threading.Thread(target=self._accept, name="kv-accept", daemon=True)
        self._links: dict[int, Link] = {}
        self._writers: dict[int, threading.Thread] = {}
        self._channels: dict[Channel, threading.Thread] = {}
        self._closing = False
        self._abandoned = False
        self._timer = DueTimer("kv-lease", clock, next_due=self._next_expiry, act=self.sweep)

    # ---- for the worker

    def start(self) -> None:
        """Bind, listen, start the threads. Once. Raises OSError when the address cannot be had."""
        self._listener = self._network.listen(*self._bind)
        self._acceptor.start()
        self._timer.start()

    @property
    def address(self) -> str:
        """host:port where KV is accepted. Raises RuntimeError before `start`."""
        return self._listening().address

    def reserve(
        self, request_id: str, attempt: int, first_block: int, block_ids: Sequence[int], num_tokens: int
    ) -> internal_pb2.Ticket:
        """Hold a place for blocks first_block, first_block + 1, ... of a prompt of num_tokens tokens.

        block_ids (the destination, local ids) may be empty: everything is cached here and only the commit record
        travels. Raises ValueError for ids out of range, named twice or still writable by another hand-off, or when
        first_block + len(block_ids) is not the number of blocks of the prompt; KvferryError (OVERLOADED) when too many
        hand-offs are open, (UNAVAILABLE) while closing. Any thread, after `start`.
        """
        needed = self._layout.blocks_for(num_tokens)
        if num_tokens < 1 or first_block < 0 or first_block + len(block_ids) != needed:
            raise ValueError(f"{num_tokens} tokens fill {needed} blocks, not {first_block} + {len(block_ids)}")
        handoff_id = f"{request_id}/{attempt}/{secrets.token_hex(8)}"
        secret = secrets.token_bytes(16)
        with self._changed:
            if self._closing:
                raise KvferryError(ErrorCode.UNAVAILABLE, "the decode worker is closing")
            if len(self._table) >= MAX_HANDOFFS:
                raise KvferryError(ErrorCode.OVERLOADED, f"{MAX_HANDOFFS} hand-offs are open", retry_after_ms=1000)
            self._table.reserve(
                handoff_id,
                secret=secret,
                attempt=attempt,
                first_block=first_block,
                block_ids=block_ids,
                num_tokens=num_tokens,
                now=self._clock.now(),
            )
        self._timer.nudge()
        offers = ((name, transport.offer(self._identity.pool)) for name, transport in self._transports.items())
        return internal_pb2.Ticket(
            handoff_id=handoff_id,
            attempt=attempt,
            decode_worker_id=self._identity.worker_id,
            incarnation=self._identity.incarnation,
            secret=secret,
            data_address=self.address,
            layout=self._layout.to_proto(),
            lease_ms=round(self._lease_s * 1000),
            first_block=first_block,
            block_ids=block_ids,
            transports=[internal_pb2.TransportOffer(name=n, descriptor=d) for n, d in offers if d is not None],
        )

    def abort(self, handoff_id: str, reason: str) -> bool:
        """Give up: `Failed` (CANCELLED) and `Fenced` follow, at once when nobody can be writing. Any thread.

        Never blocks. Returns False, and changes nothing, when the hand-off is over or unknown: if it was just
        committed, its `Committed` was delivered or is on its way, and the caller owns the blocks.
        """
        return bool(self._run(lambda: self._table.abort(handoff_id, Failure(reason, ErrorCode.CANCELLED))))

    def release(self, handoff_id: str) -> None:
        """Forget a committed hand-off. Any thread; ids that are unknown or not committed are ignored."""
        with self._changed:
            self._table.release(handoff_id)

    def sweep(self, now: float) -> None:
        """Fail the hand-offs whose lease has run out. Any thread; the receiver's own timer thread calls it too."""
        self._run(lambda: self._table.expire(now))

    def snapshot(self) -> ReceiverSnapshot:
        """What is held now. Any thread."""
        with self._changed:
            return ReceiverSnapshot(self._table.counts(), len(self._links))

    def close(self, timeout_s: float) -> None:
        """Fail what is open, fence what can be fenced within the time, close links, end all threads. Idempotent.

        Only a one-sided writer that does not answer (a stopped process) can be left unfenced: the pool must not be
        reused after that. Close the receiver before its pool.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._listener is None:
            return
        self._listener.close()
        self._run(lambda: self._table.abort_all(Failure("the decode worker is closing", ErrorCode.CANCELLED)))
        with self._changed:
            links, writers = list(self._links.values()), list(self._writers.values())
        for link in links:
            link.finish()  # What was promised to the peers goes out before the channels stop.
        _join(writers, deadline)
        with self._changed:
            self._changed.wait_for(lambda: self._abandoned or self._is_fenced(), deadline - time.monotonic())
            if not self._is_fenced() and not self._abandoned:
                _log.error("closing although a peer that does not answer may still write into the pool")
            self._abandoned = True
            channels = dict(self._channels)
        for channel in channels:
            channel.stop()
        _join([*channels.values(), self._acceptor], deadline)
        self._timer.close(deadline - time.monotonic())

    # ---- links

    def _listening(self) -> Listener:
        if self._listener is None:
            raise RuntimeError("the receiver was not started")
        return self._listener

    def _accept(self) -> None:
        listener = self._listening()
        while True:
            try:
                channel = listener.accept()
            except LinkError as error:
                with self._changed:
                    if self._changed.wait_for(lambda: self._closing, timeout=0.1):
                        return
                _log.warning("%s", error)
                continue
            thread = threading.Thread(target=self._serve, args=(channel,), name="kv-receive", daemon=True)
            with self._changed:
                accepted = not self._closing and len(self._channels) < MAX_LINKS
                try:
                    if accepted:
                        thread.start()  # it first needs the lock that we hold, when it ends
                        self._channels[channel] = thread
                except RuntimeError as error:  # the process has no thread left to give: refuse, and go on accepting
                    accepted = False
                    _log.warning("refused a link from %s: %s", channel.peer, error)
            if not accepted:
                channel.stop()
                channel.close()

    def _serve(self, channel: Channel) -> None:
        """One link from its greeting to its end."""
        try:
            peer = welcome(channel, self._identity, self._io_timeout_s)
        except LinkError as error:
            _log.warning("refused a link from %s: %s", channel.peer, error)
        else:
            self._talk(channel, peer.worker_id)
        finally:
            channel.stop()
            with self._changed:
                self._channels.pop(channel, None)
            channel.close()

    def _talk(self, channel: Channel, worker_id: str) -> None:
        link = Link(sends_payload=False, io_timeout_s=self._io_timeout_s)
        link.attach(channel)
        writer = threading.Thread(target=self._write, args=(link, channel), name="kv-answer", daemon=True)
        with self._changed:
            self._links[link.number], self._writers[link.number] = link, writer
            writer.start()
        end = link.run_reader(lambda data, size: self._handle(link, channel, data, size), max_write_bytes(self._layout))
        level = logging.INFO if isinstance(end, PeerGone) else logging.WARNING
        _log.log(level, "the link from %s at %s ended: %s", worker_id, channel.peer, link.broken)
        self._run(lambda: self._table.link_failed(link.number, link.broken or str(end)))
        with self._changed:
            wait = self._table.must_outlive(link.number)
        if wait and not isinstance(end, PeerGone):
            channel.wait_until_peer_closes()
        # If it was we who stopped the channel, at close, we know nothing about the peer.
        self._run(lambda: [] if self._abandoned else self._table.link_closed(link.number))
        with self._changed:
            del self._links[link.number], self._writers[link.number]
        channel.stop()
        writer.join()

    def _write(self, link: Link, channel: Channel) -> None:
        link.run_writer(lambda: False)
        if not link.one_sided:
            channel.stop()

    def _handle(self, link: Link, channel: Channel, data: bytes, size: int) -> None:
        """One frame from the sender. Raises LinkError to end the link."""
        message = decode_from_sender(data)
        if isinstance(message, Write):
            self._receive(link, channel, message, size)
            return
        if size:
            raise LinkError(f"a payload behind {type(message).__name__}")
        for effect in self._run(lambda: self._answer(link, message, self._clock.now())):
            if isinstance(effect, Verify):
                self._verify(effect)

    def _answer(self, link: Link, message: SenderMessage, now: float) -> list[Effect]:
        if isinstance(message, Open):
            transport = self._transports.get(message.transport)
            if transport is None:
                return [Post(link.number, Refused(message.handoff_id, f"{message.transport} is not offered here"))]
            effects = self._table.open(link.number, message, one_sided=transport.one_sided, now=now)
            if transport.one_sided and effects == [Post(link.number, Opened(message.handoff_id))]:
                link.one_sided = True  # From here on only the peer's own close tells that it has stopped writing.
            return effects
        if isinstance(message, Commit):
            return self._table.commit(link.number, message, now)
        if isinstance(message, Renew):
            return self._table.renew(link.number, message, now)
        if isinstance(message, Abort):
            return self._table.peer_abort(link.number, message)
        assert isinstance(message, Fence)
        return self._table.fence(link.number, message)

    def _receive(self, link: Link, channel: Channel, message: Write, size: int) -> None:
        """Take a payload: into the pool if the table allows it, else nowhere."""
        if size != len(message.block_ids) * message.num_layers * self._layout.page_bytes:
            raise LinkError(f"a write of {size} bytes that names other pages")
        allowed = False

        def begin() -> list[Effect]:
            nonlocal allowed
            allowed, effects = self._table.begin_write(link.number, message, self._clock.now())
            return effects

        self._run(begin)
        if not allowed:
            channel.skip_payload(size, self._io_timeout_s)
            return
        layers = range(message.layer, message.layer + message.num_layers)
        landed = False
        try:
            into = views(self._identity.pool.buffer, self._layout, message.block_ids, layers)
            channel.receive_payload(into, self._io_timeout_s)
            landed = True
        finally:
            self._run(lambda: self._table.end_write(message, landed=landed, now=self._clock.now()))

    def _verify(self, task: Verify) -> None:
        """Compare what lies in the pool with what the sender says it sent."""
        digest, mismatch = fingerprint.check_blocks(
            self._identity.pool.buffer,
            self._layout,
            task.block_ids,
            base_seed=fingerprint.seed(task.handoff_id, task.attempt),
            first_block=task.first_block,
            expected=task.checksums,
        )
        now = self._clock.now()
        self._run(lambda: self._table.verified(task.handoff_id, digest=digest, mismatch=mismatch, now=now))

    # ---- the table and its effects

    def _is_fenced(self) -> bool:
        return self._table.counts().quarantined == 0

    def _next_expiry(self) -> float | None:
        with self._changed:
            return self._table.next_expiry()

    def _run(self, decide: Callable[[], list[Effect]]) -> list[Effect]:
        """Let the table decide, under the lock, and carry out what it says, in order. Verify is left to the caller."""
        with self._changed:
            effects = decide()
            for effect in effects:
                if isinstance(effect, Post) and effect.link in self._links:
                    self._links[effect.link].post(effect.message)
                elif isinstance(effect, CloseLink) and effect.link in self._links:
                    self._links[effect.link].break_off(effect.reason)
            self._events.queue(_events(effects))
            self._changed.notify_all()
        self._events.deliver()
        return effects


def _join(threads: Iterable[threading.Thread], deadline: float) -> None:
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def _events(effects: Iterable[Effect]) -> Iterable[ReceiveEvent]:
    for effect in effects:
        if isinstance(effect, ReportCommitted):
            yield Committed(effect.handoff_id, effect.record, effect.stats)
        elif isinstance(effect, ReportFailed):
            yield Failed(effect.handoff_id, KvferryError(effect.failure.code, effect.failure.message))
        elif isinstance(effect, ReportFenced):
            yield Fenced(effect.handoff_id)

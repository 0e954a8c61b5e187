"""The decode worker's end of hand-offs.

1. `reserve` holds a place and makes the ticket.             4. A Commit is compared with what landed: `Committed`.
2. A sender dials in, greets, opens the hand-off.            5. `release` forgets it.
3. Payload lands, received here (tcp, ucx) or written by the sender alone (shm, nixl), and is fingerprinted.
Failure exits: `abort`, the sender's Abort or Fence, a broken link, the lease. All of them lead to `Failed` and, when no
byte can land any more, `Fenced`. What may happen when is decided in receive_table.py; here are the threads and bytes.

Threads: one that accepts, one timer, and for each link one that reads and one that writes.
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from kv_transfer.attachment import agree
from kv_transfer.end_facts import end_facts
from kv_transfer.events import Committed, EventDelivery, Failed, Fenced, ReceiveEvent
from kv_transfer.fingerprint import Fingerprints
from kv_transfer.fingerprinter import Fingerprinter, best_fingerprinter
from kv_transfer.handoff import (
    CloseLink,
    Effect,
    Failure,
    Post,
    ReportCommitted,
    ReportFailed,
    ReportFenced,
    ReportRefused,
)
from kv_transfer.handshake import welcome
from kv_transfer.identity import Identity
from kv_transfer.inlet import Inlet
from kv_transfer.messages import Abort, Commit, Fence, Open, Renew, SenderMessage, Write
from kv_transfer.receive_table import ReceiverSnapshot, ReceiveTable
from kv_transfer.refusals import RefusalLog
from kv_transfer.talk import Talk
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
        fingerprinter: Fingerprinter | None = None,
    ) -> None:
        """Raises ValueError for a transport that the network does not have. `fingerprinter`: None for the best."""
        self._identity = identity
        self._layout = identity.layout
        self._bind = (bind_host, port)
        self._lease_s = lease_s
        self._clock = clock
        self._network = network or TcpNetwork()
        self._io_timeout_s = io_timeout_s
        self._transports = choose_transports(self._network, transports)
        self._facts = end_facts(tuple(self._transports))
        self._fingerprinter = (fingerprinter or best_fingerprinter()) if verify_checksums else None
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
        self._refusals = RefusalLog()
        self._listener: Listener | None = None
        self._acceptor = threading.Thread(target=self._accept, name="kv-accept", daemon=True)
        self._inlets: dict[int, Inlet] = {}
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
            refused = {kind.value: count for kind, count in self._table.refused.items()}
            return ReceiverSnapshot(self._table.counts(), len(self._inlets), refused)

    def close(self, timeout_s: float) -> bool:
        """Fail what is open, fence what can be fenced within the time, close links, end all threads. Idempotent.

        Only a one-sided writer that does not answer (a stopped process) can be left unfenced: False, and the pool must
        not be reused. Close the receiver before its pool.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._listener is None:
            return True
        self._listener.close()
        self._run(lambda: self._table.abort_all(Failure("the decode worker is closing", ErrorCode.CANCELLED)))
        with self._changed:
            inlets, writers = list(self._inlets.values()), list(self._writers.values())
        for inlet in inlets:
            inlet.link.finish()  # What was promised to the peers goes out before the channels stop.
        _join(writers, deadline)
        with self._changed:
            if not self._changed.wait_for(lambda: self._abandoned or self._is_fenced(), deadline - time.monotonic()):
                _log.error("closing although a peer that does not answer may still write into the pool")
            self._abandoned = True
            channels, inlets = dict(self._channels), list(self._inlets.values())
        for channel in channels:
            channel.stop()
        for inlet in inlets:
            inlet.link.break_off("the decode worker is closing")
        _join([*channels.values(), self._acceptor], deadline)
        self._timer.close(deadline - time.monotonic())
        with self._changed:
            return self._is_fenced()

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
            talk = Talk(channel, self._io_timeout_s)
            peer = welcome(talk, self._identity, self._facts)
            attachment = agree(talk, self._transports, self._identity)
        except LinkError as error:
            _log.warning("refused a link from %s: %s", channel.peer, error)
        except Exception:
            _log.exception("greeting %s failed", channel.peer)
        else:
            inlet = Inlet(attachment, self._identity, self._io_timeout_s, self._fingerprinter)
            self._talk(inlet, channel, peer.worker_id)
        finally:
            channel.stop()
            with self._changed:
                self._channels.pop(channel, None)
            channel.close()

    def _talk(self, inlet: Inlet, channel: Channel, worker_id: str) -> None:
        link = inlet.link
        link.attach(channel)
        _log.info("KV comes from %s over %s", worker_id, inlet.transport)
        writer = threading.Thread(target=self._write, args=(inlet, channel), name="kv-answer", daemon=True)
        with self._changed:
            try:
                writer.start()
            except RuntimeError as error:  # the process has no thread left to give
                _log.warning("refused a link from %s: %s", channel.peer, error)
                inlet.close()
                return
            self._inlets[link.number], self._writers[link.number] = inlet, writer
            self._refusals.begin(link.number, worker_id)
        end = link.run_reader(lambda data, size: self._handle(inlet, data, size), inlet.max_payload_bytes)
        level = logging.INFO if isinstance(end, PeerGone) else logging.WARNING
        _log.log(level, "the link from %s at %s ended: %s", worker_id, channel.peer, link.broken)
        self._run(lambda: self._table.link_failed(link.number, link.broken or str(end)))
        with self._changed:
            wait = self._table.must_outlive(link.number)
        inlet.close()  # Before the wait: whoever is writing to us by a library that we end here finds out now.
        if wait and not isinstance(end, PeerGone):
            channel.wait_until_peer_closes()
        # If it was we who stopped the channel, at close, we know nothing about the peer.
        self._run(lambda: [] if self._abandoned else self._table.link_closed(link.number))
        with self._changed:
            del self._inlets[link.number], self._writers[link.number]
            self._refusals.forget(link.number)
        channel.stop()
        writer.join()

    def _write(self, inlet: Inlet, channel: Channel) -> None:
        inlet.link.run_writer(lambda: False)
        if not inlet.one_sided:
            channel.stop()

    def _handle(self, inlet: Inlet, data: bytes, size: int) -> None:
        """One frame from the sender. Raises LinkError to end the link."""
        message = decode_from_sender(data)
        if isinstance(message, Write):
            self._receive(inlet, message, size)
            return
        if size:
            raise LinkError(f"a payload behind {type(message).__name__}")
        self._run(lambda: self._answer(inlet, message, self._clock.now()))

    def _answer(self, inlet: Inlet, message: SenderMessage, now: float) -> list[Effect]:
        number = inlet.link.number
        if isinstance(message, Open):
            return self._table.open(number, message, transport=inlet.transport, one_sided=inlet.one_sided, now=now)
        if isinstance(message, Commit):
            return self._table.commit(number, message, now)
        if isinstance(message, Renew):
            return self._table.renew(number, message, now)
        if isinstance(message, Abort):
            return self._table.peer_abort(number, message)
        assert isinstance(message, Fence)
        return self._table.fence(number, message)

    def _receive(self, inlet: Inlet, message: Write, announced_bytes: int) -> None:
        """Take a payload: into the pool if the table allows it, else nowhere. What landed is looked at right away."""
        seed: int | None = None

        def begin() -> list[Effect]:
            nonlocal seed
            seed, effects = self._table.begin_write(inlet.link.number, message, self._clock.now())
            return effects

        self._run(begin)
        if seed is None:
            inlet.skip(message, announced_bytes)
            return
        found: Fingerprints = ()
        landed = False
        try:
            found = inlet.receive(message, announced_bytes, seed)
            landed = True
        except LinkError:
            raise
        except Exception:
            inlet.close()  # A defect: what was asked for could land when `Fenced` has been said.
            raise
        finally:
            now = self._clock.now()
            self._run(lambda: self._table.end_write(message, landed=landed, fingerprints=found, now=now))

    # ---- the table and its effects

    def _is_fenced(self) -> bool:
        return self._table.counts().quarantined == 0

    def _next_expiry(self) -> float | None:
        with self._changed:
            return self._table.next_expiry()

    def _run(self, decide: Callable[[], list[Effect]]) -> list[Effect]:
        """Let the table decide, under the lock, and carry out what it says, in order."""
        with self._changed:
            effects = decide()
            for effect in effects:
                if isinstance(effect, Post) and effect.link in self._inlets:
                    self._inlets[effect.link].link.post(effect.message)
                elif isinstance(effect, CloseLink) and effect.link in self._inlets:
                    self._inlets[effect.link].link.break_off(effect.reason)
                elif isinstance(effect, ReportRefused):
                    self._refusals.note(effect.link, effect.handoff_id, effect.kind)
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

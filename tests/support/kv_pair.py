"""A prefill and a decode end in one process, with small pools, recorded events and waits that end."""

import functools
import threading
import time
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from kv_cache.layout import KVCacheLayout, KVDtype
from kv_transfer.end_facts import INSTALL, has_library
from kv_transfer.events import CommitRecord, Committed, Drained, Failed, Fenced, ReceiveEvent, SendEvent, Sent
from kv_transfer.faults import FaultPlan
from kv_transfer.identity import Identity
from kv_transfer.network import build_network
from kv_transfer.receiver import HandoffReceiver
from kv_transfer.region import MemoryRegion
from kv_transfer.sender import HandoffSender
from kv_transfer.transport import Network
from kv_transfer.transport_memory import MemoryNetwork
from kvferry_rpc.internal_pb2 import Ticket
from runtime.clock import SystemClock

LAYOUT = KVCacheLayout(
    model_id="tiny",
    model_revision="abc123",
    num_layers=3,
    num_kv_heads=2,
    head_dim=16,
    block_size=8,
    dtype=KVDtype.FP32,
)
POISON = 0xA5
WAIT_S = 20.0  # Only ever reached by a test that fails.
Event = Committed | Failed | Fenced | Sent | Drained


class Events:
    """Collects events by hand-off, and waits for them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._all: dict[str, list[Event]] = {}

    def __call__(self, event: ReceiveEvent | SendEvent) -> None:
        with self._changed:
            self._all.setdefault(event.handoff_id, []).append(event)
            self._changed.notify_all()

    def of(self, handoff_id: str) -> list[Event]:
        with self._changed:
            return list(self._all.get(handoff_id, []))

    def forget(self) -> None:
        """Drop what was collected."""
        with self._changed:
            self._all.clear()

    def kinds(self, handoff_id: str) -> list[str]:
        return [type(event).__name__ for event in self.of(handoff_id)]

    def wait(self, handoff_id: str, *kinds: type, timeout_s: float = WAIT_S) -> Any:
        """The first event of one of these kinds."""

        def found() -> Event | None:
            return next((event for event in self._all.get(handoff_id, []) if isinstance(event, kinds)), None)

        with self._changed:
            event = self._changed.wait_for(found, timeout_s)
            assert event is not None, f"no {kinds} for {handoff_id}; it has {self._all.get(handoff_id)}"
            return event


def make_identity(
    name: str, num_blocks: int, *, layout: KVCacheLayout = LAYOUT, secret: bytes = b"secret", shared: bool = True
) -> Identity:
    region = MemoryRegion.allocate(layout.pool_bytes(num_blocks), shared=shared)
    return Identity(name, name.encode().ljust(16, b"."), secret, layout, region)


def fill(identity: Identity, seed: int) -> None:
    """Random content in the whole pool."""
    pool = np.frombuffer(identity.pool.buffer, np.uint8)
    pool[:] = np.random.default_rng(seed).integers(0, 256, pool.size, dtype=np.uint8)


def poison(identity: Identity, block_ids: Sequence[int]) -> None:
    for block_id in block_ids:
        block_of(identity, block_id)[:] = POISON


def block_of(identity: Identity, block_id: int) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    """One block of the pool, as bytes."""
    size = identity.layout.block_bytes
    return np.frombuffer(identity.pool.buffer[block_id * size : (block_id + 1) * size], np.uint8)


LIBRARIES = tuple(name for name in INSTALL if has_library(name))
"""Transports of libraries that are installed."""

KINDS = ("memory", "memory-direct", "tcp", "shm", *LIBRARIES)
"""Every way payload travels; `memory-direct` is the memory network with one-sided writes."""


@functools.cache
def library_network(kind: str) -> Network:
    """One for all tests: a process has one of each library."""
    return build_network((kind,), "127.0.0.1")


def wiring(kind: str, plan: FaultPlan | None = None) -> dict[str, Any]:
    """Arguments of `Pair` for this way. `plan` is for the messages of the memory network."""
    if kind.startswith("memory"):
        network = MemoryNetwork(plan, one_sided=kind == "memory-direct")
        return {"transports": ("memory",), "shared": {"network": network}}
    return {"transports": (kind,), "shared": {"network": library_network(kind)} if kind in LIBRARIES else {}}


class Ends:
    """A sender and a receiver. Use as a context manager: leaving it closes both and the pools."""

    decode: Identity
    prefill: Identity
    receiver: HandoffReceiver
    sender: HandoffSender
    received: Events
    sent: Events

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.sender.close(10.0)
        self.receiver.close(10.0)
        self.prefill.pool.close()
        self.decode.pool.close()

    def outcome(self, ticket: Ticket) -> tuple[Any, Any]:
        """(receiver's terminal event, sender's), once both have let go."""
        received = self.received.wait(ticket.handoff_id, Committed, Failed)
        sent = self.sent.wait(ticket.handoff_id, Sent, Failed)
        self.sent.wait(ticket.handoff_id, Drained)
        if isinstance(received, Failed):
            self.received.wait(ticket.handoff_id, Fenced)
        return received, sent


class Pair(Ends):
    """Both ends, with pools alike."""

    def __init__(
        self,
        *,
        transports: Sequence[str] = ("memory",),
        num_blocks: int = 16,
        receiver: dict[str, Any] | None = None,
        sender: dict[str, Any] | None = None,
        shared: dict[str, Any] | None = None,
    ) -> None:
        self.decode = make_identity("decode", num_blocks)
        self.prefill = make_identity("prefill", num_blocks, shared=False)
        fill(self.prefill, 1)
        self.received, self.sent = Events(), Events()
        self._sources: dict[str, Sequence[int]] = {}
        common = {"transports": transports, "clock": SystemClock(), **(shared or {})}
        self.receiver = HandoffReceiver(
            self.decode, bind_host="127.0.0.1", on_event=self.received, **{**common, **(receiver or {})}
        )
        self.sender = HandoffSender(self.prefill, on_event=self.sent, **{**common, **(sender or {})})
        self.receiver.start()

    def forget(self) -> None:
        """Drop what the test itself has kept of hand-offs."""
        self._sources.clear()
        self.received.forget()
        self.sent.forget()

    def reserve(self, block_ids: Sequence[int], *, first_block: int = 0, name: str = "r") -> Ticket:
        return self.receiver.reserve(name, 1, first_block, block_ids, self.tokens(first_block + len(block_ids)))

    def tokens(self, num_blocks: int) -> int:
        """A prompt that fills this many blocks, the last one partly."""
        return num_blocks * LAYOUT.block_size - 3

    def open(self, ticket: Ticket, source: Sequence[int], *, within_s: float = WAIT_S) -> None:
        """`source` is the local block of every prompt block."""
        self._sources[ticket.handoff_id] = source
        self.sender.open(ticket, self.tokens(len(source)), time.monotonic() + within_s)

    def push(self, ticket: Ticket, blocks: range, layers: range = range(LAYOUT.num_layers)) -> None:
        local = self._sources[ticket.handoff_id][blocks.start : blocks.stop]
        self.sender.push(ticket.handoff_id, blocks.start, local, layers)

    def wait_until_open(self, count: int) -> None:
        """Until this many hand-offs are bound to a link at the receiver."""
        changed = self.receiver._changed
        with changed:
            assert changed.wait_for(lambda: self.receiver._table.counts().transferring == count, WAIT_S)

    def wait_until_renewed(self, expires_at: float) -> None:
        """Until the receiver holds no lease that runs out before this time of its clock."""
        receiver = self.receiver
        with receiver._changed:
            assert receiver._changed.wait_for(lambda: receiver._table.next_expiry() == expires_at, WAIT_S)

    def wait_until_noted(self, ticket: Ticket, num_blocks: int) -> None:
        """Until the receiver has looked at so many blocks of the hand-off. Their bytes are in the pool a moment before,
        and a lease that runs out in that moment costs the link."""
        receiver, num_pages = self.receiver, num_blocks * self.decode.layout.num_layers
        with receiver._changed:
            handoff = receiver._table._handoffs[ticket.handoff_id]
            assert receiver._changed.wait_for(lambda: handoff.written.sum() == num_pages, WAIT_S)

    def wait_until_links(self, count: int) -> None:
        """Until this many links are up at the receiver."""
        receiver = self.receiver
        with receiver._changed:
            assert receiver._changed.wait_for(lambda: len(receiver._inlets) == count, WAIT_S)

    def send(self, ticket: Ticket, source: Sequence[int], *, within_s: float = WAIT_S) -> None:
        """Open, push layer by layer, commit."""
        self.open(ticket, source, within_s=within_s)
        for layer in range(LAYOUT.num_layers):
            self.push(ticket, range(len(source)), range(layer, layer + 1))
        self.commit(ticket, len(source))

    def commit(self, ticket: Ticket, num_blocks: int) -> None:
        self.sender.commit(ticket.handoff_id, CommitRecord(self.tokens(num_blocks), b"first token"))

    def equal(self, ticket: Ticket, source: Sequence[int]) -> bool:
        """Whether the destination holds what the source does."""
        pairs = zip(ticket.block_ids, source[ticket.first_block :], strict=True)
        return all((block_of(self.decode, to) == block_of(self.prefill, at)).all() for to, at in pairs)

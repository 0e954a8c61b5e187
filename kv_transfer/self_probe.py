"""Whether the transports that hand-offs will take move a block here, found out before a worker says that it is ready.

A library that loads may still not work on a host: no memory may be pinned, a device node is missing, the address to
listen at is not one's own. So one block goes from this process to itself, in a real hand-off over a link of its own, by
the transport that a worker on this host would choose and by the one that a worker elsewhere would.
"""

import secrets
import threading
from collections.abc import Callable, Sequence

from kv_cache.layout import KVCacheLayout, KVDtype
from kv_transfer.choice import Pair, expected
from kv_transfer.events import CommitRecord, Committed, Failed, ReceiveEvent, SendEvent, Sent
from kv_transfer.identity import Identity
from kv_transfer.network import build_network
from kv_transfer.receiver import HandoffReceiver
from kv_transfer.region import MemoryRegion
from kv_transfer.sender import HandoffSender
from kv_transfer.transport import Network
from runtime.clock import Clock
from runtime.errors import KvferryError

_LAYOUT = KVCacheLayout(
    model_id="self-probe", model_revision="1", num_layers=2, num_kv_heads=1, head_dim=64, block_size=16,
    dtype=KVDtype.FP16,
)  # fmt: skip
_TIMEOUT_S = 10.0
_CLOSE_TIMEOUT_S = 2.0

Move = Callable[[str], str]
"""Moves a block by the transport of this name; says why it did not arrive, or nothing when it did."""


def likely_transports(names: Sequence[str], rdma: Sequence[str]) -> tuple[str, ...]:
    """Those that hand-offs would take, first to a worker on this host, then to one elsewhere that has as much RDMA."""
    likely = (expected(names, names, Pair(same_host, frozenset(rdma))) for same_host in (True, False))
    return tuple(dict.fromkeys(name for name in likely if name))


def drop_broken(names: Sequence[str], rdma: Sequence[str], move: Move) -> tuple[tuple[str, ...], dict[str, str]]:
    """Try what is likely; where it fails, what is likely without it. The names that are left, and why others are not.

    Those that are not likely to be used are not tried, and stay.
    """
    left, failures, working = list(names), {}, set[str]()
    while untried := [name for name in likely_transports(left, rdma) if name not in working]:
        for name in untried:
            if failure := move(name):
                failures[name] = failure
                left.remove(name)
            else:
                working.add(name)
    return tuple(left), failures


def move_a_block(name: str, network: Network, bind_host: str, clock: Clock) -> str:
    """One hand-off from here to here, by this transport of the network. Why it failed; empty when it did not.

    Takes milliseconds; ten seconds at most where nothing answers. Any thread.
    """
    try:
        with _Pool() as source, _Pool() as target:
            source.buffer[:] = secrets.token_bytes(source.size_bytes)
            failure = _hand_off(name, network, bind_host, clock, source, target)
            if not failure and bytes(target.buffer) != bytes(source.buffer):
                failure = "another block arrived than was sent"
            return failure
    except Exception as error:  # Whatever a library raises, it does not work here.
        return str(error) or type(error).__name__


def _hand_off(
    name: str, network: Network, bind_host: str, clock: Clock, source: MemoryRegion, target: MemoryRegion
) -> str:
    outcome = _Outcome()
    secret = secrets.token_bytes(16)
    receiver = HandoffReceiver(
        _identity("probe-receiver", secret, target),
        bind_host=bind_host,
        transports=(name,),
        clock=clock,
        on_event=outcome.received,
        network=network,
    )
    # A network of its own: some libraries do not reach the end that they are themselves.
    own_network = build_network((name,), bind_host)
    try:
        receiver.start()
        identity = _identity("probe-sender", secret, source)
        sender = HandoffSender(identity, transports=(name,), clock=clock, on_event=outcome.sent, network=own_network)
        try:
            ticket = receiver.reserve("self-probe", 1, 0, [0], _LAYOUT.block_size)
            sender.open(ticket, _LAYOUT.block_size, clock.now() + _TIMEOUT_S)
            sender.push(ticket.handoff_id, 0, [0], range(_LAYOUT.num_layers))
            sender.commit(ticket.handoff_id, CommitRecord(_LAYOUT.block_size, b""))
            return outcome.wait()
        finally:
            sender.close(_CLOSE_TIMEOUT_S)
    finally:
        receiver.close(_CLOSE_TIMEOUT_S)
        own_network.close()


class _Outcome:
    """What both ends have said. Their threads tell it, the prober waits."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_sent = self._is_committed = False
        self._failure: KvferryError | None = None

    def sent(self, event: SendEvent) -> None:
        with self._changed:
            self._is_sent |= isinstance(event, Sent)
            self._note(event)

    def received(self, event: ReceiveEvent) -> None:
        with self._changed:
            self._is_committed |= isinstance(event, Committed)
            self._note(event)

    def wait(self) -> str:
        """Why it failed; empty when both ends say that it is done."""
        with self._changed:
            over = self._changed.wait_for(lambda: self._failure is not None or self._is_done, 2 * _TIMEOUT_S)
            if self._failure is not None:
                return self._failure.message
            return "" if over else f"nothing was decided within {2 * _TIMEOUT_S:g} s"

    @property
    def _is_done(self) -> bool:
        return self._is_sent and self._is_committed

    def _note(self, event: SendEvent | ReceiveEvent) -> None:
        if isinstance(event, Failed):
            self._failure = self._failure or event.error
        self._changed.notify_all()


class _Pool:
    """One block of memory, shared so that every transport can reach it."""

    def __enter__(self) -> MemoryRegion:
        """Raises RegionError."""
        self._region = MemoryRegion.allocate(_LAYOUT.pool_bytes(1), shared=True, name="self-probe")
        return self._region

    def __exit__(self, *_: object) -> None:
        self._region.close()


def _identity(worker_id: str, secret: bytes, pool: MemoryRegion) -> Identity:
    return Identity(worker_id, secrets.token_bytes(16), secret, _LAYOUT, pool)

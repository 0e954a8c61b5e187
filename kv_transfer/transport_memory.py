"""Both ends in one process: the same messages and state machines as tcp and shm, with seeded faults in between."""

import heapq
import itertools
import secrets
import threading
import time
from collections.abc import Mapping, Sequence

from kv_cache.layout import KVCacheLayout
from kv_transfer.faults import FaultPlan, MessageFaults
from kv_transfer.pages import USUAL_WRITE_BYTES
from kv_transfer.region import MemoryRegion
from kv_transfer.transport import (
    Ask,
    Channel,
    LinkError,
    Listener,
    PayloadReader,
    PayloadWriter,
    PeerGone,
    Transport,
    TransportUnavailable,
    close_transports,
)
from kv_transfer.transport_inband import InBandTransport
from kv_transfer.transport_shm import LandedReader, PoolWriter
from kv_transfer.wire import check_sizes

_MAX_FRAMES = 256


class MemoryNetwork:
    """Hand the same one to receivers and senders. `one_sided` makes senders write straight into the pools, as shm does.

    Any thread.
    """

    def __init__(self, plan: FaultPlan | None = None, *, one_sided: bool = False) -> None:
        self._plan = plan or FaultPlan()
        self._lock = threading.Lock()
        self._listeners: dict[str, _MemoryListener] = {}
        self._names = itertools.count(1)
        transport: Transport = _DirectTransport() if one_sided else InBandTransport("memory")
        self.transports: Mapping[str, Transport] = {"memory": transport}

    def listen(self, host: str, port: int) -> Listener:
        """A new address; host and port do not matter."""
        with self._lock:
            listener = _MemoryListener(self, f"memory:{next(self._names)}")
            self._listeners[listener.address] = listener
        return listener

    def connect(self, address: str, timeout_s: float) -> Channel:
        """Reach a listener. Raises LinkError."""
        with self._lock:
            listener = self._listeners.get(address)
            number = next(self._names)
        if listener is None:
            raise LinkError(f"{address} cannot be reached: nothing listens there")
        out = _Pipe(MessageFaults(self._plan, f"{number} to receiver"))
        back = _Pipe(MessageFaults(self._plan, f"{number} to sender"))
        listener.offer(_MemoryChannel(f"memory link {number}", inbound=out, outbound=back))
        return _MemoryChannel(address, inbound=back, outbound=out)

    def close(self) -> None:
        """Close the transports."""
        close_transports(self.transports)

    def forget(self, address: str) -> None:
        """A listener is closed."""
        with self._lock:
            self._listeners.pop(address, None)


class _MemoryListener:
    def __init__(self, network: MemoryNetwork, address: str) -> None:
        self._network = network
        self.address = address
        self._changed = threading.Condition()
        self._waiting: list[Channel] = []
        self._closed = False

    def offer(self, channel: Channel) -> None:
        with self._changed:
            if self._closed:
                channel.stop()
                return
            self._waiting.append(channel)
            self._changed.notify()

    def accept(self) -> Channel:
        with self._changed:
            while not self._waiting:
                if self._closed:
                    raise LinkError("not accepting")
                self._changed.wait()
            return self._waiting.pop(0)

    def close(self) -> None:
        self._network.forget(self.address)
        with self._changed:
            self._closed = True
            for channel in self._waiting:
                channel.stop()
            self._waiting.clear()
            self._changed.notify_all()


class _Pipe:
    """One direction: frames in, frames out when they are due; two ends that can be closed on their own."""

    def __init__(self, faults: MessageFaults) -> None:
        self._faults = faults
        self._changed = threading.Condition()
        self._frames: list[tuple[float, int, bytes, bytes]] = []
        self._order = itertools.count()
        self._in_order_from = 0.0
        self._writer_closed = False
        self._reader_closed = False

    def put(self, message: bytes, payload: bytes, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while len(self._frames) >= _MAX_FRAMES and not (self._reader_closed or self._writer_closed):
                if not self._changed.wait(deadline - time.monotonic()):
                    raise LinkError("the peer did not read in time")
            if self._reader_closed or self._writer_closed:
                raise PeerGone("the peer closed the link")
            for delay_s, holds in self._faults.deliveries():
                due = time.monotonic() + delay_s
                if holds:
                    due = self._in_order_from = max(due, self._in_order_from)
                heapq.heappush(self._frames, (due, next(self._order), message, payload))
            self._changed.notify_all()

    def get(self, timeout_s: float | None) -> tuple[bytes, bytes]:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while True:
                now = time.monotonic()
                if self._reader_closed:
                    raise PeerGone("the link is closed")
                if self._frames and self._frames[0][0] <= now:
                    _, _, message, payload = heapq.heappop(self._frames)
                    self._changed.notify_all()
                    return message, payload
                if self._writer_closed and not self._frames:
                    raise PeerGone("the peer closed the link")
                if deadline is not None and now >= deadline:
                    raise LinkError("the peer did not send in time")
                due = self._frames[0][0] if self._frames else None
                waits = [when - now for when in (due, deadline) if when is not None]
                self._changed.wait(min(waits) if waits else None)

    def close_writer(self) -> None:
        with self._changed:
            self._writer_closed = True
            self._changed.notify_all()

    def close_reader(self) -> None:
        with self._changed:
            self._reader_closed = True
            self._frames.clear()
            self._changed.notify_all()


class _MemoryChannel:
    def __init__(self, peer: str, *, inbound: _Pipe, outbound: _Pipe) -> None:
        self.peer = peer
        self._in = inbound
        self._out = outbound
        self._payload = memoryview(b"")

    def send(self, message: bytes, payload: Sequence[memoryview], timeout_s: float) -> None:
        self._out.put(message, b"".join(payload), timeout_s)

    def receive(self, *, max_message_bytes: int, max_payload_bytes: int, timeout_s: float | None) -> tuple[bytes, int]:
        message, payload = self._in.get(timeout_s)
        check_sizes(
            len(message), len(payload), max_message_bytes=max_message_bytes, max_payload_bytes=max_payload_bytes
        )
        self._payload = memoryview(payload)
        return message, len(payload)

    def receive_payload(self, into: Sequence[memoryview], timeout_s: float) -> None:
        for view in into:
            view[:] = self._payload[: view.nbytes]
            self._payload = self._payload[view.nbytes :]

    def skip_payload(self, size_bytes: int, timeout_s: float) -> None:
        self._payload = self._payload[size_bytes:]

    def stop(self) -> None:
        self._out.close_writer()
        self._in.close_reader()

    def stop_receiving(self) -> None:
        self._in.close_reader()

    def stop_sending(self) -> None:
        self._out.close_writer()

    def wait_until_peer_closes(self) -> None:
        try:
            while True:
                self._in.get(None)
        except PeerGone:
            return

    def close(self) -> None:
        self.stop()


class _DirectTransport:
    """One-sided within the process. The descriptor is a random key, as a pool cannot travel by message."""

    name = "memory"
    one_sided = True
    write_bytes = USUAL_WRITE_BYTES

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pools: dict[bytes, MemoryRegion] = {}

    def offer(self, pool: MemoryRegion) -> bytes | None:
        with self._lock:
            for key, known in self._pools.items():
                if known is pool:
                    return key
            key = secrets.token_bytes(8)
            self._pools[key] = pool
            return key

    def connect(
        self, offer: bytes, channel: Channel, layout: KVCacheLayout, memory: Sequence[MemoryRegion], ask: Ask
    ) -> PayloadWriter:
        with self._lock:
            pool = self._pools.get(offer)
        if pool is None:
            raise TransportUnavailable("no such pool in this process")
        ask(b"")
        return PoolWriter(pool.buffer, layout, channel)

    def accept(
        self, data: bytes, channel: Channel, layout: KVCacheLayout, pool: MemoryRegion
    ) -> tuple[bytes, PayloadReader]:
        return b"", LandedReader()

    def close(self) -> None:
        with self._lock:
            self._pools.clear()

"""Channels over TCP: vectored sends from the pool, receives straight into the pool, a deadline on every wait."""

import contextlib
import os
import select
import socket
import time
from collections.abc import Mapping, Sequence

from kv_transfer.transport import Channel, LinkError, Listener, PeerGone, Transport, close_transports
from kv_transfer.transport_inband import InBandTransport
from kv_transfer.transport_shm import ShmTransport
from kv_transfer.wire import HEADER, check_sizes

_BACKLOG = 128
_MAX_VECTORS = 512  # Below IOV_MAX everywhere.
_SKIP_BYTES = 64 * 1024
# A host that vanished without a word is noticed by the kernel, also on a link that is idle.
_KEEPALIVE_IDLE_S, _KEEPALIVE_INTERVAL_S, _KEEPALIVE_PROBES = 15, 5, 3
_FRAME_TIMEOUT_S = 10.0


class TcpNetwork:
    """The network of real workers: control over TCP, payload by any of `transports` (default: `shm` and `tcp`)."""

    def __init__(self, transports: Sequence[Transport] | None = None) -> None:
        chosen = (ShmTransport(), InBandTransport("tcp")) if transports is None else transports
        self.transports: Mapping[str, Transport] = {transport.name: transport for transport in chosen}

    def listen(self, host: str, port: int) -> Listener:
        """Bind to this address only. Raises OSError when it is taken or not ours."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        return _TcpListener(sock)

    def connect(self, address: str, timeout_s: float) -> Channel:
        """Reach host:port (an IPv6 host in brackets). Raises LinkError."""
        host, _, port = address.rpartition(":")
        try:
            sock = socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s)
        except (OSError, ValueError, OverflowError) as error:
            raise LinkError(f"{address} cannot be reached: {error}") from error
        return TcpChannel(sock)

    def close(self) -> None:
        """Close the transports."""
        close_transports(self.transports)


class _TcpListener:
    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        host, port = sock.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def accept(self) -> Channel:
        try:
            sock, _ = self._sock.accept()
        except OSError as error:
            raise LinkError(f"not accepting: {error}") from error
        return TcpChannel(sock)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # Wakes a thread in accept, which close alone would not.
        self._sock.close()


class TcpChannel:
    """A connected TCP socket. Non-blocking underneath; waits are polls, so each direction has its own deadline."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        with contextlib.suppress(OSError):  # The peer may be gone already; the first use will say so.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_PROBES)
        sock.setblocking(False)
        try:
            host, port = sock.getpeername()[:2]
            self.peer = f"{host}:{port}"
        except OSError:
            self.peer = "a peer already gone"

    def send(self, message: bytes, payload: Sequence[memoryview], timeout_s: float) -> None:
        """Send one frame, whole. Raises LinkError."""
        deadline = time.monotonic() + timeout_s
        size = sum(view.nbytes for view in payload)
        # One short copy for header and message; the payload goes out from where it lies.
        buffers = [memoryview(HEADER.pack(len(message), size) + message), *payload]
        first = 0
        while first < len(buffers):
            try:
                sent = self._sock.sendmsg(buffers[first : first + _MAX_VECTORS])
            except BlockingIOError:
                self._wait(select.POLLOUT, deadline)
                continue
            except OSError as error:
                raise _gone(error) from error
            first = _advance(buffers, first, sent)
            if first < len(buffers) and time.monotonic() > deadline:
                raise LinkError(f"{self.peer} took a frame too slowly ({timeout_s:g} s)")

    def receive(self, *, max_message_bytes: int, max_payload_bytes: int, timeout_s: float | None) -> tuple[bytes, int]:
        """Wait for a frame. Raises LinkError."""
        self._wait(select.POLLIN, None if timeout_s is None else time.monotonic() + timeout_s)
        frame_timeout_s = _FRAME_TIMEOUT_S if timeout_s is None else timeout_s
        deadline = time.monotonic() + frame_timeout_s
        header = bytearray(HEADER.size)
        self._fill([memoryview(header)], deadline)
        message_bytes, payload_bytes = HEADER.unpack(header)
        check_sizes(
            message_bytes, payload_bytes, max_message_bytes=max_message_bytes, max_payload_bytes=max_payload_bytes
        )
        message = bytearray(message_bytes)
        self._fill([memoryview(message)], deadline)
        return bytes(message), payload_bytes

    def receive_payload(self, into: Sequence[memoryview], timeout_s: float) -> None:
        """Receive straight into this memory. Raises LinkError."""
        self._fill(list(into), time.monotonic() + timeout_s)

    def skip_payload(self, size_bytes: int, timeout_s: float) -> None:
        """Throw this many bytes away. Raises LinkError."""
        deadline = time.monotonic() + timeout_s
        scratch = memoryview(bytearray(min(size_bytes, _SKIP_BYTES)))
        while size_bytes > 0:
            part = scratch[: min(size_bytes, _SKIP_BYTES)]
            self._fill([part], deadline)
            size_bytes -= part.nbytes

    def stop(self) -> None:
        """End both directions."""
        self._shutdown(socket.SHUT_RDWR)

    def stop_receiving(self) -> None:
        """End our receiving."""
        self._shutdown(socket.SHUT_RD)

    def stop_sending(self) -> None:
        """Tell the peer that nothing more comes."""
        self._shutdown(socket.SHUT_WR)

    def wait_until_peer_closes(self) -> None:
        """Read to the end of the stream."""
        scratch = memoryview(bytearray(_SKIP_BYTES))
        with contextlib.suppress(PeerGone):
            while True:
                self._receive([scratch], None)

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()

    def _fill(self, buffers: list[memoryview], deadline: float) -> None:
        first = 0
        while first < len(buffers):
            received = self._receive(buffers[first : first + _MAX_VECTORS], deadline)
            first = _advance(buffers, first, received)
            if first < len(buffers) and time.monotonic() > deadline:
                raise LinkError(f"a frame from {self.peer} came too slowly")

    def _receive(self, buffers: list[memoryview], deadline: float | None) -> int:
        """Some bytes, at least one, when there are any."""
        while True:
            try:
                received = self._sock.recvmsg_into(buffers)[0]
            except BlockingIOError:
                self._wait(select.POLLIN, deadline)
                continue
            except OSError as error:
                raise _gone(error) from error
            if received == 0:
                raise PeerGone("the peer closed the link")
            return received

    def _wait(self, event: int, deadline: float | None) -> None:
        poller = select.poll()
        try:
            poller.register(self._sock, event)
        except ValueError as error:
            raise LinkError("the link is closed") from error
        while True:
            left_ms = None if deadline is None else max(0, int((deadline - time.monotonic()) * 1000) + 1)
            if poller.poll(left_ms):
                return
            if deadline is not None and time.monotonic() >= deadline:
                raise LinkError(f"{self.peer} did not {'send' if event == select.POLLIN else 'read'} in time")

    def _shutdown(self, how: int) -> None:
        with contextlib.suppress(OSError):  # Not connected any more: what we wanted.
            self._sock.shutdown(how)


def _advance(buffers: list[memoryview], first: int, size_bytes: int) -> int:
    """Drop what is done from the front of `buffers[first:]`; the new first index."""
    while first < len(buffers) and size_bytes >= buffers[first].nbytes:
        size_bytes -= buffers[first].nbytes
        first += 1
    if size_bytes:
        buffers[first] = buffers[first][size_bytes:]
    return first


def _gone(error: OSError) -> LinkError:
    reason = os.strerror(error.errno) if error.errno else str(error)
    return PeerGone(f"the link broke: {reason}")

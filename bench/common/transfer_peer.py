"""The receiving process of the transfer benchmarks: one pool, and every way of filling it that is compared.

* a `HandoffReceiver`, over any transport that the sender likes, checksums on;
* a raw TCP socket: one start byte, the bytes of the blocks, one byte back when all have landed in the pool;
* a naive gRPC service: one unary call with the bytes of all blocks, copied into the pool;
* the libraries behind some transports, used plainly (plain_libraries.py).

The sending process starts it with `receiving_peer` and tells it through a pipe which blocks are the destination.
"""

import contextlib
import multiprocessing
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import grpc
import numpy as np
import xxhash

from bench.common.plain_libraries import PlainEnd, Run, plain_end
from kv_cache.layout import KVCacheLayout
from kv_transfer.events import Committed, ReceiveEvent
from kv_transfer.fingerprinter import PageFingerprints, best_fingerprinter
from kv_transfer.identity import Identity
from kv_transfer.network import build_network
from kv_transfer.pages import PagesAt
from kv_transfer.receiver import HandoffReceiver
from kv_transfer.region import MemoryRegion
from kv_transfer.transport_shm import copy_views
from kvferry_rpc.internal_pb2 import Ticket
from runtime.clock import SystemClock

HOST = "127.0.0.1"
GRPC_METHOD = "/kvferry.bench.Naive/Put"
UNBOUNDED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
WAIT_S = 120.0
START = memoryview(b"\1")
MAX_VECTORS = 512
LEASE_S = 60.0
SECRET = b"benchmark"


@dataclass(frozen=True, slots=True)
class Setup:
    """What both processes must agree on."""

    layout: KVCacheLayout
    num_blocks: int
    transports: tuple[str, ...] = ("shm", "tcp")


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the peer listens besides the address in its tickets."""

    raw_port: int
    grpc_port: int


@dataclass(frozen=True, slots=True)
class Use:
    """From now on these blocks are the destination. Answer: None."""

    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reserve:
    """Make a ticket for the destination. Answer: (serialised ticket, seconds it took)."""


@dataclass(frozen=True, slots=True)
class Check:
    """Fingerprint what lands, or do without. Answer: None."""

    enabled: bool


@dataclass(frozen=True, slots=True)
class Erase:
    """Overwrite the destination with zeros. Answer: None."""


@dataclass(frozen=True, slots=True)
class Digest:
    """Answer: `content_digest` of the destination."""


@dataclass(frozen=True, slots=True)
class Meet:
    """Make an end of the plain use of a library, and let it meet the sender's. Answer: its greeting."""

    library: str
    greeting: bytes


@dataclass(frozen=True, slots=True)
class Expect:
    """Where its bytes land from now on. Answer: None."""

    library: str
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class Take:
    """Receive one transfer by it. Answer, as soon as the sender may begin: None."""

    library: str


Command = Meet | Expect | Take | Use | Reserve | Check | Erase | Digest


class Peer:
    """The other process, as the sender sees it. One thread."""

    def __init__(self, connection: "Connection[Any, Any]", addresses: Addresses) -> None:
        self._connection = connection
        self.addresses = addresses

    def use(self, block_ids: Sequence[int]) -> None:
        """Make these blocks the destination of everything."""
        self._ask(Use(tuple(block_ids)))

    def reserve(self) -> tuple[Ticket, float]:
        """(ticket for the destination, seconds that making it took)."""
        data, took_s = self._ask(Reserve())
        return Ticket.FromString(data), took_s

    def check(self, enabled: bool) -> None:
        """Let it fingerprint what lands, or do without."""
        self._ask(Check(enabled))

    def erase(self) -> None:
        """Overwrite the destination."""
        self._ask(Erase())

    def digest(self) -> bytes:
        """What lies in the destination."""
        answer: bytes = self._ask(Digest())
        return answer

    def meet(self, library: str, greeting: bytes) -> bytes:
        """Greetings of the two ends of the plain use of a library."""
        answer: bytes = self._ask(Meet(library, greeting))
        return answer

    def expect(self, library: str, runs: Sequence[Run]) -> None:
        """Tell it where bytes are to land."""
        self._ask(Expect(library, tuple(runs)))

    def take(self, library: str) -> None:
        """Let it receive once; on return the sender may begin."""
        self._ask(Take(library))

    def _ask(self, command: Command) -> Any:
        self._connection.send(command)
        if not self._connection.poll(WAIT_S):
            raise TimeoutError(f"the receiving process did not answer {command} in {WAIT_S:g} s")
        return self._connection.recv()


@contextlib.contextmanager
def receiving_peer(setup: Setup) -> Iterator[Peer]:
    """A spawned process that receives; it is gone afterwards, whatever happened."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, setup), name="bench-receiver", daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(WAIT_S):
            raise TimeoutError("the receiving process did not start")
        yield Peer(ours, ours.recv())
    finally:
        ours.close()  # The end of the pipe is its sign to leave.
        process.join(10.0)
        if process.is_alive():
            process.kill()
            process.join()


class SwitchedFingerprinter:
    """The best one; or, switched off, one that looks at nothing and says 0 for each page."""

    def __init__(self) -> None:
        self.enabled = True
        self._best = best_fingerprinter()

    def fingerprints(self, pages: PagesAt, seed: int) -> PageFingerprints:
        """See Fingerprinter."""
        return self._best.fingerprints(pages, seed) if self.enabled else np.zeros(pages.run.num_pages, np.uint64)

    def copy(self, source: PagesAt, target: PagesAt, seed: int) -> PageFingerprints:
        """See Fingerprinter."""
        if self.enabled:
            return self._best.copy(source, target, seed)
        copy_views(source.views(), target.views())
        return np.zeros(source.run.num_pages, np.uint64)


def content_digest(parts: Sequence[memoryview]) -> bytes:
    """128 bits over the bytes of all parts, in this order."""
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    return bytes(state.digest())


def erase(parts: Sequence[memoryview]) -> None:
    """Fill with zeros."""
    for array in as_arrays(parts):
        array[:] = 0


def block_views(pool: memoryview, layout: KVCacheLayout, block_ids: Sequence[int]) -> list[memoryview]:
    """The bytes of these blocks in a pool, one view a block."""
    starts = (layout.page_offset(block_id, 0) for block_id in block_ids)
    return [pool[start : start + layout.block_bytes] for start in starts]


def as_arrays(parts: Sequence[memoryview]) -> list["np.ndarray[tuple[int], np.dtype[np.uint8]]"]:
    """The same bytes for numpy to copy."""
    return [np.frombuffer(part, np.uint8) for part in parts]


# ---- inside the receiving process


class _Receiver:
    def __init__(self, setup: Setup, region: MemoryRegion) -> None:
        self._layout = setup.layout
        self._region = region
        self._pool = region.buffer
        self._plain: dict[str, PlainEnd] = {}
        self._ids: tuple[int, ...] = ()
        self._targets: list[memoryview] = []
        identity = Identity("bench-decode", b"d" * 16, SECRET, setup.layout, region)
        self._network = build_network(setup.transports, HOST)
        self._fingerprinter = SwitchedFingerprinter()
        self._handoffs = HandoffReceiver(
            identity,
            fingerprinter=self._fingerprinter,
            bind_host=HOST,
            transports=setup.transports,
            network=self._network,
            clock=SystemClock(),
            lease_s=LEASE_S,
            on_event=self._on_event,
        )
        self._handoffs.start()
        self._grpc = grpc.server(ThreadPoolExecutor(1), options=UNBOUNDED)
        self._grpc.add_generic_rpc_handlers((_NaiveService(self._put),))
        grpc_port = self._grpc.add_insecure_port(f"{HOST}:0")
        self._grpc.start()
        self._listener = socket.create_server((HOST, 0))
        threading.Thread(target=self._serve_raw, name="raw", daemon=True).start()
        self.addresses = Addresses(self._listener.getsockname()[1], grpc_port)

    def answer(self, command: Command) -> Any:
        if isinstance(command, Use):
            self._ids = command.block_ids
            self._targets = block_views(self._pool, self._layout, self._ids)
            return None
        if isinstance(command, Reserve):
            began = time.perf_counter()
            num_tokens = len(self._ids) * self._layout.block_size
            data = self._handoffs.reserve("bench", 1, 0, self._ids, num_tokens).SerializeToString()
            return data, time.perf_counter() - began
        if isinstance(command, Check):
            self._fingerprinter.enabled = command.enabled
            return None
        if isinstance(command, Erase):
            erase(self._targets)
            return None
        if isinstance(command, Meet | Expect | Take):
            return self._answer_plain(command)
        return content_digest(self._targets)

    def follow_up(self, command: Command) -> None:
        """What is left to do when the answer is on its way."""
        if isinstance(command, Take):
            self._plain[command.library].take()

    def close(self) -> None:
        for end in self._plain.values():
            end.close()
        self._handoffs.close(5.0)
        self._network.close()
        self._grpc.stop(None).wait(5.0)
        self._listener.close()

    def _answer_plain(self, command: Meet | Expect | Take) -> bytes | None:
        if isinstance(command, Meet):
            end = self._plain[command.library] = plain_end(command.library, self._region, HOST)
            end.meet(command.greeting)
            return end.greeting()
        if isinstance(command, Expect):
            self._plain[command.library].expect(command.runs)
        else:
            self._plain[command.library].ready()
        return None

    def _on_event(self, event: ReceiveEvent) -> None:
        if isinstance(event, Committed):
            self._handoffs.release(event.handoff_id)

    def _put(self, data: bytes) -> bytes:
        source, start = np.frombuffer(data, np.uint8), 0
        for target in as_arrays(self._targets):
            target[:] = source[start : start + target.size]
            start += target.size
        return b""

    def _serve_raw(self) -> None:
        sock, _ = self._listener.accept()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with sock:
            while sock.recv(1):
                receive_all(sock, self._targets)
                sock.sendall(b"\1")


class _NaiveService(grpc.GenericRpcHandler):
    """One method; bytes are passed as they are, so no time goes into protobuf."""

    def __init__(self, put: Any) -> None:
        self._put = put

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[Any, Any] | None":
        if handler_call_details.method != GRPC_METHOD:
            return None
        return grpc.unary_unary_rpc_method_handler(lambda data, _: self._put(data))


def _serve(connection: "Connection[Any, Any]", setup: Setup) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The sender ends, closes the pipe, and with that ends this process.
    region = MemoryRegion.allocate(setup.layout.pool_bytes(setup.num_blocks), shared=True)
    receiver = _Receiver(setup, region)
    connection.send(receiver.addresses)
    try:
        while True:
            command = connection.recv()
            connection.send(receiver.answer(command))
            receiver.follow_up(command)
    except (EOFError, OSError):
        receiver.close()


# ---- blocking sockets, for the raw baseline


def send_all(sock: socket.socket, parts: Sequence[memoryview]) -> None:
    """Blocking, vectored, from where the bytes lie."""
    left = list(parts)
    while left:
        _drop(left, sock.sendmsg(left[:MAX_VECTORS]))


def receive_all(sock: socket.socket, parts: Sequence[memoryview]) -> None:
    """Blocking, vectored, straight to where the bytes belong. Raises ConnectionError at the end of the stream."""
    left = list(parts)
    while left:
        received = sock.recvmsg_into(left[:MAX_VECTORS])[0]
        if received == 0:
            raise ConnectionError("the other end is closed")
        _drop(left, received)


def _drop(parts: list[memoryview], size_bytes: int) -> None:
    """Take this many bytes off the front."""
    done = 0
    while done < len(parts) and size_bytes >= parts[done].nbytes:
        size_bytes -= parts[done].nbytes
        done += 1
    del parts[:done]
    if size_bytes:
        parts[0] = parts[0][size_bytes:]

"""Payload by UCX: tagged messages straight from pool to pool, over RDMA, TCP or whatever else UCX finds best.

    sender                                          receiver
    connect: a worker
             Greeting (its address)            ->   accept: a worker, an endpoint to the sender's
                                               <-   Greeting (its address, a tag)
             an endpoint to the receiver's
    write:   Write frame, how it is cut        ->   read: a receive posted for each piece, in the pool
             a message for each piece          ->
                                               <-   an answer: all is in
    close: the worker ends                          close: the worker ends

A payload lies in pieces at both ends, cut differently, and a message must lie in one piece at each: RDMA moves nothing
else in one go, and UCX is slower with lists of pieces than with a message each (tried with 1.21). So the sender, who
knows both (its own views; the blocks, from the Write), cuts at the borders of both, and says how behind the Write: the
sizes, as the payload of its frame, or nothing for one piece. A larger message is faster, on TCP 24 KiB reach half the
speed of 1 MiB: neighbouring blocks are worth having, and whole blocks better than single layers.

Each write has a tag of its own, so a message of one can never land in the memory of another. A write is not over when
UCX has taken the last message: UCX may hold its last bytes back until it is driven again, and nobody drives it between
writes. So it is over when they are known to be out; see UcxPort.deliver. ucx_port.py also says why nothing lands after
a failure.
"""

import bisect
import contextlib
import hashlib
import itertools
import logging
import secrets
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated

import msgspec
import numpy as np

from kv_cache.layout import PAGE_ALIGNMENT_BYTES, KVCacheLayout
from kv_transfer.fingerprinter import Fingerprinter, PageFingerprints
from kv_transfer.messages import Write
from kv_transfer.pages import MAX_WRITE_BYTES, PagesAt
from kv_transfer.region import MemoryRegion
from kv_transfer.transport import (
    Ask,
    Channel,
    FingerprintingReader,
    FingerprintingWriter,
    LinkError,
    PayloadReader,
    PayloadWriter,
    TransportError,
    TransportUnavailable,
)
from kv_transfer.ucx_library import HOST_MEMORY, UcxContext, UcxError, UcxLibrary
from kv_transfer.ucx_port import Span, UcxPort, span_of
from kv_transfer.wire import encode

MAX_PIECES = MAX_WRITE_BYTES // PAGE_ALIGNMENT_BYTES
"""Of one write: as if every page were the smallest there is, and none had a neighbour."""

_OFFER = b"ucx 1"
_PART_BYTES = 1024 * 1024
_MAX_ADDRESS_BYTES = 32 * 1024
_MAX_TAG = 2**63 - 1
_SIZE = struct.Struct("!I")

_log = logging.getLogger(__name__)


def _nothing() -> None:
    return


class Greeting(msgspec.Struct, frozen=True):
    """How to reach a worker. `tag`: where the receiver wants the count of tags to begin."""

    address: bytes
    digest: bytes
    tag: Annotated[int, msgspec.Meta(ge=0, le=_MAX_TAG)] = 0


class UcxTransport:
    """For pools in the memory of the host, or of a CUDA device. Each link has a worker of its own at each end."""

    name = "ucx"
    one_sided = False
    write_bytes = MAX_WRITE_BYTES  # Each costs two round trips and the waking of both ends.

    def __init__(self, bind_host: str) -> None:
        """Load UCX, which listens at the interface of this address alone. Raises ValueError when it is missing."""
        library = UcxLibrary()
        try:
            self._context = UcxContext(library, bind_host)
        except UcxError as error:
            raise ValueError(f"transport ucx cannot be used here: {error}") from error
        self._lock = threading.Lock()
        self._ports: set[UcxPort] = set()
        self._closed = False

    def offer(self, pool: MemoryRegion) -> bytes | None:
        """The same for every pool."""
        return _OFFER

    def connect(
        self, offer: bytes, channel: Channel, layout: KVCacheLayout, memory: Sequence[MemoryRegion], ask: Ask
    ) -> PayloadWriter:
        """Learn where the receiver's worker is. Whether bytes get there shows in the first write.

        Raises TransportUnavailable, LinkError.
        """
        if offer != _OFFER:
            raise TransportUnavailable("the peer offers another kind of ucx")
        with self._new_port(channel) as port:
            answer = _parse(ask(_greeting(port)))
            return UcxWriter(self._end, port, channel, layout, answer.tag, port.connect(answer.address))

    def accept(
        self, data: bytes, channel: Channel, layout: KVCacheLayout, pool: MemoryRegion
    ) -> tuple[bytes, PayloadReader]:
        """Make a worker for this link. Raises TransportUnavailable."""
        proposal = _parse(data)
        tag = secrets.randbelow(_MAX_TAG)
        with self._new_port(channel) as port:
            port.connect(proposal.address)
            return _greeting(port, tag), UcxReader(self._end, port, channel, tag)

    def close(self) -> None:
        """Let UCX go, once the last link is closed. Idempotent."""
        with self._lock:
            self._closed = True
            if self._ports:
                _log.warning("UCX stays loaded: %d links are open", len(self._ports))
                return
            self._context.close()

    @contextlib.contextmanager
    def _new_port(self, channel: Channel) -> Iterator[UcxPort]:
        """A port for one link, which has ended if the block fails. Raises TransportUnavailable for what UCX refuses."""
        port = self._open()
        try:
            yield port
        except UcxError as error:
            self._end(port)
            raise TransportUnavailable(f"ucx does not reach {channel.peer}: {error}") from error
        except BaseException:
            self._end(port)
            raise

    def _open(self) -> UcxPort:
        with self._lock:  # Workers are made one at a time.
            if self._closed:
                raise TransportUnavailable("ucx is closed here")
            try:
                port = UcxPort(self._context)
            except (UcxError, OSError) as error:
                raise TransportUnavailable(f"no worker of UCX: {error}") from error
            self._ports.add(port)
            return port

    def _end(self, port: UcxPort) -> None:
        port.close()
        with self._lock:
            self._ports.discard(port)
            if self._closed and not self._ports:
                self._context.close()


class UcxWriter(FingerprintingWriter):
    """The sender's end of a link: one write at a time, over when it has left, and its source is free."""

    detail = ""

    def __init__(
        self,
        end: Callable[[UcxPort], None],
        port: UcxPort,
        channel: Channel,
        layout: KVCacheLayout,
        tag: int,
        detail: str,
    ) -> None:
        self.detail = detail
        self._end = end
        self._port = port
        self._channel = channel
        self._num_layers = layout.num_layers
        self._tags = _Tags(tag)
        self._answer = memoryview(bytearray(1))
        self._answer_span = span_of(self._answer)

    def write(self, message: Write, source: Sequence[memoryview], timeout_s: float) -> None:
        """Announce and send, within the time. Raises LinkError, and TransportError before anything is sent."""
        deadline = time.monotonic() + timeout_s
        self._begin(message, source, timeout_s)
        self._port.deliver(deadline)

    def write_pages(
        self, message: Write, source: PagesAt, seed: int, fingerprinter: Fingerprinter, timeout_s: float
    ) -> PageFingerprints:
        """As `write`. The fingerprints are taken while the bytes are under way."""
        deadline = time.monotonic() + timeout_s
        self._begin(message, source.views(), timeout_s)
        found: list[PageFingerprints] = []
        for part in source.parts(_PART_BYTES):
            found.append(fingerprinter.fingerprints(part, seed))
            self._port.progress()
        self._port.deliver(deadline)
        return np.concatenate(found)

    def _begin(self, message: Write, source: Sequence[memoryview], timeout_s: float) -> None:
        if self._port.closed:
            raise LinkError("the link over ucx has ended")
        spans = [span_of(view) for view in source]
        sizes = _cut([span.size_bytes for span in spans], _sizes_at_the_peer(message, spans, self._num_layers))
        pieces = _pieces(spans, sizes)
        told = [memoryview(b"".join(map(_SIZE.pack, sizes)))] if len(sizes) > 1 else []
        self._channel.send(encode(message), told, timeout_s)
        tag, answer_tag = self._tags.next(), self._tags.next()
        self._port.expect_answer(self._answer_span, answer_tag)
        self._port.send(pieces, tag)

    def close(self) -> None:
        """End the worker. Idempotent."""
        self._end(self._port)


class UcxReader(FingerprintingReader):
    """The receiver's end of a link: one write at a time, into memory that is posted when it has been announced."""

    def __init__(self, end: Callable[[UcxPort], None], port: UcxPort, channel: Channel, tag: int) -> None:
        self._end = end
        self._port = port
        self._channel = channel
        self._tags = _Tags(tag)
        self._answer = memoryview(bytearray(1))
        self._answer_span = span_of(self._answer)

    def read(self, size_bytes: int, announced_bytes: int, into: Sequence[memoryview], timeout_s: float) -> None:
        """Receive into the memory itself. Raises LinkError, when nothing can land any more."""
        deadline = time.monotonic() + timeout_s
        sizes = self._told(size_bytes, announced_bytes, timeout_s)
        self._receive(_pieces([span_of(view) for view in into], sizes), deadline)

    def read_pages(
        self, announced_bytes: int, into: PagesAt, seed: int, fingerprinter: Fingerprinter, timeout_s: float
    ) -> PageFingerprints:
        """As `read`. Pages are looked at as they come, while others are under way."""
        deadline = time.monotonic() + timeout_s
        sizes = self._told(into.size_bytes, announced_bytes, timeout_s)
        ends = list(itertools.accumulate(sizes))
        found: list[PageFingerprints] = []
        size = 0

        def look() -> None:
            nonlocal size
            for part in into.parts(_PART_BYTES):
                size += part.size_bytes
                whole = bisect.bisect_left(ends, size) + 1
                self._port.finish(deadline, leave=len(ends) - whole)
                found.append(fingerprinter.fingerprints(part, seed))

        self._receive(_pieces([span_of(view) for view in into.views()], sizes), deadline, look)
        return np.concatenate(found)

    def skip(self, size_bytes: int, announced_bytes: int, timeout_s: float) -> None:
        """Receive into memory that is thrown away: the sender waits for it to go somewhere. Raises LinkError."""
        deadline = time.monotonic() + timeout_s
        sizes = self._told(size_bytes, announced_bytes, timeout_s)
        scratch = memoryview(bytearray(max(sizes)))
        start = span_of(scratch).address
        self._receive([Span(start, size, HOST_MEMORY) for size in sizes], deadline)

    def stop(self) -> None:
        """Whoever is inside comes out, now and from now on."""
        self._port.stop()

    def close(self) -> None:
        """End the worker. Idempotent."""
        self._end(self._port)

    def _told(self, size_bytes: int, announced_bytes: int, timeout_s: float) -> list[int]:
        """The sizes of the messages to come. Raises LinkError."""
        if not announced_bytes:
            return [size_bytes]
        if announced_bytes % _SIZE.size or announced_bytes > MAX_PIECES * _SIZE.size:
            raise LinkError(f"{announced_bytes} bytes behind a write over ucx")
        data = bytearray(announced_bytes)
        self._channel.receive_payload([memoryview(data)], timeout_s)
        sizes = [size for (size,) in _SIZE.iter_unpack(data)]
        if sum(sizes) != size_bytes or not all(sizes):
            raise LinkError(f"a write of {size_bytes} bytes that comes in pieces of {sum(sizes)}")
        return sizes

    def _receive(self, pieces: Sequence[Span], deadline: float, meanwhile: Callable[[], None] = _nothing) -> None:
        if self._port.closed:
            raise LinkError("the link over ucx has ended")
        tag, answer_tag = self._tags.next(), self._tags.next()
        self._port.receive(pieces, tag)
        meanwhile()
        self._port.finish(deadline)
        self._port.send([self._answer_span], answer_tag)
        self._port.finish(deadline)


class _Tags:
    """The tags of a link's writes, one after another, the same at both ends."""

    def __init__(self, first: int) -> None:
        self._next = first

    def next(self) -> int:
        tag = self._next
        self._next = (tag + 1) % 2**64
        return tag


def _greeting(port: UcxPort, tag: int = 0) -> bytes:
    address = port.address()
    if len(address) > _MAX_ADDRESS_BYTES:
        raise TransportUnavailable(f"the address of a ucx worker has {len(address)} bytes: use fewer network devices")
    return msgspec.msgpack.encode(Greeting(address, _digest(address), tag))


def _parse(data: bytes) -> Greeting:
    """What the peer said. Raises TransportUnavailable.

    The digest is against accidents: UCX is not made for garbled addresses. The peer itself has proven that it belongs
    to the cluster before any of this is read.
    """
    try:
        greeting = msgspec.msgpack.decode(data, type=Greeting)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TransportUnavailable(f"a malformed ucx greeting: {error}") from error
    if not greeting.address or not secrets.compare_digest(greeting.digest, _digest(greeting.address)):
        raise TransportUnavailable("a garbled ucx address")
    return greeting


def _digest(address: bytes) -> bytes:
    return hashlib.sha256(address).digest()


def _sizes_at_the_peer(message: Write, spans: Sequence[Span], num_layers: int) -> list[int]:
    """How the payload lies in the peer's pool: neighbouring blocks are one piece. Raises TransportError."""
    total = sum(span.size_bytes for span in spans)
    if not message.block_ids or not total or total % len(message.block_ids):
        raise TransportError(f"{total} bytes do not make {len(message.block_ids)} equal blocks")
    block_bytes = total // len(message.block_ids)
    sizes = [block_bytes]
    for before, after in itertools.pairwise(message.block_ids):
        if message.num_layers == num_layers and after == before + 1:
            sizes[-1] += block_bytes
        else:
            sizes.append(block_bytes)
    return sizes


def _cut(*lists: list[int]) -> list[int]:
    """Sizes of the pieces between the borders of all lists of sizes, which have the same sum. Raises TransportError."""
    if all(sizes == lists[0] and all(sizes) and len(sizes) <= MAX_PIECES for sizes in lists):
        return lists[0]
    borders = sorted({border for sizes in lists for border in itertools.accumulate(sizes)} - {0})
    sizes = [after - before for before, after in itertools.pairwise([0, *borders])]
    if len(sizes) > MAX_PIECES:
        raise TransportError(f"a write in {len(sizes)} pieces, more than {MAX_PIECES}")
    return sizes


def _pieces(spans: Sequence[Span], sizes: list[int]) -> list[Span]:
    """The memory of `spans`, taken as one sequence, in pieces of these sizes. Raises LinkError for one across a gap."""
    if [span.size_bytes for span in spans] == sizes:
        return list(spans)
    pieces: list[Span] = []
    left = iter(spans)
    rest = Span(0, 0, HOST_MEMORY)
    for size in sizes:
        while not rest.size_bytes:
            rest = next(left, Span(0, -1, HOST_MEMORY))
        if size > rest.size_bytes:
            raise LinkError("a write over ucx that is cut otherwise than the memory it is for")
        pieces.append(Span(rest.address, size, rest.kind))
        rest = Span(rest.address + size, rest.size_bytes - size, rest.kind)
    return pieces

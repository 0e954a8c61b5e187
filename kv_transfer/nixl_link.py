"""The two ends of a nixl link once it is up: how a write goes out, and how its arrival is noticed.

After the bytes of a write comes a note, of the receiver's token and the write's number. Nobody polls while no write is
under way; over TCP that also means that UCX lands nothing then.
"""

import logging
import secrets
import struct
import threading
import time
from collections.abc import Callable, Sequence

from kv_cache.layout import KVCacheLayout
from kv_transfer.fingerprinter import Fingerprinter, PageFingerprints
from kv_transfer.messages import Write
from kv_transfer.nixl_agent import NixlAgent, NixlError, Piece, address_of, pair, pause
from kv_transfer.nixl_greeting import TOKEN_BYTES, Answer
from kv_transfer.pages import PagesAt, max_write_bytes, spans
from kv_transfer.region import MemoryRegion, RegionError
from kv_transfer.transport import (
    Channel,
    FingerprintingWriter,
    LinkError,
    TransportError,
    TransportUnavailable,
    check_none_follows,
)
from kv_transfer.transport_shm import copy_views
from kv_transfer.wire import encode

_NUMBER = struct.Struct("!Q")
_HELLO, _PING = b"hello", b"ping"
_HELLO_S = 5.0
_LINGER_S = 0.2
_PING_S = 0.02

_log = logging.getLogger(__name__)


class NixlWriter(FingerprintingWriter):
    """The sender's end: one write at a time, over when its bytes are in the pool."""

    detail = ""

    def __init__(
        self,
        agent: NixlAgent,
        channel: Channel,
        layout: KVCacheLayout,
        memory: Sequence[MemoryRegion],
        answer: Answer,
        detail: str,
    ) -> None:
        self.detail = detail
        self._agent = agent
        self._channel = channel
        self._layout = layout
        self._memory = [(address_of(region.buffer), region.size_bytes) for region in memory]
        self._bounce: MemoryRegion | None = None
        self._pool_address = answer.address
        self._num_blocks = answer.size_bytes // layout.block_bytes
        self._token = answer.token
        self._count = 0

    def write(self, message: Write, source: Sequence[memoryview], timeout_s: float) -> None:
        """Announce and write, within the time. Raises LinkError, and TransportError before anything is sent.

        A write cannot be called back, so one that fails or is late ends the agent, and with it the link.
        """
        self._write(message, source, timeout_s, _nothing)

    def write_pages(
        self, message: Write, source: PagesAt, seed: int, fingerprinter: Fingerprinter, timeout_s: float
    ) -> PageFingerprints:
        """As `write`. The fingerprints are taken while the bytes are under way: over RDMA they cost no time."""
        found: list[PageFingerprints] = []
        self._write(message, source.views(), timeout_s, lambda: found.append(fingerprinter.fingerprints(source, seed)))
        return found[0]

    def _write(
        self, message: Write, source: Sequence[memoryview], timeout_s: float, meanwhile: Callable[[], None]
    ) -> None:
        if self._agent.closed:
            raise LinkError("the link over nixl has ended")
        pieces = self._pieces(message, source)
        try:
            self._carry_out(message, pieces, timeout_s, meanwhile)
        except NixlError as error:
            self.close()
            raise LinkError(f"{self._channel.peer} over nixl: {error}") from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the agent: nothing of ours reads the local memory or writes the peer's any more. Idempotent."""
        self._agent.close()
        if self._bounce is not None:
            self._bounce.close()

    def _carry_out(
        self, message: Write, pieces: Sequence[Piece], timeout_s: float, meanwhile: Callable[[], None]
    ) -> None:
        began = time.monotonic()
        transfer = self._agent.prepare(pieces, self._token + _NUMBER.pack(self._count + 1))
        try:
            # First, so that the receiver drives its agent while the bytes come.
            self._channel.send(encode(message), (), timeout_s)
            self._count += 1
            over = self._agent.post(transfer)
            meanwhile()
            posted = time.monotonic()  # By then UCX may have copied everything, and lack only the peer's answer.
            while not over:
                now = time.monotonic()
                if now - began > timeout_s:
                    raise LinkError(f"{self._channel.peer} did not take a write over nixl in {timeout_s:g} s")
                pause(now - posted)
                over = self._agent.is_over(transfer)
        finally:
            self._agent.release(transfer)
        self._agent.notes()  # The receiver's pings; nobody else would take them.

    def _pieces(self, message: Write, source: Sequence[memoryview]) -> list[Piece]:
        """What goes where. Raises TransportError unless all of it lies in the pool there."""
        layers = range(message.layer, message.layer + message.num_layers)
        if not message.block_ids or not all(0 <= block_id < self._num_blocks for block_id in message.block_ids):
            raise TransportError(f"the ticket names blocks outside the peer's pool of {self._num_blocks} blocks")
        if not 0 <= layers.start < layers.stop <= self._layout.num_layers:
            raise TransportError(f"layers {layers.start} to {layers.stop} of {self._layout.num_layers}")
        there = [(self._pool_address + offset, size) for offset, size in spans(self._layout, message.block_ids, layers)]
        try:
            return pair(self._registered(source), there)
        except ValueError as error:
            raise TransportError(str(error)) from error

    def _registered(self, source: Sequence[memoryview]) -> list[tuple[int, int]]:
        """Address and size of each view, or of a copy where one is not in registered memory. Raises TransportError."""
        runs = [(address_of(view), view.nbytes) for view in source if view.nbytes]
        if all(self._holds(address, size) for address, size in runs):
            return runs
        size = sum(view.nbytes for view in source)
        if size > max_write_bytes(self._layout):
            raise TransportError(f"a write of {size} bytes; the limit is {max_write_bytes(self._layout)}")
        if self._bounce is None:
            _log.warning("a payload over nixl lies outside the memory registered for it, and is copied first")
            self._bounce = self._new_bounce()
        copy_views(source, [self._bounce.buffer[:size]])
        return [(address_of(self._bounce.buffer), size)]

    def _holds(self, address: int, size: int) -> bool:
        return any(start <= address and address + size <= start + length for start, length in self._memory)

    def _new_bounce(self) -> MemoryRegion:
        try:
            bounce = MemoryRegion.allocate(max_write_bytes(self._layout), shared=False, name="kv-bounce")
            self._agent.register(bounce)
        except (RegionError, NixlError) as error:
            raise TransportError(str(error)) from error
        return bounce


def _nothing() -> None:
    return


class NixlReader:
    """The receiver's end: waits for the notes of the writes, and drives UCX while it waits.

    Until the first write, or until the sender has heard it, a thread of its own answers the sender's hello.
    """

    def __init__(self, agent: NixlAgent, token: bytes) -> None:
        self._agent = agent
        self._token = token
        self._announced = 0
        self._landed = 0
        self._stopped = False
        self._greeted = False
        self._greeter = threading.Thread(target=self._greet, name="kv-nixl-hello", daemon=True)
        self._greeter.start()

    def read(self, size_bytes: int, announced_bytes: int, into: Sequence[memoryview], timeout_s: float) -> None:
        """Wait until the write has landed. Raises LinkError."""
        self.skip(size_bytes, announced_bytes, timeout_s)

    def skip(self, size_bytes: int, announced_bytes: int, timeout_s: float) -> None:
        """Wait all the same: nobody can keep the bytes out. Raises LinkError."""
        check_none_follows(announced_bytes)
        self._end_greeting()
        self._announced += 1
        began, pings = time.monotonic(), 0
        try:
            # The sender may be ahead, with writes whose frames wait to be read.
            while self._landed < self._announced:
                waited_s = time.monotonic() - began
                if self._stopped:
                    raise LinkError("the link over nixl was stopped")
                if waited_s > timeout_s:
                    raise LinkError(f"a write over nixl did not land in {timeout_s:g} s")
                self._take_notes()
                if waited_s > (pings + 1) * _PING_S:
                    pings += 1  # The only way to learn that the sender is gone.
                    self._agent.send_note(_PING)
                if self._landed < self._announced:
                    pause(waited_s)
        except NixlError as error:
            raise LinkError(f"a write over nixl failed: {error}") from error

    def stop(self) -> None:
        """Whoever is inside comes out within a millisecond or so."""
        self._stopped = True

    def close(self) -> None:
        """End the agent: what has been sent, and not come in yet, never will. Idempotent."""
        self._end_greeting()
        self._agent.close()

    def _greet(self) -> None:
        began, until_s = time.monotonic(), _HELLO_S
        try:
            while not (self._greeted or self._stopped):
                waited_s = time.monotonic() - began
                if waited_s > until_s:
                    return
                if self._take_notes():
                    self._agent.send_note(_HELLO)
                    until_s = waited_s + _LINGER_S  # UCX may need a few more steps to get it out.
                pause(waited_s)
        except NixlError as error:
            _log.warning("a sender's hello over nixl was not answered: %s", error)

    def _end_greeting(self) -> None:
        if not self._greeted:
            self._greeted = True
            self._greeter.join()

    def _take_notes(self) -> bool:
        """Drive the agent, note what has landed. Whether the sender said hello.

        A sender begins a write when the one before is in our memory, so the highest number says all, in whatever order
        the notes come.
        """
        hello = False
        for note in self._agent.notes():
            if note == _HELLO:
                hello = True
            elif len(note) == TOKEN_BYTES + _NUMBER.size and secrets.compare_digest(note[:TOKEN_BYTES], self._token):
                self._landed = max(self._landed, _NUMBER.unpack(note[TOKEN_BYTES:])[0])
            else:
                _log.warning("dropped a note that is not of this link")
        return hello


def say_hello(agent: NixlAgent) -> None:
    """See that notes come through, there and back, before a hand-off depends on it. Raises TransportUnavailable."""
    began = time.monotonic()
    agent.send_note(_HELLO)
    while _HELLO not in agent.notes():
        waited_s = time.monotonic() - began
        if waited_s > _HELLO_S:
            raise TransportUnavailable(f"the peer's agent was not reached in {_HELLO_S:g} s")
        pause(waited_s)

"""The plain use of the libraries behind `ucx` and `nixl`: the same bytes, without hand-offs, frames or fingerprints.

Both ends of each. They meet once; then, for each size, the receiver is told where bytes are to land and the sender
what goes there; for each transfer the receiver is `ready` before the sender's clock starts, and `take`s.
"""

import os
import time
from collections.abc import Sequence
from typing import Protocol

import msgspec

from kv_transfer.region import MemoryRegion
from kv_transfer.transport import LinkError

WAIT_S = 120.0
MESSAGE_BYTES = 16 << 20  # Of 1 MiB to all at once, the size that was fastest over loopback TCP.

Run = tuple[int, int]
"""(offset in a pool, size), in bytes."""


class PlainEnd(Protocol):
    """One end. One thread."""

    def greeting(self) -> bytes:
        """What the other end needs."""

    def meet(self, greeting: bytes) -> None:
        """Reach the other end."""

    def expect(self, here: Sequence[Run]) -> None:
        """Receiver: from now on everything lands in these runs of the pool."""

    def aim(self, here: Sequence[Run], there: Sequence[Run]) -> None:
        """Sender: from now on move these runs of the pool to those of the receiver's."""

    def send(self) -> None:
        """Sender: move them; all are in the peer's pool on return."""

    def ready(self) -> None:
        """Receiver: do what must come first."""

    def take(self) -> None:
        """Receiver: until all have landed."""

    def close(self) -> None:
        """Nothing moves any more."""


class PlainUcx:
    """Tagged messages, all of a transfer in flight at once, one answer at the end; a worker and an endpoint each.

    As `ucx` does it, with endpoint error handling and asleep while nothing comes: with both on two busy cores that is
    faster than to poll. Without error handling UCX would use the shared memory of one host, which `shm` is for.
    """

    def __init__(self, pool: MemoryRegion, host: str) -> None:
        """`pool` holds what is sent or received."""
        from kv_transfer.ucx_library import UcxContext, UcxLibrary
        from kv_transfer.ucx_port import Span, UcxPort, span_of

        self._span, self._start = Span, span_of(pool.buffer)
        self._context = UcxContext(UcxLibrary(), host)
        self._port = UcxPort(self._context)
        self._answer = memoryview(bytearray(1))
        self._answer_span = span_of(self._answer)
        self._spans: list[Span] = []

    def greeting(self) -> bytes:
        """The worker's address."""
        return self._port.address()

    def meet(self, greeting: bytes) -> None:
        """Begin to connect."""
        self._port.connect(greeting)

    def aim(self, here: Sequence[Run], there: Sequence[Run]) -> None:
        """See `expect`."""
        self.expect(here)

    def expect(self, here: Sequence[Run]) -> None:
        """A message for each run, of at most MESSAGE_BYTES; both sides must be cut alike."""
        start, kind = self._start.address, self._start.kind
        self._spans = [
            self._span(start + offset + done, min(size - done, MESSAGE_BYTES), kind)
            for offset, size in here
            for done in range(0, size, MESSAGE_BYTES)
        ]

    def send(self) -> None:
        """All messages, then the receiver's answer."""
        deadline = time.monotonic() + WAIT_S
        self._port.receive([self._answer_span], 2)
        self._port.send(self._spans, 1)
        self._port.finish(deadline)

    def ready(self) -> None:
        """Post all receives."""
        self._port.receive(self._spans, 1)

    def take(self) -> None:
        """Wait for them and answer."""
        self._port.finish(time.monotonic() + WAIT_S)
        self._port.send([self._answer_span], 2)
        self._port.finish(time.monotonic() + WAIT_S)

    def close(self) -> None:
        """End the worker."""
        self._port.close()
        self._context.close()


class _Meeting(msgspec.Struct):
    name: str
    metadata: bytes
    address: int


class PlainNixl:
    """One write of everything, prepared beforehand, posted and polled for; both ends poll."""

    def __init__(self, pool: MemoryRegion, host: str) -> None:
        """`pool` holds what is sent or received."""
        from kv_transfer.nixl_agent import NixlAgent, address_of, pair
        from kv_transfer.nixl_library import load

        self._pair = pair
        self._address = address_of(pool.buffer)
        self._agent = NixlAgent(load(host), [pool])
        self._peer_address = 0
        self._transfer: int | None = None

    def greeting(self) -> bytes:
        """The agent's metadata and where the pool lies."""
        return msgspec.msgpack.encode(_Meeting(self._agent.name, self._agent.way_in(), self._address))

    def meet(self, greeting: bytes) -> None:
        """Learn of the other agent."""
        meeting = msgspec.msgpack.decode(greeting, type=_Meeting)
        self._agent.meet(meeting.name, meeting.metadata)
        self._peer_address = meeting.address

    def expect(self, here: Sequence[Run]) -> None:
        """The sender alone says where."""

    def aim(self, here: Sequence[Run], there: Sequence[Run]) -> None:
        """Prepare the write, as its own benchmark does, outside of what is timed."""
        self._forget()
        ours = [(self._address + offset, size) for offset, size in here]
        theirs = [(self._peer_address + offset, size) for offset, size in there]
        self._transfer = self._agent.prepare(self._pair(ours, theirs), b"done")

    def send(self) -> None:
        """Post it and poll until it is over. Raises LinkError when it takes too long."""
        assert self._transfer is not None
        deadline = time.monotonic() + WAIT_S
        over = self._agent.post(self._transfer)
        while not over:
            over = self._agent.is_over(self._transfer)
            _in_time(deadline)

    def ready(self) -> None:
        """Nothing has to come first."""

    def take(self) -> None:
        """Poll until the note that follows the bytes is here. Raises LinkError when it takes too long."""
        deadline = time.monotonic() + WAIT_S
        while not self._agent.notes():
            _in_time(deadline)

    def close(self) -> None:
        """End the agent."""
        self._forget()
        self._agent.close()

    def _forget(self) -> None:
        if self._transfer is not None:
            self._agent.release(self._transfer)
            self._transfer = None


def _in_time(deadline: float) -> None:
    os.sched_yield()  # On a busy core, polling without it costs whole time slices.
    if time.monotonic() > deadline:
        raise LinkError(f"a plain transfer took more than {WAIT_S:g} s")


_ENDS: dict[str, type[PlainUcx] | type[PlainNixl]] = {"ucx": PlainUcx, "nixl": PlainNixl}


def plain_end(library: str, pool: MemoryRegion, host: str) -> PlainEnd:
    """An end of the plain use of this library."""
    return _ENDS[library](pool, host)

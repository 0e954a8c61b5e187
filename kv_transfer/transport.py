"""What a transport is: an ordered channel of messages to a peer, and a way for payload to reach the peer's pool.

* `Network` opens channels; `Channel` carries framed messages, each with an optional payload, in order or not at all.
* `Transport` is how payload travels once a channel is up: a `PayloadWriter` on one end, a `PayloadReader` on the
  other. In band it follows its Write message on the channel. Otherwise it goes its own way and the channel is for
  control only: the receiver has posted memory for it (ucx), or it lands without the receiver's help (shm, nixl:
  `one_sided`).

Every payload has a Write on the channel, and on its arrival the receiver waits until the payload is there and
fingerprints it. A write is complete when it returns; an asynchronous transport posts and waits inside, and a write is
small enough (pages.MAX_WRITE_BYTES) to wait for.
"""

import abc
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from kv_cache.layout import KVCacheLayout
from kv_transfer.fingerprinter import Fingerprinter, PageFingerprints
from kv_transfer.messages import Write
from kv_transfer.pages import PagesAt
from kv_transfer.region import MemoryRegion


class LinkError(Exception):
    """A channel cannot go on: it timed out, was stopped, or its bytes make no sense. The peer may still live."""


class PeerGone(LinkError):
    """The peer's end is closed, by itself or because its process is gone (or this end was stopped)."""


class TransportError(Exception):
    """One payload could not be written; the channel is as good as before."""


class TransportUnavailable(Exception):
    """This transport does not reach that peer. The message says why."""


class Channel(Protocol):
    """One connection. One thread sends, one receives; `stop*` may be called by any other while they do."""

    @property
    def peer(self) -> str:
        """Where it leads, for the log."""

    def send(self, message: bytes, payload: Sequence[memoryview], timeout_s: float) -> None:
        """Send one frame, whole, within the time. Raises LinkError."""

    def receive(self, *, max_message_bytes: int, max_payload_bytes: int, timeout_s: float | None) -> tuple[bytes, int]:
        """Wait for a frame (for ever if None); return its message and the size of its payload, still to be received.

        Once a frame has begun it must go on. Raises PeerGone at the end of the stream; LinkError when it stalls or is
        larger than allowed, before anything of that size is held.
        """

    def receive_payload(self, into: Sequence[memoryview], timeout_s: float) -> None:
        """Receive the payload announced, straight into this memory, within the time. Raises LinkError."""

    def skip_payload(self, size_bytes: int, timeout_s: float) -> None:
        """Throw the payload announced away. Raises LinkError."""

    def stop(self) -> None:
        """Both directions end: the threads inside come out at once, and the peer sees the end."""

    def stop_receiving(self) -> None:
        """Our receiving thread comes out; the peer sees nothing yet."""

    def stop_sending(self) -> None:
        """The peer sees the end; we still receive until it closes."""

    def wait_until_peer_closes(self) -> None:
        """Throw away what still comes, until the peer's end is closed or `stop` is called."""

    def close(self) -> None:
        """Free it. Only when no thread is inside."""


class Listener(Protocol):
    """Where channels come in."""

    @property
    def address(self) -> str:
        """What a peer passes to `connect`."""

    def accept(self) -> Channel:
        """Wait for the next channel. Raises LinkError once closed."""

    def close(self) -> None:
        """Accept no more. Any thread; idempotent."""


class PayloadWriter(Protocol):
    """The sender's end of one link's payload. Used by one thread, the link's writer."""

    @property
    def detail(self) -> str:
        """What the transport's library chose for this link ("rc_mlx5/mlx5_0:1"); empty when there was no choice."""

    def write(self, message: Write, source: Sequence[memoryview], timeout_s: float) -> None:
        """Move the pages that `message` names from `source`, and send `message` on the channel, once, when it is due.

        Complete on return: `source` is no longer read. Raises LinkError when the link is of no more use,
        TransportError when only this write failed and none of its bytes can land any more.
        """

    def close(self) -> None:
        """Let go of the peer. On return nothing of ours reads the local memory or writes the peer's. Idempotent."""


class FingerprintingWriter(PayloadWriter):
    """A writer that can fingerprint pages while it copies them, or while they are under way."""

    @abc.abstractmethod
    def write_pages(
        self, message: Write, source: PagesAt, seed: int, fingerprinter: Fingerprinter, timeout_s: float
    ) -> PageFingerprints:
        """As `write`, of the pages that `message` names; returns their fingerprints, taken from `source`."""


class PayloadReader(Protocol):
    """The receiver's end of one link's payload. `stop` is for any thread, the rest for the link's reader."""

    def read(self, size_bytes: int, announced_bytes: int, into: Sequence[memoryview], timeout_s: float) -> None:
        """The payload of the Write just received, `size_bytes` long, lies wholly in `into` on return.

        `announced_bytes` is what the frame says follows on the channel. Raises LinkError, also for a frame that says
        something else than this transport does.
        """

    def skip(self, size_bytes: int, announced_bytes: int, timeout_s: float) -> None:
        """The payload of the Write just received is not wanted: it lands nowhere. Raises LinkError."""

    def stop(self) -> None:
        """Whoever is inside comes out with LinkError, now and from now on. Never blocks."""

    def close(self) -> None:
        """On return nothing that this end asked for can land any more. When no thread is inside. Idempotent."""


class FingerprintingReader(PayloadReader):
    """A reader that can fingerprint pages while others are still on their way."""

    @abc.abstractmethod
    def read_pages(
        self, announced_bytes: int, into: PagesAt, seed: int, fingerprinter: Fingerprinter, timeout_s: float
    ) -> PageFingerprints:
        """As `read`; returns the fingerprints of the pages as they lie in `into`."""


Ask = Callable[[bytes], bytes]
"""Proposes a transport: sends its data to the peer, gives the peer's back. Raises TransportUnavailable, LinkError."""


class Transport(Protocol):
    """One way for payload to travel. One object a process; any thread, several links at once."""

    @property
    def name(self) -> str:
        """As in tickets, stats and receipts."""

    @property
    def one_sided(self) -> bool:
        """Whether bytes land without the receiver's help, so that only the sender knows when none is under way."""

    @property
    def write_bytes(self) -> int:
        """How large a write should be where there is that much to write; at most pages.MAX_WRITE_BYTES."""

    def offer(self, pool: MemoryRegion) -> bytes | None:
        """Receiver: what a sender needs to reach this pool, at most 4 KiB; None when it cannot be reached this way."""

    def connect(
        self, offer: bytes, channel: Channel, layout: KVCacheLayout, memory: Sequence[MemoryRegion], ask: Ask
    ) -> PayloadWriter:
        """Sender: reach the pool, of this layout, that the offer names; `memory` is where payload will come from.

        Calls `ask` once. The channel carries nothing else meanwhile. Raises TransportUnavailable, also after `ask`
        was answered (another transport is then proposed), or LinkError.
        """

    def accept(
        self, data: bytes, channel: Channel, layout: KVCacheLayout, pool: MemoryRegion
    ) -> tuple[bytes, PayloadReader]:
        """Receiver: the answer to what a sender's `ask` brought, and the way in. Raises TransportUnavailable."""

    def close(self) -> None:
        """Let go of what the process holds for it, after the last link. Idempotent."""


class Network(Protocol):
    """Opens channels, and knows the transports that go with them."""

    @property
    def transports(self) -> Mapping[str, Transport]:
        """All that can be used here, by name."""

    def listen(self, host: str, port: int) -> Listener:
        """Accept channels at this address only; port 0 takes a free one. Raises OSError."""

    def connect(self, address: str, timeout_s: float) -> Channel:
        """Reach a listener. Raises LinkError."""

    def close(self) -> None:
        """Close the transports, after the last link. By whoever made the network; idempotent."""


def choose_transports(network: Network, names: Sequence[str]) -> dict[str, Transport]:
    """The transports of these names, in this order. Raises ValueError for one that the network does not have."""
    unknown = [name for name in names if name not in network.transports]
    if unknown or not names:
        known = ", ".join(network.transports)
        raise ValueError(f"transports must be some of {known}, not {', '.join(unknown) or 'none'}")
    return {name: network.transports[name] for name in names}


def check_none_follows(announced_bytes: int) -> None:
    """For readers whose payload does not come on the channel. Raises LinkError for a frame that has one."""
    if announced_bytes:
        raise LinkError(f"a payload of {announced_bytes} bytes on a link that writes into the pool by itself")


def close_transports(transports: Mapping[str, Transport]) -> None:
    """Close each of them, whatever the others do. For networks."""
    with contextlib.ExitStack() as stack:
        for transport in transports.values():
            stack.callback(transport.close)

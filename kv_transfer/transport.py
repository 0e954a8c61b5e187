"""What a transport is: an ordered channel of messages to a peer, and a way for payload to reach the peer's pool.

* `Network` opens channels; `Channel` carries framed messages, each with an optional payload, in order or not at all.
* `Transport` is how payload travels once a channel is up. An in-band one sends it behind its Write message; a
  one-sided one writes into the peer's pool without the peer's help, and uses the channel for control only.

A payload write is complete when it returns: in-band, in order on the channel; one-sided, in the peer's memory. An
asynchronous transport posts and waits inside one `write`, which is small enough (pages.MAX_WRITE_BYTES) to wait for.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from kv_cache.layout import KVCacheLayout
from kv_transfer.messages import Write
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
    """Writes payload into one peer's pool. Used by one thread, the link's writer."""

    def write(self, message: Write, source: Sequence[memoryview], timeout_s: float) -> None:
        """Move the pages that `message` names from `source`, complete on return.

        Raises LinkError when the channel broke, TransportError when only this write failed.
        """

    def close(self) -> None:
        """Let go of the peer's memory. Idempotent."""


class Transport(Protocol):
    """One way for payload to travel."""

    @property
    def name(self) -> str:
        """As in tickets, stats and receipts."""

    @property
    def one_sided(self) -> bool:
        """Whether bytes land without the receiver's help, so that only the sender knows when none is under way."""

    def offer(self, pool: MemoryRegion) -> bytes | None:
        """Receiver: what a sender needs to reach this pool, at most 4 KiB; None when it cannot be reached this way."""

    def connect(self, descriptor: bytes, channel: Channel, layout: KVCacheLayout) -> PayloadWriter:
        """Sender: reach the pool that the offer names. Raises TransportUnavailable."""


class Network(Protocol):
    """Opens channels, and knows the transports that go with them."""

    @property
    def transports(self) -> Mapping[str, Transport]:
        """All that can be used here, by name."""

    def listen(self, host: str, port: int) -> Listener:
        """Accept channels at this address only; port 0 takes a free one. Raises OSError."""

    def connect(self, address: str, timeout_s: float) -> Channel:
        """Reach a listener. Raises LinkError."""


def choose_transports(network: Network, names: Sequence[str]) -> dict[str, Transport]:
    """The transports of these names, in this order. Raises ValueError for one that the network does not have."""
    unknown = [name for name in names if name not in network.transports]
    if unknown or not names:
        known = ", ".join(network.transports)
        raise ValueError(f"transports must be some of {known}, not {', '.join(unknown) or 'none'}")
    return {name: network.transports[name] for name in names}

"""Payload that follows its Write message on the channel; the receiver puts it into the pool itself."""

from collections.abc import Sequence

from kv_cache.layout import KVCacheLayout
from kv_transfer.messages import Write
from kv_transfer.pages import USUAL_WRITE_BYTES
from kv_transfer.region import MemoryRegion
from kv_transfer.transport import Ask, Channel, LinkError, PayloadReader, PayloadWriter
from kv_transfer.wire import encode


class InBandTransport:
    """Works wherever a channel does."""

    one_sided = False
    write_bytes = USUAL_WRITE_BYTES

    def __init__(self, name: str) -> None:
        self.name = name

    def offer(self, pool: MemoryRegion) -> bytes | None:
        """Every pool can be reached through its worker."""
        return b""

    def connect(
        self, offer: bytes, channel: Channel, layout: KVCacheLayout, memory: Sequence[MemoryRegion], ask: Ask
    ) -> PayloadWriter:
        """The channel is all it takes. Raises TransportUnavailable when the peer declines."""
        ask(b"")
        return _InBandWriter(channel)

    def accept(
        self, data: bytes, channel: Channel, layout: KVCacheLayout, pool: MemoryRegion
    ) -> tuple[bytes, PayloadReader]:
        """The channel is all it takes."""
        return b"", _InBandReader(channel)

    def close(self) -> None:
        """Nothing is held."""


class _InBandWriter:
    detail = ""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def write(self, message: Write, source: Sequence[memoryview], timeout_s: float) -> None:
        self._channel.send(encode(message), source, timeout_s)

    def close(self) -> None:
        return


class _InBandReader:
    """The end of the channel ends it too, so there is nothing to stop."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def read(self, size_bytes: int, announced_bytes: int, into: Sequence[memoryview], timeout_s: float) -> None:
        _check(size_bytes, announced_bytes)
        self._channel.receive_payload(into, timeout_s)

    def skip(self, size_bytes: int, announced_bytes: int, timeout_s: float) -> None:
        _check(size_bytes, announced_bytes)
        self._channel.skip_payload(size_bytes, timeout_s)

    def stop(self) -> None:
        return

    def close(self) -> None:
        return


def _check(size_bytes: int, announced_bytes: int) -> None:
    if announced_bytes != size_bytes:
        raise LinkError(f"a write of {announced_bytes} bytes that names pages of {size_bytes}")

"""Payload that follows its Write message on the channel; the receiver puts it into the pool itself."""

from collections.abc import Sequence

from kv_cache.layout import KVCacheLayout
from kv_transfer.messages import Write
from kv_transfer.region import MemoryRegion
from kv_transfer.transport import Channel, PayloadWriter
from kv_transfer.wire import encode


class InBandTransport:
    """Works wherever a channel does."""

    one_sided = False

    def __init__(self, name: str) -> None:
        self.name = name

    def offer(self, pool: MemoryRegion) -> bytes | None:
        """Every pool can be reached through its worker."""
        return b""

    def connect(self, descriptor: bytes, channel: Channel, layout: KVCacheLayout) -> PayloadWriter:
        """The channel is all it takes."""
        return _InBandWriter(channel)


class _InBandWriter:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def write(self, message: Write, source: Sequence[memoryview], timeout_s: float) -> None:
        self._channel.send(encode(message), source, timeout_s)

    def close(self) -> None:
        return

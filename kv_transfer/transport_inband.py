"""Payload that follows its Write message on the channel; the receiver puts it into the pool itself.

Both ends fingerprint a part of it right before the kernel reads it, or right after the kernel has written it: small
enough to be in the CPU's cache then.
"""

import time
from collections.abc import Iterator, Sequence

import numpy as np

from kv_cache.layout import KVCacheLayout
from kv_transfer.fingerprinter import Fingerprinter, PageFingerprints
from kv_transfer.messages import Write
from kv_transfer.pages import USUAL_WRITE_BYTES, PagesAt
from kv_transfer.region import MemoryRegion
from kv_transfer.transport import (
    Ask,
    Channel,
    FingerprintingReader,
    FingerprintingWriter,
    LinkError,
    PayloadReader,
    PayloadWriter,
)
from kv_transfer.wire import encode

_PART_BYTES = 1024 * 1024


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


class _InBandWriter(FingerprintingWriter):
    detail = ""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def write(self, message: Write, source: Sequence[memoryview], timeout_s: float) -> None:
        self._channel.send(encode(message), source, timeout_s)

    def write_pages(
        self, message: Write, source: PagesAt, seed: int, fingerprinter: Fingerprinter, timeout_s: float
    ) -> PageFingerprints:
        found: list[PageFingerprints] = []

        def parts() -> Iterator[list[memoryview]]:
            for part in source.parts(_PART_BYTES):
                found.append(fingerprinter.fingerprints(part, seed))
                yield part.views()

        self._channel.send_parts(encode(message), source.size_bytes, parts(), timeout_s)
        return np.concatenate(found)

    def close(self) -> None:
        return


class _InBandReader(FingerprintingReader):
    """The end of the channel ends it too, so there is nothing to stop."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def read(self, size_bytes: int, announced_bytes: int, into: Sequence[memoryview], timeout_s: float) -> None:
        _check(size_bytes, announced_bytes)
        self._channel.receive_payload(into, timeout_s)

    def read_pages(
        self, announced_bytes: int, into: PagesAt, seed: int, fingerprinter: Fingerprinter, timeout_s: float
    ) -> PageFingerprints:
        _check(into.size_bytes, announced_bytes)
        deadline = time.monotonic() + timeout_s
        found: list[PageFingerprints] = []
        for part in into.parts(_PART_BYTES):
            self._channel.receive_payload(part.views(), max(0.0, deadline - time.monotonic()))
            found.append(fingerprinter.fingerprints(part, seed))
        return np.concatenate(found)

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

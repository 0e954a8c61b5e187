"""Same host: the sender maps the receiver's pool and copies straight into it; a Write says what has been copied."""

from collections.abc import Sequence

import numpy as np

from kv_cache.layout import KVCacheLayout
from kv_transfer.fingerprinter import Fingerprinter, PageFingerprints
from kv_transfer.messages import Write
from kv_transfer.pages import USUAL_WRITE_BYTES, PagesAt, run_of
from kv_transfer.region import MemoryRegion, RegionError
from kv_transfer.transport import (
    Ask,
    Channel,
    FingerprintingWriter,
    PayloadReader,
    PayloadWriter,
    TransportError,
    TransportUnavailable,
    check_none_follows,
)
from kv_transfer.wire import encode


class ShmTransport:
    """Offered for shared pools; reached by mapping them, which fails, as it should, from any other host."""

    name = "shm"
    one_sided = True
    write_bytes = 2 * USUAL_WRITE_BYTES  # What a write costs beside the copy counts most where the copy is fastest.

    def offer(self, pool: MemoryRegion) -> bytes | None:
        """The region's descriptor; None for private memory."""
        return pool.descriptor() if pool.shared else None

    def connect(
        self, offer: bytes, channel: Channel, layout: KVCacheLayout, memory: Sequence[MemoryRegion], ask: Ask
    ) -> PayloadWriter:
        """Map the pool. Raises TransportUnavailable, LinkError."""
        try:
            region = MemoryRegion.open_remote(offer)
        except RegionError as error:
            raise TransportUnavailable(str(error)) from error
        try:
            ask(b"")
        except BaseException:
            region.close()
            raise
        return PoolWriter(region.buffer, layout, channel, region)

    def accept(
        self, data: bytes, channel: Channel, layout: KVCacheLayout, pool: MemoryRegion
    ) -> tuple[bytes, PayloadReader]:
        """The sender has the pool mapped and writes alone."""
        return b"", LandedReader()

    def close(self) -> None:
        """Nothing is held."""


class PoolWriter(FingerprintingWriter):
    """Copies pages into a peer's pool that is mapped here, then says so. `region`, if given, is closed with it."""

    detail = ""

    def __init__(
        self, pool: memoryview, layout: KVCacheLayout, channel: Channel, region: MemoryRegion | None = None
    ) -> None:
        self._pool = pool
        self._layout = layout
        self._channel = channel
        self._region = region
        self._num_blocks = pool.nbytes // layout.block_bytes

    def write(self, message: Write, source: Sequence[memoryview], timeout_s: float) -> None:
        """Copy. Raises TransportError, before a byte is written, for blocks outside the pool; LinkError."""
        copy_views(source, self._target(message).views())
        self._tell(message, timeout_s)

    def write_pages(
        self, message: Write, source: PagesAt, seed: int, fingerprinter: Fingerprinter, timeout_s: float
    ) -> PageFingerprints:
        """Fingerprint and copy in one pass. Raises as `write`."""
        found = fingerprinter.copy(source, self._target(message), seed)
        self._tell(message, timeout_s)
        return found

    def _target(self, message: Write) -> PagesAt:
        if not all(0 <= block_id < self._num_blocks for block_id in message.block_ids):
            raise TransportError(f"the ticket names blocks outside the peer's pool of {self._num_blocks} blocks")
        return PagesAt.in_pool(run_of(message), self._layout, self._pool, message.block_ids)

    def _tell(self, message: Write, timeout_s: float) -> None:
        # The peer reads the pages only after this message has gone through the kernel, twice: a barrier on any CPU.
        self._channel.send(encode(message), (), timeout_s)

    def close(self) -> None:
        """Unmap. Idempotent."""
        if self._region is not None:
            self._region.close()


class LandedReader:
    """The receiver's end where a payload lies in the pool before its Write is sent."""

    def read(self, size_bytes: int, announced_bytes: int, into: Sequence[memoryview], timeout_s: float) -> None:
        """It is there already. Raises LinkError for a frame with a payload."""
        self.skip(size_bytes, announced_bytes, timeout_s)

    def skip(self, size_bytes: int, announced_bytes: int, timeout_s: float) -> None:
        """Too late to keep it out. Raises LinkError for a frame with a payload."""
        check_none_follows(announced_bytes)

    def stop(self) -> None:
        """Nobody waits inside."""

    def close(self) -> None:
        """Nothing was asked for."""


def copy_views(source: Sequence[memoryview], target: Sequence[memoryview]) -> None:
    """Copy the bytes of `source`, taken as one sequence, into `target`, taken as one. Both have the same length.

    numpy copies without the interpreter lock, so an engine thread goes on meanwhile.
    """
    targets = iter(target)
    into = memoryview(b"")
    for view in source:
        left = view
        while left.nbytes:
            if not into.nbytes:
                into = next(targets)
            size = min(left.nbytes, into.nbytes)
            np.copyto(np.frombuffer(into[:size], np.uint8), np.frombuffer(left[:size], np.uint8))
            left, into = left[size:], into[size:]

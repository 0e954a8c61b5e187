"""Same host: the sender maps the receiver's pool and copies straight into it. Control stays on the channel."""

from collections.abc import Sequence

import numpy as np

from kv_cache.layout import KVCacheLayout
from kv_transfer.messages import Write
from kv_transfer.pages import views
from kv_transfer.region import MemoryRegion, RegionError
from kv_transfer.transport import Channel, PayloadWriter, TransportError, TransportUnavailable


class ShmTransport:
    """Offered for shared pools; reached by mapping them, which fails, as it should, from any other host."""

    name = "shm"
    one_sided = True

    def offer(self, pool: MemoryRegion) -> bytes | None:
        """The region's descriptor; None for private memory."""
        return pool.descriptor() if pool.shared else None

    def connect(self, descriptor: bytes, channel: Channel, layout: KVCacheLayout) -> PayloadWriter:
        """Map the pool. Raises TransportUnavailable."""
        try:
            region = MemoryRegion.open_remote(descriptor)
        except RegionError as error:
            raise TransportUnavailable(str(error)) from error
        return PoolWriter(region.buffer, layout, region)


class PoolWriter:
    """Copies pages into a peer's pool that is mapped here. `region`, if given, is closed with the writer."""

    def __init__(self, pool: memoryview, layout: KVCacheLayout, region: MemoryRegion | None) -> None:
        self._pool = pool
        self._layout = layout
        self._region = region
        self._num_blocks = pool.nbytes // layout.block_bytes

    def write(self, message: Write, source: Sequence[memoryview], timeout_s: float) -> None:
        """Copy. Raises TransportError, before a byte is written, for blocks outside the pool."""
        if not all(0 <= block_id < self._num_blocks for block_id in message.block_ids):
            raise TransportError(f"the ticket names blocks outside the peer's pool of {self._num_blocks} blocks")
        layers = range(message.layer, message.layer + message.num_layers)
        copy_views(source, views(self._pool, self._layout, message.block_ids, layers))

    def close(self) -> None:
        """Unmap. Idempotent."""
        if self._region is not None:
            self._region.close()


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

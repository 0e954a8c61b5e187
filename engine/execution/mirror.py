"""A copy, in host memory, of those blocks of a device's pool that hand-offs read or write.

Transports, fingerprints and conversion work on the worker's memory region, so all of them work for a pool on a GPU
too, at the price of host memory as large as the pool:

    prefill worker    each layer of a step: the pages it wrote, device -> host, then `on_layer`
    both              a prefix that was reserved or a sequence that was received: its blocks, host -> device
    decode worker     a prefix that is pinned to be sent: its blocks, device -> host

Blocks that a decode worker generates are not copied: few of them are ever sent.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from engine.execution.device import Device, Event
from kv_cache.layout import KVCacheLayout


class PoolMirror:
    """Copies of whole pages between two pools of one layout. Owner thread only."""

    def __init__(self, device: Device, pool: Tensor, host: Tensor, layout: KVCacheLayout) -> None:
        """`pool`: uint8 on the device, `host`: one from `Device.shared_buffer`, of the same size.

        Raises ValueError for pools of different sizes.
        """
        if pool.numel() != host.numel():
            raise ValueError(f"a pool of {pool.numel()} bytes cannot be mirrored in {host.numel()}")
        self._device = device
        shape = (-1, layout.num_layers, layout.page_bytes)
        self._pool, self._host = pool.view(shape), host.view(shape)

    @torch.inference_mode()
    def layer_to_host(self, block_ids: Sequence[int], layer: int) -> Event:
        """Queue copies of one layer of these blocks, behind what is on the compute stream; nothing there waits."""
        with self._device.copying():
            for block_id in block_ids:
                self._host[block_id, layer].copy_(self._pool[block_id, layer], non_blocking=True)
            return self._device.record()

    @torch.inference_mode()
    def to_host(self, block_ids: Iterable[int]) -> None:
        """Copy these blocks, and return when they have arrived."""
        with self._device.copying():
            for run in _runs(block_ids):
                self._host[run].copy_(self._pool[run], non_blocking=True)
            event = self._device.record()
        event.wait()

    @torch.inference_mode()
    def to_device(self, block_ids: Iterable[int]) -> None:
        """Queue copies of these blocks on the compute stream: what is queued later finds them."""
        with self._device.queueing():
            for run in _runs(block_ids):
                self._pool[run].copy_(self._host[run], non_blocking=True)


def _runs(block_ids: Iterable[int]) -> Iterator[slice]:
    """Neighbours are copied at once."""
    start = end = -1
    for block_id in sorted(set(block_ids)):
        if block_id != end:
            if end > start:
                yield slice(start, end)
            start = block_id
        end = block_id + 1
    if end > start:
        yield slice(start, end)

"""The small tensors of a step on their way to the device, and its tokens on their way back.

    tensors on the host     | ids | positions | slots | tables | ...
    one buffer, pinned      | ids | positions | slots | tables | ... |      each on a border of 16 bytes
                                 one copy, nobody waits
    one buffer, device      | ids | positions | slots | tables | ... |      views of it are handed out

Where the device reads the host's memory the tensors are handed out as they are.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, Final

import torch
from torch import Tensor

from engine.batch import Batch
from engine.execution.device import Device, Event

_ALIGNMENT: Final = 16
_SMALLEST_BYTES: Final = 1 << 14

# One that the device may still read, one that is filled for the next step, one for a step that came otherwise.
_NUM_BUFFERS: Final = 3

_TENSORS: Final = tuple(field.name for field in fields(Batch) if field.type is Tensor)


class Staging:
    """Copies to a device. Owner thread only; copies are queued on the stream at hand."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._buffers: list[Tensor] = [device.host_buffer(0)] * _NUM_BUFFERS
        self._copied: list[Event | None] = [None] * _NUM_BUFFERS
        self._turn = 0

    def upload(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors (contiguous, on the host) on the device, after one copy that is queued. They may be changed as
        soon as this returns, unless the device reads the host's memory."""
        if self._device.reads_host:
            return list(tensors)
        ends: list[int] = []
        end = 0
        for tensor in tensors:
            end += _aligned(tensor.nbytes)
            ends.append(end)
        host = self._next_buffer(end)
        for tensor, end_of_it in zip(tensors, ends, strict=True):
            _part(host, end_of_it - _aligned(tensor.nbytes), tensor).copy_(tensor)
        # The allocator gives memory that is free in the order of the stream.
        copied = torch.empty(end, dtype=torch.uint8, device=self._device.torch_device)
        copied.copy_(host[:end], non_blocking=True)
        self._copied[self._turn] = self._device.record()
        return [
            _part(copied, end_of_it - _aligned(tensor.nbytes), tensor)
            for tensor, end_of_it in zip(tensors, ends, strict=True)
        ]

    def upload_batch(self, batch: Batch) -> Batch:
        """The batch with all its tensors on the device."""
        if self._device.reads_host:
            return batch
        copies = self.upload([getattr(batch, name) for name in _TENSORS])
        changes: dict[str, Any] = dict(zip(_TENSORS, copies, strict=True))
        return replace(batch, **changes)

    def _next_buffer(self, size_bytes: int) -> Tensor:
        self._turn = (self._turn + 1) % _NUM_BUFFERS
        copied = self._copied[self._turn]
        if copied is not None:
            copied.wait()
        if len(self._buffers[self._turn]) < size_bytes:
            room = max(_SMALLEST_BYTES, 1 << (size_bytes - 1).bit_length())
            self._buffers[self._turn] = self._device.host_buffer(room)
        return self._buffers[self._turn]


class Fetch:
    """A small tensor on its way to the host. Made, and waited for, by the owner thread."""

    def __init__(self, device: Device, tensor: Tensor) -> None:
        """Queues a copy of `tensor` (contiguous, not empty) on the stream at hand."""
        self._host = tensor
        if not device.reads_host:
            self._host = _part(device.host_buffer(tensor.nbytes), 0, tensor)
            self._host.copy_(tensor, non_blocking=True)
        self._event = device.record()

    def wait(self) -> Tensor:
        """The tensor on the host, once all that was queued before it is done: the one wait of a step."""
        self._event.wait()
        return self._host


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT


def _part(buffer: Tensor, offset: int, like: Tensor) -> Tensor:
    """A view of a uint8 buffer, in the shape and dtype of another tensor."""
    return buffer[offset : offset + like.nbytes].view(like.dtype).view(like.shape)

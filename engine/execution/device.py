"""What the engine needs of a device that computes by itself while the host goes on.

    host        | queue step n | lay out step n + 1 | wait for n's tokens | publish, schedule | queue step n + 1 | ...
    compute                    | step n ................................. |                   | step n + 1 ...
    copies                          | layer 0 to the host | layer 1 ... |

All computing is queued in one order, the *compute stream*; one more stream copies what the host wants to have early.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A point in what was queued. Any thread."""

    def done(self) -> bool:
        """Whether everything before the point is done. Does not wait."""
        ...

    def wait(self) -> None:
        """Return when everything before the point is done."""
        ...


class Device(Protocol):
    """Owner thread only."""

    @property
    def torch_device(self) -> torch.device:
        """Where tensors are."""
        ...

    @property
    def reads_host(self) -> bool:
        """Whether kernels read the host's tensors as they are: then nothing is copied for them."""
        ...

    def queueing(self) -> AbstractContextManager[None]:
        """What is called inside is queued on the compute stream."""
        ...

    def copying(self) -> AbstractContextManager[None]:
        """What is called inside is queued on the stream of copies, behind all that is on the compute stream now."""
        ...

    def record(self) -> Event:
        """A point behind all that was queued on the stream at hand."""
        ...

    def host_buffer(self, size_bytes: int) -> Tensor:
        """uint8 [size_bytes] on the host, that copies in both directions can use without making anybody wait."""
        ...

    def shared_buffer(self, buffer: memoryview) -> Tensor:
        """The same for memory that is there already, for as long as the process lives; writable, page-aligned.

        Raises OSError when the device cannot have it.
        """
        ...

    def capture(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """`work`, to be queued again and again with little ado: the same operations on the same memory, whatever is in
        it then. What they return is overwritten each time, by this or by another capture."""
        ...


class CpuDevice:
    """A CPU as a Device: everything is done when its call returns. Tests run on it what a GPU runs."""

    def __init__(self, *, reads_host: bool = True) -> None:
        """`reads_host` False: copies are made as for a device with memory of its own."""
        self.torch_device = torch.device("cpu")
        self.reads_host = reads_host

    def queueing(self) -> AbstractContextManager[None]:
        """See Device."""
        return nullcontext()

    def copying(self) -> AbstractContextManager[None]:
        """See Device."""
        return nullcontext()

    def record(self) -> Event:
        """See Device."""
        return DONE

    def host_buffer(self, size_bytes: int) -> Tensor:
        """See Device."""
        return torch.empty(size_bytes, dtype=torch.uint8)

    def shared_buffer(self, buffer: memoryview) -> Tensor:
        """See Device."""
        return torch.frombuffer(buffer, dtype=torch.uint8)

    def capture(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """See Device: a direct call."""
        return work


class _Done:
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return


DONE: Event = _Done()
"""The event of everything that is done already."""

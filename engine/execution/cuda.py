"""CUDA behind the interface of a device. All that only a GPU can run is in this file, and it has never run on one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor

from engine.execution.device import Event

_PORTABLE: Final = 1  # cudaHostRegisterPortable: pinned for every device


class CudaEvent:
    """See Event."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def done(self) -> bool:
        """See Event."""
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """See Event."""
        self._event.synchronize()


class CudaDevice:
    """See Device. Two streams of its own; graphs share one pool of memory, as they never run side by side."""

    reads_host = False

    def __init__(self, device: torch.device) -> None:
        """Makes `device` the calling thread's. Raises ValueError when torch sees no such device."""
        check_cuda(device)
        torch.cuda.set_device(device)
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        self._compute = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
        self._copies = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
        self._graph_memory = torch.cuda.graph_pool_handle()

    @contextmanager
    def queueing(self) -> Iterator[None]:
        """See Device. May be called by another thread than made the device."""
        with torch.cuda.stream(self._compute):
            yield

    @contextmanager
    def copying(self) -> Iterator[None]:
        """See Device."""
        self._copies.wait_stream(self._compute)
        with torch.cuda.stream(self._copies):
            yield

    def record(self) -> Event:
        """See Device."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.torch_device))
        return CudaEvent(event)

    def host_buffer(self, size_bytes: int) -> Tensor:
        """See Device: pinned."""
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)

    def shared_buffer(self, buffer: memoryview) -> Tensor:
        """See Device. Pinned until the process ends, as nobody can tell when the last copy has read it."""
        tensor = torch.frombuffer(buffer, dtype=torch.uint8)
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = int(runtime.cudaHostRegister(tensor.data_ptr(), tensor.numel(), _PORTABLE))
        if status:
            raise OSError(f"{tensor.numel()} bytes of memory cannot be pinned: CUDA error {status}")
        return tensor

    def capture(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """See Device: a CUDA graph. `work` runs once before, so that its kernels are compiled and its scratch is made
        outside. Other threads may use CUDA meanwhile."""
        with self.queueing():
            work()
        self._compute.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._graph_memory, stream=self._compute, capture_error_mode="thread_local"):
            result = work()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


def check_cuda(device: torch.device) -> None:
    """Raises ValueError, naming the flag, when torch sees no such device."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        raise ValueError(f"--device {device}: torch sees {count} CUDA devices")

"""The ranks of one worker and what they say to each other while a model runs.

A group is gloo where tensors live on the CPU and NCCL where they live on GPUs. It is an object of its own, not torch's
default group of the process, so that two engines of one process (as tests have them) do not meet.

Sums: two ranks add two numbers, which no order can change. With more ranks both libraries add in an order that depends
on size and shape alone, and every rank receives the sum that one rank has computed: all ranks hold the same bits, and
the same step gives the same bits again.
"""

import socket
from datetime import timedelta
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

# Documented as public, but the package's own code does not mark it so.
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

_HOST: Final = "127.0.0.1"
_BACKLOG: Final = 64

# The longest time that one rank waits for another within a step. Ranks begin a step together, and it is short.
STEP_TIMEOUT_S: Final = 60.0
_MEETING_TIMEOUT_S: Final = 60.0


class _Collectives(Protocol):
    """What both of torch's backends have; its type stubs leave it out."""

    def allreduce(self, tensors: list[Tensor], options: dist.AllreduceOptions) -> dist.Work: ...

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: dist.GatherOptions) -> dist.Work: ...

    def barrier(self, options: dist.BarrierOptions) -> dist.Work: ...


class GroupStore:
    """Where the ranks of one group find each other: kept by rank 0, on a port of this host that the kernel chose."""

    def __init__(self, size: int) -> None:
        """Listens at once; the others may come whenever they are ready."""
        with socket.socket() as listener:
            # Bound here, because a store left to itself listens on every address of the host.
            listener.bind((_HOST, 0))
            listener.listen(_BACKLOG)
            self.port: int = listener.getsockname()[1]
            self.store = TCPStore(
                _HOST,
                self.port,
                size,
                is_master=True,
                timeout=timedelta(seconds=_MEETING_TIMEOUT_S),
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )


class TensorParallel:
    """One rank of a group. Made first, connected when all ranks are ready; then used by one thread.

    Every rank must make the same calls in the same order. A call raises RuntimeError when a rank has died or does not
    come within the timeout: the group is of no use then. So does a call before `connect`.
    """

    def __init__(self, rank: int, size: int, device: torch.device | None = None) -> None:
        """Raises ValueError for a rank that is none of the `size`."""
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} is none of {size}")
        self.rank = rank
        self.size = size
        self.device = device or torch.device("cpu")
        self._backend: _Collectives | None = None
        self._store: Store | None = None
        self._sum = dist.AllreduceOptions()
        self._gather = dist.GatherOptions()
        self._barrier = dist.BarrierOptions()
        self._gather.rootRank = 0

    @property
    def backend_name(self) -> str:
        """`gloo` or `nccl`, by the device."""
        return "nccl" if self.device.type == "cuda" else "gloo"

    def connect(self, store: int | GroupStore, *, step_timeout_s: float = STEP_TIMEOUT_S) -> None:
        """Meet the other ranks at a store, within a minute: rank 0 gives its own, the others its port.

        `step_timeout_s` bounds every later call. Raises RuntimeError when not all ranks come.
        """
        timeout = timedelta(seconds=_MEETING_TIMEOUT_S)
        if isinstance(store, GroupStore):
            self._store = store.store
        else:
            self._store = TCPStore(_HOST, store, self.size, is_master=False, timeout=timeout)
        for options in (self._sum, self._gather, self._barrier):
            options.timeout = timedelta(seconds=step_timeout_s)
        meet = self._nccl if self.backend_name == "nccl" else self._gloo
        self._backend = meet(self._store, timeout)

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace a contiguous tensor, of one shape on all ranks, by the sum over the ranks."""
        self._connected.allreduce([tensor], self._sum).wait()

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """On rank 0 the tensors (contiguous, of one shape) of all ranks in their order, on the others nothing."""
        parts = [torch.empty_like(tensor) for _ in range(self.size)] if self.rank == 0 else []
        self._connected.gather([parts] if parts else [], [tensor], self._gather).wait()
        return parts

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        self._connected.barrier(self._barrier).wait()

    def close(self) -> None:
        """Part from the other ranks; whoever still waits for this one gets an error. Idempotent."""
        self._backend = None
        self._store = None

    @property
    def _connected(self) -> _Collectives:
        if self._backend is None:
            raise RuntimeError("this rank is not connected to its group")
        return self._backend

    def _gloo(self, store: Store, timeout: timedelta) -> _Collectives:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timeout
        # Left to itself gloo listens on the address that the host's name stands for.
        options._devices = [gloo.create_device(hostname=_HOST)]
        collectives: _Collectives = gloo(store, self.rank, self.size, options)
        return collectives

    def _nccl(self, store: Store, timeout: timedelta) -> _Collectives:
        torch.cuda.set_device(self.device)
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = timeout
        collectives: _Collectives = nccl(store, self.rank, self.size, options)
        return collectives

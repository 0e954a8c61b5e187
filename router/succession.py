"""One router process follows another on the same HTTP and gRPC port, and no request is lost.

1. The successor starts beside it with `--share-ports` and `--await-workers N`: workers attach to it at an internal port
   of its own, and its doors stay closed until so many have. 2. Its doors open: a new connection goes to either process.
3. The predecessor gets SIGUSR1. It closes its ports, and so gets no new connection. On those that it has it answers
   what comes, each of them ending with its next answer, and then it drains as ever.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from kvferry_rpc.internal_pb2 import Register
from router.workers.worker_registry import WorkerRegistry
from runtime.process import SUCCESSOR_SIGNAL

T = TypeVar("T")


async def workers_attached(registry: WorkerRegistry, count: int) -> None:
    """Return when so many workers are attached, and one that decodes is well. Event-loop thread only."""
    changes = _Changes()
    registry.subscribe(changes)
    while not registry.ready or len(registry.views()) < count:
        changes.seen.clear()
        await changes.seen.wait()


class _Changes:
    """A listener of the registry that only remembers that there was something."""

    def __init__(self) -> None:
        self.seen = asyncio.Event()

    def worker_attached(self, register: Register) -> None:
        self.seen.set()

    def worker_detached(self, register: Register) -> None:
        self.seen.set()

    def room_changed(self) -> None:
        self.seen.set()


class Succession:
    """Whether this process is to leave for a successor. Event-loop thread only."""

    def __init__(self, shutdown: asyncio.Event) -> None:
        """`shutdown` is set too when the signal comes."""
        self.has_successor = False
        self._shutdown = shutdown
        asyncio.get_running_loop().add_signal_handler(SUCCESSOR_SIGNAL, self._on_signal)

    def _on_signal(self) -> None:
        self.has_successor = True
        self._shutdown.set()


async def before(shutdown: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """What `work` returns, or None when `shutdown` is set first: then it has been cancelled, and has ended."""
    task, stop = asyncio.create_task(work), asyncio.create_task(shutdown.wait())
    try:
        await asyncio.wait((task, stop), return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        for one in (task, stop):
            one.cancel()
        await asyncio.gather(task, stop, return_exceptions=True)

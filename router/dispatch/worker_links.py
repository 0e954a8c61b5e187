"""The router's connections to the attached workers: a session to each decode worker, a channel to each prefill worker.

Opened when a worker attaches, closed when it detaches: there is no second list of workers to disagree with the first.
"""

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import grpc

from kvferry_rpc.internal_pb2 import Register, Role
from kvferry_rpc.internal_pb2_grpc import PrefillWorkerStub
from router.dispatch.decode_session import DecodeSession
from router.workers.worker_registry import WorkerRegistry

if TYPE_CHECKING:  # The asyncio face of the stub exists for type checkers alone.
    from kvferry_rpc.internal_pb2_grpc import PrefillWorkerAsyncStub


class PrefillLink:
    """The channel to one attached prefill worker, and whom to tell when it is gone. Event-loop thread only.

    A call whose request could not be written, because the connection broke just then, may never hear of it from gRPC:
    neither a status nor a cancellation. So who waits for such a call also waits for the end of the link.
    """

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.stub: PrefillWorkerAsyncStub = PrefillWorkerStub(channel)
        self.is_gone = False  # No call can be begun any more.
        self._watchers: list[Callable[[], None]] = []

    @contextmanager
    def watch(self, on_gone: Callable[[], None]) -> Iterator[None]:
        """Call `on_gone` if the worker detaches before the block ends."""
        self._watchers.append(on_gone)
        try:
            yield
        finally:
            self._watchers.remove(on_gone)

    def gone(self) -> None:
        """The worker has detached."""
        self.is_gone = True
        for on_gone in list(self._watchers):
            on_gone()


class WorkerLinks:
    """Follows a registry (as its listener) with open connections. Event-loop thread only."""

    def __init__(
        self, registry: WorkerRegistry, router_id: str, connect: Callable[[str], grpc.aio.Channel], rng: random.Random
    ) -> None:
        """`connect` makes a channel, with the cluster secret, to an address (host:port)."""
        self._registry = registry
        self._router_id = router_id
        self._connect = connect
        self._rng = rng
        self._sessions: dict[str, DecodeSession] = {}
        self._prefill_links: dict[str, PrefillLink] = {}
        self._closing: set[asyncio.Task[None]] = set()
        registry.subscribe(self)

    def decode_session(self, worker_id: str) -> DecodeSession | None:
        """The session with an attached decode worker, open or not; None when it is gone."""
        return self._sessions.get(worker_id)

    def prefill_link(self, worker_id: str) -> PrefillLink | None:
        """The link to an attached prefill worker; None when it is gone."""
        return self._prefill_links.get(worker_id)

    async def close(self) -> None:
        """Close every connection; what runs on them fails with UNAVAILABLE. Idempotent."""
        for session in self._sessions.values():
            self._later(session.close())
        for link in self._prefill_links.values():
            self._later(link.channel.close())
        self._sessions = {}
        self._prefill_links = {}
        while self._closing:
            await asyncio.gather(*self._closing)

    # ---- RegistryListener ----

    def worker_attached(self, register: Register) -> None:
        if register.role == Role.DECODE:
            session = DecodeSession(register, self._router_id, self._connect, self._registry.suspect, self._rng)
            self._sessions[register.worker_id] = session
            session.start()
        else:
            channel = self._connect(register.address)
            channel.get_state(try_to_connect=True)  # So that the first request does not pay for the connection.
            self._prefill_links[register.worker_id] = PrefillLink(channel)

    def worker_detached(self, register: Register) -> None:
        if session := self._sessions.pop(register.worker_id, None):
            self._later(session.leave())
        if link := self._prefill_links.pop(register.worker_id, None):
            link.gone()
            self._later(link.channel.close())

    def room_changed(self) -> None:
        """Nothing to do: connections do not depend on load."""

    def _later(self, closing: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(closing)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

"""The router's side of `Attach`: one stream a worker, which is that worker's membership.

1. The first message must be `register`; a worker that does not fit is refused with the reason.
2. Load reports, cache events and `draining` go into the registry; lost events are answered by `resync`. Orders to the
   worker (`orders.py`) wait in a short queue, which one task writes to the stream.
3. The stream ends (closed, broken, silent for too long, or replaced by a newer life of the worker): the worker is gone.
"""

import asyncio
import logging
from typing import Any

import grpc
from grpc.aio import EOF

from kvferry_rpc import internal_pb2_grpc
from kvferry_rpc.common_pb2 import ErrorCode
from kvferry_rpc.internal_pb2 import Registered, Resync, RouterMessage, WorkerMessage
from router.workers.attached_worker import AttachedWorker
from router.workers.worker_registry import WorkerRegistry
from runtime.errors import KvferryError, invalid
from runtime.protocol_version import CONTROL_VERSION

SERVICE_NAME = "kvferry.internal.v1.Membership"
REGISTER_TIMEOUT_S = 10.0
# A worker that leaves so many messages unread hears of no more.
MAX_ORDERS_WAITING = 16
# A stopped process keeps its connection open for ever; only our own deadline ends its membership.
SILENCE_LIMIT_S = 15.0

_log = logging.getLogger(__name__)


class MembershipService(internal_pb2_grpc.MembershipServicer):
    """Serves `Attach` into a registry. Event-loop thread only."""

    def __init__(self, registry: WorkerRegistry, router_id: str, *, silence_limit_s: float = SILENCE_LIMIT_S) -> None:
        self._registry = registry
        self._router_id = router_id
        self._silence_limit_s = silence_limit_s

    # A coroutine that writes, not a generator: a call cut while it writes must run its `finally` at once, and a
    # generator suspended in `yield` would not. The generated stub knows only generators.
    async def Attach(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        """One worker's stream, from its registration to its end."""
        replaced = asyncio.Event()
        orders: asyncio.Queue[RouterMessage] = asyncio.Queue(MAX_ORDERS_WAITING)
        try:
            worker = await self._register(context, replaced, orders)
        except KvferryError as error:
            _log.warning("a worker at %s is refused: %s", context.peer(), error.message)
            await context.abort(error.grpc_status, error.message)
            raise
        reader = asyncio.create_task(self._read(worker, context), name=f"attach {worker.register.worker_id}")
        replacement = asyncio.create_task(replaced.wait())
        # The one that writes, after the answer to the registration.
        writer = asyncio.create_task(_write_all(orders, context))
        try:
            await asyncio.wait({reader, replacement}, return_when=asyncio.FIRST_COMPLETED)
            if replaced.is_set():
                await context.abort(self._replaced_status(worker), "another stream of this worker took its place")
            reader.result()
        except KvferryError as error:
            _log.warning("worker %s is cut off: %s", worker.register.worker_id, error.message)
            self._registry.detach(worker)  # Before the worker hears of it, which may dial again at once.
            await context.abort(error.grpc_status, error.message)
        finally:
            self._registry.detach(worker)
            for task in (reader, replacement, writer):
                task.cancel()
            await asyncio.gather(reader, replacement, writer, return_exceptions=True)

    async def _register(
        self, context: Any, replaced: asyncio.Event, orders: "asyncio.Queue[RouterMessage]"
    ) -> AttachedWorker:
        """Read and judge the first message. Raises KvferryError when the worker is not wanted."""
        first = await _read_within(context, REGISTER_TIMEOUT_S)
        if first is None or first.WhichOneof("kind") != "register":
            raise invalid("register", "must be the first message")
        worker = self._registry.attach(first.register, replaced.set, lambda message: _put(orders, message))
        try:
            version = CONTROL_VERSION
            registered = Registered(
                router_id=self._router_id, protocol_version=version.major, protocol_minor=version.minor
            )
            await context.write(RouterMessage(registered=registered))
        except BaseException:
            self._registry.detach(worker)
            raise
        return worker

    async def _read(self, worker: AttachedWorker, context: Any) -> None:
        """Feed the registry until the worker closes the stream. Raises KvferryError when it misbehaves or is silent."""
        while (message := await _read_within(context, self._silence_limit_s)) is not None:
            kind = message.WhichOneof("kind")
            if kind == "load":
                self._registry.report(worker, message.load)
            elif kind == "kv_events":
                if self._registry.apply_events(worker, message.kv_events):
                    _log.info("cache events of %s were lost: asking for a snapshot", worker.register.worker_id)
                    worker.order(RouterMessage(resync=Resync()))
            elif kind == "draining":
                self._registry.drain(worker, not message.draining.over)
            elif kind == "register":
                raise invalid("register", "was sent twice")

    def _replaced_status(self, worker: AttachedWorker) -> grpc.StatusCode:
        """A second process with the same id must not fight for it: only the same life may come straight back."""
        current = self._registry.registration(worker.register.worker_id)
        same_life = current is None or current.incarnation == worker.register.incarnation
        return grpc.StatusCode.ABORTED if same_life else grpc.StatusCode.FAILED_PRECONDITION


def _put(orders: "asyncio.Queue[RouterMessage]", message: RouterMessage) -> None:
    try:
        orders.put_nowait(message)
    except asyncio.QueueFull:
        raise KvferryError(ErrorCode.OVERLOADED, f"{MAX_ORDERS_WAITING} messages wait for this worker") from None


async def _write_all(orders: "asyncio.Queue[RouterMessage]", context: Any) -> None:
    """Runs until cancelled, or until the stream breaks, which its reader finds out too."""
    while True:
        await context.write(await orders.get())


async def _read_within(context: Any, limit_s: float) -> WorkerMessage | None:
    """The next message, or None at the end of the stream. Raises KvferryError (DEADLINE_EXCEEDED) after `limit_s`."""
    try:
        async with asyncio.timeout(limit_s):
            message = await context.read()
    except TimeoutError:
        raise KvferryError(ErrorCode.DEADLINE_EXCEEDED, f"nothing was heard for {limit_s:g} s") from None
    return message if message is not EOF and isinstance(message, WorkerMessage) else None

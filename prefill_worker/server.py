"""The prefill worker's gRPC service: messages in, commands to the engine's inbox, events out. No policy."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from engine.loop import EngineLoop
from engine.wire import DoorLimits, Grammars, build_constraint, build_sequence, has_grammar
from kvferry_rpc import internal_pb2, internal_pb2_grpc
from prefill_worker.job import Submit
from prefill_worker.worker import Cancel, Command, Constrain, PrefillView
from runtime.clock import Clock
from runtime.errors import ErrorCode, KvferryError
from runtime.grpc_life import GrpcServer
from runtime.in_flight import InFlight
from runtime.tracing import inner_context


class PrefillService(internal_pb2_grpc.PrefillWorkerServicer):
    """Event-loop thread only."""

    def __init__(
        self,
        engine_loop: EngineLoop[Command, PrefillView],
        limits: DoorLimits,
        grammars: Grammars,
        clock: Clock,
        *,
        pulls: bool = True,
    ) -> None:
        """Without `pulls` nothing is pulled from decode workers, whatever a router proposes."""
        self.in_flight = InFlight()
        self.draining = False
        self._engine_loop = engine_loop
        self._limits = limits
        self._grammars = grammars
        self._clock = clock
        self.pulls = pulls

    async def Prefill(
        self, request: internal_pb2.PrefillRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> AsyncIterator[internal_pb2.PrefillEvent]:
        """One request, from its ticket to this half of its receipt. See the .proto file."""
        with self.in_flight.track():
            events: asyncio.Queue[internal_pb2.PrefillEvent] = asyncio.Queue()
            try:
                submit = self._submit(request, events)
            except KvferryError as error:
                yield internal_pb2.PrefillEvent(error=error.to_proto())
                return
            over = False
            # Meanwhile the engine has it, so that the place on the decode worker stays reserved.
            preparing = asyncio.create_task(self._prepare(request, submit)) if submit.awaits_constraint else None
            try:
                while not over:
                    event = await events.get()  # the worker ends every request by its deadline
                    over = event.WhichOneof("kind") in ("done", "error")
                    yield event
            finally:
                if preparing is not None:
                    preparing.cancel()
                if not over:
                    self._engine_loop.notify(Cancel(submit))

    def add_to(self, server: GrpcServer) -> None:
        """Offer it."""
        add = internal_pb2_grpc.add_PrefillWorkerServicer_to_server
        server.add_service(add, self, "kvferry.internal.v1.PrefillWorker", internal=True)

    def end_sessions(self) -> None:
        """Nothing: each request has a call of its own, which ends with it."""

    async def _prepare(self, request: internal_pb2.PrefillRequest, submit: Submit) -> None:
        self._engine_loop.notify(Constrain(submit, await build_constraint(request, self._grammars)))

    def _submit(self, request: internal_pb2.PrefillRequest, events: asyncio.Queue[internal_pb2.PrefillEvent]) -> Submit:
        """Raises KvferryError for what is refused at the door."""
        if self.draining:
            raise KvferryError(ErrorCode.UNAVAILABLE, "this prefill worker is draining")
        loop = asyncio.get_running_loop()
        now = self._clock.now()
        submit = Submit(
            sequence=build_sequence(request, self._limits, request.ticket.handoff_id),
            ticket=request.ticket,
            arrived_at=now,
            deadline=now + request.deadline_ms / 1e3,
            reply=lambda event: _deliver(loop, events, event),
            source=request.source if self.pulls and request.HasField("source") else None,
            awaits_constraint=has_grammar(request),
            request_id=request.request_id,
            trace=inner_context(request.traceparent),
        )
        self._engine_loop.submit(submit)
        return submit


def _deliver(
    loop: asyncio.AbstractEventLoop,
    events: asyncio.Queue[internal_pb2.PrefillEvent],
    event: internal_pb2.PrefillEvent,
) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(events.put_nowait, event)

"""The decode worker's gRPC service: messages in, commands to the engine's inbox, events out. No policy."""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import grpc

from decode_worker.export import check_export
from decode_worker.hand_over import HandOverRequest, PauseRequest, ResumeRequest
from decode_worker.job import AdmitRequest
from decode_worker.worker import CancelRequest, Command, DecodeView, SessionClosed, sequence_id
from engine.loop import EngineLoop
from engine.sequence import Sequence
from engine.wire import DoorLimits, Grammars, build_constraint, build_sequence, has_grammar
from kvferry_rpc import internal_pb2, internal_pb2_grpc
from runtime.clock import Clock
from runtime.errors import ErrorCode, KvferryError
from runtime.grpc_life import GrpcServer
from runtime.in_flight import InFlight
from runtime.protocol_version import CONTROL_VERSION, control_version
from runtime.tracing import inner_context

# Of one message: with 20 log probabilities each, far below what gRPC lets through.
_MAX_EVENTS = 4096
# Of up to 256 positions: they count as so many events.
_PROMPT_LOGPROBS_WEIGHT = 256

_log = logging.getLogger(__name__)


class DecodeService(internal_pb2_grpc.DecodeWorkerServicer):
    """Event-loop thread only."""

    def __init__(
        self,
        engine_loop: EngineLoop[Command, DecodeView],
        limits: DoorLimits,
        grammars: Grammars,
        incarnation: bytes,
        clock: Clock,
    ) -> None:
        self.in_flight = InFlight()
        self.draining = False
        self._engine_loop = engine_loop
        self._limits = limits
        self._grammars = grammars
        self._incarnation = incarnation
        self._clock = clock
        self._session_ids = itertools.count(1)
        self._sessions: set[_Session] = set()

    async def Session(
        self,
        request_iterator: AsyncIterator[internal_pb2.DecodeCommand],
        context: "grpc.aio.ServicerContext[Any, Any]",
    ) -> AsyncIterator[internal_pb2.DecodeEvents]:
        """All requests of one router, for as long as that router lives. See the .proto file."""
        await self._greet(request_iterator, context)
        session = _Session(next(self._session_ids), asyncio.get_running_loop(), self.in_flight)
        reader = asyncio.create_task(self._read_commands(request_iterator, session))
        self._sessions.add(session)
        try:
            while (batch := await session.next_events()) is not None:
                yield batch
        finally:
            # First what must not be missed: the wait may be cut short by a second cancellation.
            self._sessions.discard(session)
            session.close()
            self._engine_loop.notify(SessionClosed(session.session_id))
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    def add_to(self, server: GrpcServer) -> None:
        """Offer it."""
        add = internal_pb2_grpc.add_DecodeWorkerServicer_to_server
        server.add_service(add, self, "kvferry.internal.v1.DecodeWorker", internal=True)

    def end_sessions(self) -> None:
        """Nothing more will come: each stream ends behind what is still to be told on it."""
        for session in self._sessions:
            session.finish()

    async def _greet(
        self,
        commands: AsyncIterator[internal_pb2.DecodeCommand],
        context: "grpc.aio.ServicerContext[Any, Any]",
    ) -> None:
        first = await anext(aiter(commands), None)
        if first is None or first.WhichOneof("kind") != "hello":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a session begins with hello")
        elif first.hello.incarnation != self._incarnation:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this is another life of the worker")
        elif refusal := _version_refusal(first.hello):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, refusal)

    async def _read_commands(self, commands: AsyncIterator[internal_pb2.DecodeCommand], session: "_Session") -> None:
        try:
            async for command in commands:
                kind = command.WhichOneof("kind")
                if kind == "admit":
                    self._admit(command.admit, session)
                elif kind == "cancel":
                    session.forget(command.cancel.request_id, command.cancel.attempt)
                    self._engine_loop.notify(
                        CancelRequest(session.session_id, command.cancel.request_id, command.cancel.attempt)
                    )
                elif kind == "export":
                    self._export(command.export)
                elif kind == "pause":
                    self._engine_loop.notify(PauseRequest(session.sequence_id(command.pause)))
                elif kind == "resume":
                    self._engine_loop.notify(ResumeRequest(session.sequence_id(command.resume)))
                elif kind == "hand_over":
                    move = command.hand_over
                    self._engine_loop.notify(HandOverRequest(session.sequence_id(move), move.ticket))
        finally:
            session.end()

    def _export(self, message: internal_pb2.Export) -> None:
        """Nobody waits for an answer here: a prefill worker that gets nothing computes the prompt itself."""
        try:
            self._engine_loop.submit(check_export(message, self._clock.now()))
        except KvferryError as error:
            extra = {"request_id": message.request_id}
            _log.warning("an export was not begun: %s", error.message, extra=extra)

    def _admit(self, admit: internal_pb2.Admit, session: "_Session") -> None:
        if not session.begin(admit.request_id, admit.attempt):
            # Nobody listens any more; or it is open already, and an answer would end the first one.
            extra = {"request_id": admit.request_id}
            _log.warning("attempt %d was admitted twice or too late: ignored", admit.attempt, extra=extra)
            return
        try:
            if self.draining:
                raise KvferryError(ErrorCode.UNAVAILABLE, "this decode worker is draining")
            now = self._clock.now()
            seq_id = sequence_id(session.session_id, admit.request_id, admit.attempt)
            sequence = build_sequence(admit, self._limits, seq_id)
            if has_grammar(admit):
                session.start(admit, self._constrain_and_submit(admit, sequence, session, now))
            else:
                self._submit(admit, sequence, session, now)
        except KvferryError as error:
            session.refuse(admit, error)

    async def _constrain_and_submit(
        self, admit: internal_pb2.Admit, sequence: Sequence, session: "_Session", now: float
    ) -> None:
        """Cancelled when nobody wants the request any more."""
        constraint = await build_constraint(admit, self._grammars)
        if isinstance(constraint, KvferryError):
            session.refuse(admit, constraint)
            return
        sequence.constraint = constraint
        try:
            self._submit(admit, sequence, session, now)
        except KvferryError as error:
            session.refuse(admit, error)

    def _submit(self, admit: internal_pb2.Admit, sequence: Sequence, session: "_Session", now: float) -> None:
        self._engine_loop.submit(
            AdmitRequest(
                session_id=session.session_id,
                request_id=admit.request_id,
                attempt=admit.attempt,
                sequence=sequence,
                local_prefill=admit.local_prefill,
                deadline=now + admit.deadline_ms / 1e3,
                emit=session.deliver,
                trace=inner_context(admit.traceparent),
            )
        )


class _Session:
    """Events on their way to one router, and which of its requests are open.

    What piles up while the router does not read is bounded by what its open requests can still produce, and leaves in
    as few messages as may hold it. `deliver` may be called from the engine thread; the rest is for the event loop.
    """

    def __init__(self, session_id: int, loop: asyncio.AbstractEventLoop, in_flight: InFlight) -> None:
        self.session_id = session_id
        self._loop = loop
        self._in_flight = in_flight
        self._open: set[tuple[str, int]] = set()
        # Of open requests: those whose grammar is not ready yet.
        self._starting: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._pending: list[internal_pb2.DecodeEvent] = []
        self._wake = asyncio.Event()
        self._finishing = False
        self._ended = False

    def sequence_id(self, message: internal_pb2.Pause | internal_pb2.Resume | internal_pb2.HandOver) -> str:
        """The name of the sequence that a message is about."""
        return sequence_id(self.session_id, message.request_id, message.attempt)

    def begin(self, request_id: str, attempt: int) -> bool:
        """Note an open request; False if it is open already, or the session has ended."""
        if self._ended or (request_id, attempt) in self._open:
            return False
        self._open.add((request_id, attempt))
        self._in_flight.enter()
        return True

    def forget(self, request_id: str, attempt: int) -> None:
        """The request is over, or nobody wants it any more. Idempotent."""
        if (request_id, attempt) in self._open:
            self._open.remove((request_id, attempt))
            self._in_flight.leave()
            if task := self._starting.pop((request_id, attempt), None):
                task.cancel()

    def start(self, admit: internal_pb2.Admit, work: Coroutine[Any, Any, None]) -> None:
        """Run what an open request needs before the engine gets it; cancelled when the request is over before that."""
        key = (admit.request_id, admit.attempt)
        task = asyncio.create_task(work, name=f"admit {admit.request_id}")
        self._starting[key] = task
        task.add_done_callback(lambda _: self._starting.pop(key, None))

    def refuse(self, admit: internal_pb2.Admit, error: KvferryError) -> None:
        """Tell the router that a request is not taken."""
        self.put(internal_pb2.DecodeEvent(request_id=admit.request_id, attempt=admit.attempt, failed=error.to_proto()))

    def deliver(self, events: list[internal_pb2.DecodeEvent]) -> None:
        """Queue what one step produced. Any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._put_all, events)

    def put(self, event: internal_pb2.DecodeEvent) -> None:
        """Queue one event."""
        self._put_all([event])

    def _put_all(self, events: list[internal_pb2.DecodeEvent]) -> None:
        if self._ended:
            return
        self._pending.extend(events)
        self._wake.set()

    def finish(self) -> None:
        """`next_events` returns None once what is pending has been told."""
        self._finishing = True
        self._wake.set()

    def end(self) -> None:
        """The router says no more: `next_events` returns None."""
        self._ended = True
        self._wake.set()

    def close(self) -> None:
        """The stream is over: nothing of it is in flight any more."""
        self._ended = True
        for request_id, attempt in list(self._open):
            self.forget(request_id, attempt)

    async def next_events(self) -> internal_pb2.DecodeEvents | None:
        """What is pending, as soon as there is something; None once the session has ended."""
        await self._wake.wait()
        if self._ended or (self._finishing and not self._pending):
            return None
        count, room = 0, _MAX_EVENTS
        while count < len(self._pending) and room > 0:
            event = self._pending[count]
            kind = event.WhichOneof("kind")
            if kind in ("done", "failed", "handed_over"):
                self.forget(event.request_id, event.attempt)
            count += 1
            room -= _PROMPT_LOGPROBS_WEIGHT if kind == "prompt_logprobs" else 1
        events, self._pending = self._pending[:count], self._pending[count:]
        if not self._pending and not self._finishing:
            self._wake.clear()
        return internal_pb2.DecodeEvents(events=events)


def _version_refusal(hello: internal_pb2.Hello) -> str:
    """Why a router of this version is not served; empty if it is."""
    theirs = control_version(hello.protocol_version, hello.protocol_minor)
    return CONTROL_VERSION.refusal(theirs, "the protocol between routers and workers")

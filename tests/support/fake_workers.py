"""Workers without an engine: real gRPC servers that speak the internal protos, with a script instead of a model.

The "model" is `next_token` (`fake_model.py`): a function of all tokens before, so a text that is continued on another
worker stays the same only if the router passes on exactly what was generated. Failures and delays are switched on by
attributes.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc

from kvferry_rpc import internal_pb2_grpc
from kvferry_rpc.common_pb2 import Error, ErrorCode, FinishReason, KVCacheLayout, TokenOutput
from kvferry_rpc.internal_pb2 import (
    Admit,
    DecodeDone,
    DecodeEvent,
    DecodeEvents,
    Export,
    HandoffVerified,
    PrefillDone,
    PrefillEvent,
    PrefillRequest,
    Register,
    Role,
    Ticket,
    Tokens,
)
from runtime.grpc_life import GrpcServer
from tests.support.fake_model import VOCAB, next_token, prompt_logprobs

SECRET = b"a secret of the test cluster"
BLOCK_SIZE = 16
CHECKSUM = b"digest of all blocks"


def layout(**changes: Any) -> KVCacheLayout:
    """The layout of the fake pools."""
    values = {
        "model_id": "fake",
        "model_revision": "0" * 16,
        "num_layers": 2,
        "num_kv_heads": 2,
        "total_kv_heads": 2,
        "head_dim": 8,
        "block_size": BLOCK_SIZE,
        "dtype": "fp32",
        "axis_order": "bl_k(htd)v(htd)s",
        "hash_version": 1,
    }
    return KVCacheLayout(**{**values, **changes})


def registration(worker_id: str, role: "Role.ValueType", address: str = "127.0.0.1:1", **changes: Any) -> Register:
    """A good Register message."""
    values = {
        "protocol_version": 1,
        "worker_id": worker_id,
        "incarnation": secrets.token_bytes(16),
        "role": role,
        "address": address,
        "layout": layout(),
        "num_blocks": 64,
        "max_context_tokens": 512,
        "vocab_size": VOCAB,
        "token_budget": 256,
        "max_num_seqs": 16,
        "transports": ["tcp"],
    }
    return Register(**{**values, **changes})


def error(code: "ErrorCode.ValueType", message: str = "scripted") -> Error:
    return Error(code=code, message=message)


@dataclass
class Fabric:
    """How a fake prefill worker reaches the pool of a fake decode worker."""

    decodes: "dict[str, FakeDecode]" = field(default_factory=dict)


class _Sequence:
    """One admitted request on a fake decode worker."""

    def __init__(self, admit: Admit, outbox: "asyncio.Queue[DecodeEvent | None]") -> None:
        self.admit = admit
        self.outbox = outbox
        self.committed = asyncio.Event()
        self.may_run = asyncio.Event()  # Not set: it stands still.
        self.may_run.set()
        self.task: asyncio.Task[None] | None = None


class FakeDecode(internal_pb2_grpc.DecodeWorkerServicer):
    """A decode worker. `admitted`, `cancelled`, `exports` and `live` tell what the router asked for."""

    def __init__(self, worker_id: str, fabric: Fabric) -> None:
        self.worker_id = worker_id
        self.incarnation = secrets.token_bytes(16)
        self.admitted: list[Admit] = []
        self.cancelled: list[tuple[str, int]] = []
        self.exports: list[Export] = []
        self.live: dict[tuple[str, int], _Sequence] = {}
        self.sessions = 0
        self.changed = asyncio.Condition()
        # Knobs.
        self.refusals: list[Error] = []  # The next admissions fail with these.
        self.room: int | None = None  # Requests at the same time; more are refused as OVERLOADED.
        self.ticket_gate: asyncio.Event | None = None  # Tickets wait for it.
        self.pause_after: int | None = None  # Each sequence stops after so many tokens of its own
        self.resume = asyncio.Event()  # until this.
        self.fail_after: tuple[int, Error] | None = None
        self.drop_session_after: int | None = None  # The stream breaks after so many tokens of a sequence.
        self.cached_tokens = 0
        self.tokens_recomputed = 0
        self.most_scored: int | None = None  # Messages about the prompt; the rest is lost.
        self.checksum = CHECKSUM
        self.checks = True  # Whether it verifies what it receives
        self.tells = True  # and says so.
        self.transport = "tcp"
        self.verified_gate: asyncio.Event | None = None  # What follows the commit waits for it.
        self._server = GrpcServer("127.0.0.1", secret=SECRET)
        self._outboxes: list[asyncio.Queue[DecodeEvent | None]] = []
        fabric.decodes[worker_id] = self
        self.move: Any = None  # See `fake_moves.py`.

    async def start(self) -> Register:
        """Listen; returns how to register."""
        self._server.add_service(
            internal_pb2_grpc.add_DecodeWorkerServicer_to_server,
            self,
            "kvferry.internal.v1.DecodeWorker",
            internal=True,
        )
        await self._server.start()
        return registration(self.worker_id, Role.DECODE, self._server.address, incarnation=self.incarnation)

    async def stop(self) -> None:
        """The process is gone, with all its connections. Idempotent."""
        await self._server.stop(0)

    async def drop_sessions(self) -> None:
        """Break every session stream; the worker lives on."""
        for outbox in self._outboxes:
            outbox.put_nowait(None)

    async def until(self, condition: Any) -> None:
        """Wait until `condition()` holds."""
        async with asyncio.timeout(30), self.changed:
            await self.changed.wait_for(condition)

    async def Session(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        hello = (await context.read()).hello
        if hello.incarnation != self.incarnation:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "another life")
        outbox: asyncio.Queue[DecodeEvent | None] = asyncio.Queue()
        self._outboxes.append(outbox)
        reader = asyncio.create_task(self._commands(context, outbox))
        try:
            await self._note(sessions=1)
            while (event := await outbox.get()) is not None:
                await context.write(DecodeEvents(events=[event]))
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the session was dropped")
        finally:
            self._outboxes.remove(outbox)
            own = {key: sequence for key, sequence in self.live.items() if sequence.outbox is outbox}
            tasks = [reader, *(sequence.task for sequence in own.values() if sequence.task)]
            for key in own:
                del self.live[key]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._note()

    async def _commands(self, context: Any, outbox: "asyncio.Queue[DecodeEvent | None]") -> None:
        while (command := await context.read()) is not grpc.aio.EOF:
            kind = command.WhichOneof("kind")
            if kind == "admit":
                await self._admit(command.admit, outbox)
            elif kind == "export":
                self.exports.append(command.export)
                await self._note()
            elif kind in ("pause", "resume", "hand_over"):
                await self.move(command, outbox)
            else:
                key = (command.cancel.request_id, command.cancel.attempt)
                self.cancelled.append(key)
                sequence = self.live.pop(key, None)
                if sequence is not None and sequence.task is not None:
                    sequence.task.cancel()
                await self._note()

    async def _admit(self, admit: Admit, outbox: "asyncio.Queue[DecodeEvent | None]") -> None:
        self.admitted.append(admit)
        refusal = self.refusals.pop(0) if self.refusals else None
        if refusal is None and self.room is not None and len(self.live) >= self.room:
            refusal = error(ErrorCode.OVERLOADED, "no room")
        if refusal is not None:
            outbox.put_nowait(DecodeEvent(request_id=admit.request_id, attempt=admit.attempt, failed=refusal))
        else:
            sequence = _Sequence(admit, outbox)
            self.live[(admit.request_id, admit.attempt)] = sequence
            sequence.task = asyncio.create_task(self._run(sequence, outbox))
        await self._note()

    async def _run(self, sequence: _Sequence, outbox: "asyncio.Queue[DecodeEvent | None]") -> None:
        admit = sequence.admit
        names = {"request_id": admit.request_id, "attempt": admit.attempt}
        if not admit.local_prefill:
            if self.ticket_gate is not None:
                await self.ticket_gate.wait()
            outbox.put_nowait(DecodeEvent(**names, ticket=self._ticket(admit)))
            await sequence.committed.wait()
            if self.verified_gate is not None:
                await self.verified_gate.wait()
            if self.tells:
                outbox.put_nowait(DecodeEvent(**names, verified=self._verified()))
        else:
            for scored in prompt_logprobs(admit.sampling, admit.prompt_token_ids, self.most_scored):
                outbox.put_nowait(DecodeEvent(**names, prompt_logprobs=scored))
        tokens = list(admit.prompt_token_ids)
        reason = FinishReason.LENGTH
        for sent, index in enumerate(range(admit.num_output_tokens, admit.sampling.max_tokens)):
            if self.fail_after is not None and sent >= self.fail_after[0]:
                outbox.put_nowait(DecodeEvent(**names, failed=self.fail_after[1]))
                return await self._finish(names)
            if self.drop_session_after is not None and sent >= self.drop_session_after:
                outbox.put_nowait(None)
                return None
            if self.pause_after is not None and sent >= self.pause_after:
                await self.resume.wait()
            await sequence.may_run.wait()
            tokens.append(next_token(tokens))
            token = TokenOutput(index=index, token_id=tokens[-1])
            outbox.put_nowait(DecodeEvent(**names, tokens=Tokens(tokens=[token])))
            await asyncio.sleep(0)
            if tokens[-1] in admit.sampling.stop_token_ids:
                reason = FinishReason.STOP
                break
        outbox.put_nowait(DecodeEvent(**names, done=self._done(admit, reason)))
        return await self._finish(names)

    async def _finish(self, names: dict[str, Any]) -> None:
        self.live.pop((names["request_id"], names["attempt"]), None)
        await self._note()

    def _ticket(self, admit: Admit) -> Ticket:
        return Ticket(
            handoff_id=f"{self.worker_id}/{admit.request_id}/{admit.attempt}",
            attempt=admit.attempt,
            decode_worker_id=self.worker_id,
            incarnation=self.incarnation,
            layout=layout(),
        )

    def _verified(self) -> HandoffVerified:
        return HandoffVerified(
            cached_tokens=self.cached_tokens,
            checksum_verified=self.checks,
            checksum=self.checksum if self.checks else b"",
            commit_ms=1,
            transport=self.transport,
        )

    def _done(self, admit: Admit, reason: "FinishReason.ValueType") -> DecodeDone:
        done = DecodeDone(reason=reason, cached_tokens=self.cached_tokens, decode_ms=5)
        if not admit.local_prefill:
            done.checksum_verified = self.checks
            done.checksum = self.checksum if self.checks else b""
            done.tokens_recomputed = self.tokens_recomputed
            done.commit_ms = 1
        return done

    async def _note(self, sessions: int = 0) -> None:
        async with self.changed:
            self.sessions += sessions
            self.changed.notify_all()


class FakePrefill(internal_pb2_grpc.PrefillWorkerServicer):
    """A prefill worker. `requests` and `cancelled` tell what the router asked for."""

    def __init__(self, worker_id: str, fabric: Fabric) -> None:
        self.worker_id = worker_id
        self.requests: list[PrefillRequest] = []
        self.cancelled: list[str] = []
        self.running = 0
        self.changed = asyncio.Condition()
        # Knobs.
        self.failures: list[Error] = []  # The next calls answer with these before the first token.
        self.failures_after_first_token: list[Error] = []  # Likewise behind it, and nothing is committed.
        self.failures_after_commit: list[Error] = []  # Likewise, in place of `done`.
        self.most_scored: int | None = None  # Messages about the prompt in the next call; the rest is lost.
        self.statuses: list[grpc.StatusCode] = []  # The next calls end with these.
        self.compute_gate: asyncio.Event | None = None  # Computing waits for it.
        self.report_gate: asyncio.Event | None = None  # The KV is committed, then all reports wait for it.
        self.done_gate: asyncio.Event | None = None  # `done` waits for it.
        self.pulls: list[Ticket] = []  # The next call, if it names a source, asks for this.
        self.pulled_tokens = self.cached_tokens = 0
        self.transport = self.expected_transport = "tcp"
        self.first_token_offset = 0  # Not 0: this worker's first token is wrong.
        self._fabric = fabric
        self._server = GrpcServer("127.0.0.1", secret=SECRET)

    async def start(self) -> Register:
        """Listen; returns how to register."""
        self._server.add_service(
            internal_pb2_grpc.add_PrefillWorkerServicer_to_server,
            self,
            "kvferry.internal.v1.PrefillWorker",
            internal=True,
        )
        await self._server.start()
        return registration(self.worker_id, Role.PREFILL, self._server.address)

    async def stop(self) -> None:
        """The process is gone, with all its connections. Idempotent."""
        await self._server.stop(0)

    async def until(self, condition: Any) -> None:
        """Wait until `condition()` holds."""
        async with asyncio.timeout(30), self.changed:
            await self.changed.wait_for(condition)

    async def Prefill(self, request: PrefillRequest, context: Any) -> AsyncIterator[PrefillEvent]:
        self.requests.append(request)
        await self._note(1)
        over = False
        try:
            async for event in self._events(request, context):
                over = event.WhichOneof("kind") in ("done", "error")
                yield event
        finally:
            if not over:
                self.cancelled.append(request.request_id)
            self.running -= 1
            waker = asyncio.create_task(self._note(0))
            waker.add_done_callback(lambda _: None)

    async def _events(self, request: PrefillRequest, context: Any) -> AsyncIterator[PrefillEvent]:
        if self.statuses:
            await context.abort(self.statuses.pop(0), "scripted")
        while self.pulls and request.HasField("source"):
            yield PrefillEvent(pull=self.pulls.pop(0))
        if self.compute_gate is not None:
            await self.compute_gate.wait()
        if self.failures:
            yield PrefillEvent(error=self.failures.pop(0))
            return
        fails_later = bool(self.failures_after_first_token)
        if not fails_later:
            self._commit(request)
        if self.report_gate is not None:
            await self.report_gate.wait()
        for scored in prompt_logprobs(request.sampling, request.prompt_token_ids, self.most_scored):
            yield PrefillEvent(prompt_logprobs=scored)
        self.most_scored = None
        token_id = (next_token(request.prompt_token_ids) + self.first_token_offset) % VOCAB
        yield PrefillEvent(first_token=TokenOutput(index=request.num_output_tokens, token_id=token_id))
        if fails_later:
            yield PrefillEvent(error=self.failures_after_first_token.pop(0))
            return
        if self.done_gate is not None:
            await self.done_gate.wait()
        if self.failures_after_commit:
            yield PrefillEvent(error=self.failures_after_commit.pop(0))
            return
        yield PrefillEvent(
            done=PrefillDone(
                cached_tokens=self.cached_tokens,
                blocks_sent=3,
                bytes_sent=3 * 4096,
                transport=self.transport,
                expected_transport=self.expected_transport,
                checksum=CHECKSUM,
                wait_ms=1,
                prefill_ms=2,
                transfer_ms=3,
                exposed_transfer_ms=1,
                pulled_tokens=self.pulled_tokens,
            )
        )

    def _commit(self, request: PrefillRequest) -> None:
        decode = self._fabric.decodes[request.ticket.decode_worker_id]
        sequence = decode.live.get((request.request_id, request.attempt))
        if sequence is not None:
            sequence.committed.set()

    async def _note(self, running: int) -> None:
        async with self.changed:
            self.running += running
            self.changed.notify_all()

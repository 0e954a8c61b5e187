"""A decode worker without a model, as a router sees it: the internal gRPC protocol; prompts take no time."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc

from bench.common.mock_steps import MockSequence, MockSteps
from kvferry_rpc import internal_pb2_grpc
from kvferry_rpc.common_pb2 import Error, ErrorCode, FinishReason, KVCacheLayout, TokenOutput
from kvferry_rpc.internal_pb2 import (
    Admit,
    DecodeCommand,
    DecodeDone,
    DecodeEvent,
    DecodeEvents,
    LoadReport,
    Register,
    Role,
    Tokens,
)
from runtime.grpc_life import GrpcServer
from runtime.kv_event_log import KVEventLog
from runtime.membership import MembershipClient

_NUM_BLOCKS = 1_000_000
_BLOCK_SIZE = 16


class MockDecode(internal_pb2_grpc.DecodeWorkerServicer):
    """Answers every request with the same tokens, at the pace of `steps`. Event-loop thread only."""

    def __init__(self, worker_id: str, token_ids: Sequence[int], vocab_size: int, secret: bytes) -> None:
        self.steps = MockSteps(self._emit)
        self._worker_id = worker_id
        self._token_ids = tuple(token_ids)
        self._vocab_size = vocab_size
        self._secret = secret
        self._incarnation = secrets.token_bytes(16)
        self._outboxes: dict[MockSequence, _Outbox] = {}
        self._attempts: dict[MockSequence, int] = {}
        self._server = GrpcServer("127.0.0.1", secret=secret)
        self._membership: MembershipClient | None = None

    async def start(self) -> str:
        """Listen; returns the address."""
        self._server.add_service(
            internal_pb2_grpc.add_DecodeWorkerServicer_to_server,
            self,
            "kvferry.internal.v1.DecodeWorker",
            internal=True,
        )
        await self._server.start()
        return self._server.address

    async def attach(self, router_addresses: Sequence[str]) -> None:
        """Register with these routers, and with no others any more. Returns when all have accepted."""
        await self.detach()
        self._membership = MembershipClient(
            router_addresses, self._secret, self._register(), self._load, KVEventLog(), lambda order: None
        )
        self._membership.start()
        await self._membership.wait_attached()

    async def detach(self) -> None:
        """Leave all routers."""
        if self._membership is not None:
            await self._membership.stop()
            self._membership = None

    async def close(self) -> None:
        """Leave, and listen no more."""
        await self.detach()
        await self._server.stop(0)

    async def Session(self, request_iterator: Any, context: Any) -> AsyncIterator[DecodeEvents]:
        outbox = _Outbox()
        reader = asyncio.create_task(self._read(context, outbox))
        try:
            while (events := await outbox.take()) is not None:
                yield DecodeEvents(events=events)
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            for sequence in [one for one, of in self._outboxes.items() if of is outbox]:
                self._forget(sequence)

    # ---- inside ----

    async def _read(self, context: Any, outbox: "_Outbox") -> None:
        live: dict[tuple[str, int], MockSequence] = {}
        while (command := await context.read()) is not grpc.aio.EOF:
            self._obey(command, outbox, live)
        outbox.end()

    def _obey(self, command: DecodeCommand, outbox: "_Outbox", live: dict[tuple[str, int], MockSequence]) -> None:
        kind = command.WhichOneof("kind")
        if kind == "admit":
            admit = command.admit
            sequence = MockSequence(admit.request_id, self._num_tokens(admit))
            live[(admit.request_id, admit.attempt)] = sequence
            if not admit.local_prefill:
                refusal = Error(code=ErrorCode.INVALID_REQUEST, message="the mock computes prompts itself")
                outbox.put(DecodeEvent(request_id=admit.request_id, attempt=admit.attempt, failed=refusal))
                return
            self._outboxes[sequence], self._attempts[sequence] = outbox, admit.attempt
            self.steps.add(sequence)
        elif kind == "cancel":
            cancelled = live.pop((command.cancel.request_id, command.cancel.attempt), None)
            if cancelled is not None:
                self._forget(cancelled)

    def _num_tokens(self, admit: Admit) -> int:
        return min(len(self._token_ids), admit.sampling.max_tokens)

    def _forget(self, sequence: MockSequence) -> None:
        self.steps.remove(sequence)
        self._outboxes.pop(sequence, None)
        self._attempts.pop(sequence, None)

    def _emit(self, batch: list[MockSequence]) -> None:
        for sequence in batch:
            outbox, attempt = self._outboxes[sequence], self._attempts[sequence]
            names: dict[str, Any] = {"request_id": sequence.request_id, "attempt": attempt}
            token = TokenOutput(index=sequence.sent, token_id=self._token_ids[sequence.sent])
            outbox.put(DecodeEvent(**names, tokens=Tokens(tokens=[token])))
            if sequence.sent + 1 == sequence.num_tokens:
                outbox.put(DecodeEvent(**names, done=DecodeDone(reason=FinishReason.LENGTH, decode_ms=1.0)))
                del self._outboxes[sequence], self._attempts[sequence]

    def _register(self) -> Register:
        layout = KVCacheLayout(
            model_id="mock",
            model_revision="0" * 16,
            num_layers=1,
            num_kv_heads=1,
            total_kv_heads=1,
            head_dim=8,
            block_size=_BLOCK_SIZE,
            dtype="fp32",
            axis_order="bl_k(htd)v(htd)s",
            hash_version=1,
        )
        return Register(
            protocol_version=1,
            worker_id=self._worker_id,
            incarnation=self._incarnation,
            role=Role.DECODE,
            address=self._server.address,
            layout=layout,
            num_blocks=_NUM_BLOCKS,
            max_context_tokens=8192,
            vocab_size=self._vocab_size,
            token_budget=8192,
            max_num_seqs=4096,
            transports=["tcp"],
        )

    def _load(self) -> LoadReport:
        return LoadReport(blocks_free=_NUM_BLOCKS)


class _Outbox:
    """Events on their way to one router: all that were put since the last message leave in the next."""

    def __init__(self) -> None:
        self._events: list[DecodeEvent] = []
        self._changed = asyncio.Event()
        self._ended = False

    def put(self, event: DecodeEvent) -> None:
        self._events.append(event)
        self._changed.set()

    def end(self) -> None:
        self._ended = True
        self._changed.set()

    async def take(self) -> list[DecodeEvent] | None:
        while not self._events and not self._ended:
            self._changed.clear()
            await self._changed.wait()
        events, self._events = self._events, []
        return events or None

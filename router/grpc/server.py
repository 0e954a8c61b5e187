"""The gRPC front door: the public Kvferry service, on the same path and under the same checks as the HTTP one.

Failures end a call with the status of their code; the whole error travels in the trailing metadata `kvferry-error-bin`
(a serialised kvferry.v1.Error). A caller that cancels, or whose deadline passes, cancels the request on every worker.
"""

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc

from kvferry_rpc import public_pb2_grpc
from kvferry_rpc.common_pb2 import ErrorCode, KVReceipt
from kvferry_rpc.public_pb2 import (
    ClusterStateRequest,
    ClusterStateResponse,
    GenerateRequest,
    GenerateResponse,
    GetReceiptRequest,
    ListModelsRequest,
    ListModelsResponse,
    Model,
    TokenizeRequest,
    TokenizeResponse,
)
from router.generation import GenerationRequest, TextChunk, TextEnd
from router.grpc.answers import responses
from router.grpc.plan import FIELDS, conversation, plan_generation
from router.http.choices import run_choices
from router.http.errors import log_defect
from router.http.generation import token_ids_of
from router.http.services import Services
from router.observation.access_log import AccessNote, log_call
from router.plans.chat_plan import syntax_behind
from router.plans.generation_plan import Prompt, RequestScope, build_requests, check_model
from router.tenants import Tenant, key_of
from router.text.chat_reader import ChatSyntax
from runtime.errors import ERROR_METADATA_KEY, KvferryError, invalid
from runtime.telemetry import request_context
from runtime.tracing import trace_id_of

SERVICE_NAME = "kvferry.v1.Kvferry"
REQUEST_ID_METADATA_KEY = "kvferry-request-id"
"""Trailing metadata of a failed generation: the id under which its receipt is kept, if it got so far."""


@dataclass(frozen=True, slots=True)
class _Job:
    """A request after tokenising. `chat` is None for what is no chat."""

    requests: list[GenerationRequest]
    chat: ChatSyntax | None


class PublicService(public_pb2_grpc.KvferryServicer):
    """Event-loop thread only."""

    # As over HTTP: a caller that does not take what its window and our buffer hold in this time has lost its answer.
    stalled_write_s = 60.0

    def __init__(
        self, services: Services, cluster_state: Callable[[], ClusterStateResponse], *, log_calls: bool = False
    ) -> None:
        """`cluster_state` makes a snapshot; it must be quick. `log_calls`: a line in the log for each generation."""
        self._log_calls = log_calls
        self._services = services
        self._cluster_state = cluster_state

    # A coroutine that writes, not a generator: a call cut while it writes must cancel the generation at once, and a
    # generator suspended in `yield` would not. The generated stub knows only generators.
    async def Generate(self, request: GenerateRequest, context: Any) -> None:  # type: ignore[override]
        """See the .proto file."""
        request_id = "gen-" + secrets.token_hex(12)
        traceparent = self._services.begin_trace(_metadata(context).get("traceparent"))
        note = AccessNote(request_id, trace_id_of(traceparent))
        with request_context(request_id, note.trace_id):
            async with _answering(context, request_id):
                with ExitStack() as held:
                    if self._log_calls:
                        held.enter_context(log_call("Generate", note, self._services.clock))
                    with self._services.at_door():
                        tenant = self._tenant(context)
                        note.tenant = tenant.name
                        held.enter_context(self._services.cap)
                        job = await self._prepare(request, request_id, tenant, context.time_remaining(), traceparent)
                        note.prompt_tokens = len(job.requests[0].prompt_token_ids)
                    messages = partial(responses, request_id, with_receipt=request.with_receipt)
                    sink = _Written(messages, partial(self._write, context), note)
                    services = self._services
                    await run_choices(services.source, job.requests, job.chat, services.tokenizer.tokenizer, sink)

    async def Tokenize(self, request: TokenizeRequest, context: Any) -> TokenizeResponse:
        """See the .proto file."""
        async with _answering(context):
            self._tenant(context)
            limits = self._services.limits()
            check_model(request.model, limits)
            token_ids = await self._token_ids(_tokenize_prompt(request))
            return TokenizeResponse(token_ids=token_ids, max_context_tokens=limits.max_context_tokens)

    async def ListModels(self, request: ListModelsRequest, context: Any) -> ListModelsResponse:
        """See the .proto file."""
        async with _answering(context):
            self._tenant(context)
            limits = self._services.limits()
            return ListModelsResponse(models=[Model(id=limits.model, max_context_tokens=limits.max_context_tokens)])

    async def ClusterState(self, request: ClusterStateRequest, context: Any) -> ClusterStateResponse:
        """See the .proto file."""
        async with _answering(context):
            self._tenant(context)
            return self._cluster_state()

    async def GetReceipt(self, request: GetReceiptRequest, context: Any) -> KVReceipt:
        """See the .proto file."""
        async with _answering(context):
            receipt = self._services.find_receipt(request.request_id, self._tenant(context).name)
        if receipt is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no receipt is kept under this id")
            raise AssertionError("abort raises")
        return receipt

    # ---- inside ----

    async def _write(self, context: Any, response: GenerateResponse) -> None:
        """Raises KvferryError when the caller does not take what lies ready: gRPC alone would wait for ever."""
        try:
            async with asyncio.timeout(self.stalled_write_s):
                await context.write(response)
        except TimeoutError:
            raise KvferryError(ErrorCode.DEADLINE_EXCEEDED, "the answer was not read in time") from None

    def _tenant(self, context: Any) -> Tenant:
        """Who calls. Raises KvferryError (UNAUTHENTICATED)."""
        shown = _metadata(context)
        return self._services.tenants.authenticate(key_of(shown.get("authorization"), shown.get("x-api-key")))

    async def _prepare(
        self,
        request: GenerateRequest,
        request_id: str,
        tenant: Tenant,
        time_remaining_s: float | None,
        traceparent: str,
    ) -> _Job:
        """The request, checked and tokenised. Raises KvferryError."""
        services, limits = self._services, self._services.limits()
        if services.draining():
            raise KvferryError(ErrorCode.UNAVAILABLE, "this router is shutting down", retry_after_ms=1000)
        timeout_s = services.request_timeout_s
        if time_remaining_s is not None:
            timeout_s = min(timeout_s, time_remaining_s)
        deadline = services.clock.now() + timeout_s
        plan = plan_generation(request, limits)
        tenant.check_choices(plan.num_sequences, plan.choices_field)
        priority, salt = tenant.check_priority(plan.priority), tenant.salt_for(plan.cache_salt)
        scope = RequestScope(request_id, deadline, salt, tenant.name, priority, plan.slo, "grpc", traceparent)
        token_ids = await self._token_ids(plan.prompts[0], limits.max_context_tokens - 1)
        chat = plan.chat and syntax_behind(plan.chat, token_ids, services.tokenizer.tokenizer)
        return _Job(build_requests(plan, [token_ids], limits, scope), chat)

    async def _token_ids(self, prompt: Prompt, max_tokens: int | None = None) -> Sequence[int]:
        if isinstance(prompt, str):
            return await self._services.tokenizer.encode(prompt, field="text", max_tokens=max_tokens)
        return await token_ids_of(prompt, self._services.tokenizer, max_tokens=max_tokens)


class _Written:
    """An AnswerSink that writes messages to a caller, one after the other."""

    def __init__(
        self,
        messages: Callable[[int, TextChunk | TextEnd], Iterator[GenerateResponse]],
        write: Callable[[GenerateResponse], Awaitable[None]],
        note: AccessNote,
    ) -> None:
        self._messages = messages
        self._write = write
        self._note = note
        self._pending: deque[GenerateResponse] = deque()
        self._turn = asyncio.Lock()

    def push(self, index: int, item: TextChunk | TextEnd) -> bool:
        if isinstance(item, TextEnd):
            self._note.output_tokens += item.completion_tokens
        self._pending.extend(self._messages(index, item))
        return False  # gRPC alone says when it has taken a message.

    async def flush(self) -> None:
        """Raises KvferryError when the caller does not read."""
        async with self._turn:
            while self._pending:
                await self._write(self._pending.popleft())


def _tokenize_prompt(request: TokenizeRequest) -> Prompt:
    field = request.WhichOneof("prompt")
    if field == "chat":
        return conversation(request.chat, request.tools)
    if request.tools:
        raise invalid("tools", "needs chat")
    if field == "text":
        return request.text
    raise invalid("prompt", "must be set")


def _metadata(context: Any) -> dict[str, str]:
    """What the caller sent along, as far as it is text."""
    return {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}


@asynccontextmanager
async def _answering(context: Any, request_id: str = "") -> AsyncIterator[None]:
    """Turns whatever the block raises into the end of the call. A failed generation is told its id: that of its
    receipt."""
    own_id: tuple[tuple[str, str], ...] = ((REQUEST_ID_METADATA_KEY, request_id),) if request_id else ()
    try:
        with FIELDS.applied():
            yield
    except KvferryError as error:
        metadata = (*own_id, (ERROR_METADATA_KEY, error.to_proto().SerializeToString()))
        await context.abort(error.grpc_status, error.message, metadata)
    except (grpc.aio.AbortError, asyncio.CancelledError):
        raise
    except Exception as error:
        log_defect(error)
        await context.abort(grpc.StatusCode.INTERNAL, "internal error; the router's log has the details", own_id)

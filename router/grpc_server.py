"""The gRPC front door: the public Kvferry service, on the same path and under the same checks as the HTTP one.

Failures end a call with the status of their code; the whole error travels in the trailing metadata `kvferry-error-bin`
(a serialised kvferry.v1.Error). A caller that cancels, or whose deadline passes, cancels the request on every worker.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc

from kvferry_rpc import public_pb2_grpc
from kvferry_rpc.common_pb2 import ErrorCode, KVReceipt, SamplingParams
from kvferry_rpc.public_pb2 import (
    ChatPrompt,
    ClusterStateRequest,
    ClusterStateResponse,
    Finish,
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
from router.generation_plan import GenerationPlan, ModelLimits, RequestScope, build_requests, check_model
from router.http.services import Services
from router.text.text_generation import generate
from runtime.errors import ERROR_METADATA_KEY, KvferryError, invalid
from runtime.limits import MAX_MESSAGES, MAX_STOP_CHARS, MAX_STOP_STRINGS, check_sampling, check_token_ids
from runtime.telemetry import request_context

SERVICE_NAME = "kvferry.v1.Kvferry"
REQUEST_ID_METADATA_KEY = "kvferry-request-id"
"""Trailing metadata of a failed generation: the id under which its receipt is kept, if it got so far."""
_ROLES = ("system", "user", "assistant")

_log = logging.getLogger(__name__)


class PublicService(public_pb2_grpc.KvferryServicer):
    """Event-loop thread only."""

    def __init__(self, services: Services, cluster_state: Callable[[], ClusterStateResponse]) -> None:
        """`cluster_state` makes a snapshot; it must be quick."""
        self._services = services
        self._cluster_state = cluster_state

    # A coroutine that writes, not a generator: a call cut while it writes must cancel the generation at once, and a
    # generator suspended in `yield` would not. The generated stub knows only generators.
    async def Generate(self, request: GenerateRequest, context: Any) -> None:  # type: ignore[override]
        """See the .proto file."""
        request_id = "gen-" + secrets.token_hex(12)
        with request_context(request_id):
            async with _answering(context, request_id):
                with self._services.at_door():
                    job = await self._prepare(request, request_id, context.time_remaining())
                texts = generate(self._services.source, job, self._services.tokenizer.tokenizer)
                async with aclosing(texts):
                    async for item in texts:
                        await context.write(_response(request_id, item, request.with_receipt))

    async def Tokenize(self, request: TokenizeRequest, context: Any) -> TokenizeResponse:
        """See the .proto file."""
        async with _answering(context):
            limits = self._services.limits()
            check_model(request.model, limits)
            token_ids = await self._token_ids(request, request.WhichOneof("prompt"), limits)
            return TokenizeResponse(token_ids=token_ids, max_context_tokens=limits.max_context_tokens)

    async def ListModels(self, request: ListModelsRequest, context: Any) -> ListModelsResponse:
        """See the .proto file."""
        limits = self._services.limits()
        return ListModelsResponse(models=[Model(id=limits.model, max_context_tokens=limits.max_context_tokens)])

    async def ClusterState(self, request: ClusterStateRequest, context: Any) -> ClusterStateResponse:
        """See the .proto file."""
        return self._cluster_state()

    async def GetReceipt(self, request: GetReceiptRequest, context: Any) -> KVReceipt:
        """See the .proto file."""
        receipt = self._services.find_receipt(request.request_id)
        if receipt is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no receipt is kept under this id")
            raise AssertionError("abort raises")
        return receipt

    # ---- inside ----

    async def _prepare(
        self, request: GenerateRequest, request_id: str, time_remaining_s: float | None
    ) -> GenerationRequest:
        """The request, checked and tokenised. Raises KvferryError."""
        services, limits = self._services, self._services.limits()
        if services.draining():
            raise KvferryError(ErrorCode.UNAVAILABLE, "this router is shutting down", retry_after_ms=1000)
        timeout_s = services.request_timeout_s
        if time_remaining_s is not None:
            timeout_s = min(timeout_s, time_remaining_s)
        scope = RequestScope(request_id, services.clock.now() + timeout_s)
        check_model(request.model, limits)
        sampling = SamplingParams()
        sampling.CopyFrom(request.sampling)
        asked_tokens = sampling.max_tokens or None
        sampling.max_tokens = min(asked_tokens or limits.max_context_tokens, limits.max_context_tokens)
        check_sampling(sampling, vocab_size=limits.vocab_size, max_context_tokens=limits.max_context_tokens)
        field = request.WhichOneof("prompt")
        plan = GenerationPlan(
            prompts=(),  # Tokenised here, since the gRPC API has its own prompt types.
            prompt_field=field or "prompt",
            num_choices=1,
            sampling=sampling,
            max_tokens=asked_tokens,
            max_tokens_field="max_tokens",
            seed=sampling.seed if request.has_seed or sampling.seed else None,
            stop=_stop_strings(request.stop),
            stream=True,
            include_usage=True,
            want_receipt=request.with_receipt,
        )
        token_ids = await self._token_ids(request, field, limits)
        return build_requests(plan, [token_ids], limits, scope)[0]

    async def _token_ids(
        self, request: GenerateRequest | TokenizeRequest, field: str | None, limits: ModelLimits
    ) -> Sequence[int]:
        tokenizer = self._services.tokenizer
        if field == "text":
            return await tokenizer.encode(request.text, field="text")
        if field == "chat":
            return await tokenizer.encode_chat(_messages(request.chat))
        if isinstance(request, GenerateRequest) and field == "tokens":
            token_ids = list(request.tokens.ids)
            check_token_ids("tokens", token_ids, vocab_size=limits.vocab_size, max_tokens=len(token_ids))
            return token_ids
        raise invalid("prompt", "must be set")


@asynccontextmanager
async def _answering(context: Any, request_id: str = "") -> AsyncIterator[None]:
    """Turns whatever the block raises into the end of the call. A failed generation is told its id: that of its
    receipt."""
    own_id: tuple[tuple[str, str], ...] = ((REQUEST_ID_METADATA_KEY, request_id),) if request_id else ()
    try:
        yield
    except KvferryError as error:
        metadata = (*own_id, (ERROR_METADATA_KEY, error.to_proto().SerializeToString()))
        await context.abort(error.grpc_status, error.message, metadata)
    except (grpc.aio.AbortError, asyncio.CancelledError):
        raise
    except Exception:
        _log.exception("a call failed for a reason of our own")
        await context.abort(grpc.StatusCode.INTERNAL, "internal error; the router's log has the details", own_id)


def _messages(chat: ChatPrompt) -> list[dict[str, str]]:
    if not 1 <= len(chat.messages) <= MAX_MESSAGES:
        raise invalid("chat", f"must have 1 to {MAX_MESSAGES} messages, not {len(chat.messages)}")
    for message in chat.messages:
        if message.role not in _ROLES:
            raise invalid("chat", f"has a message with the role {message.role[:40]!r}, which is none of {_ROLES}")
    return [{"role": message.role, "content": message.content} for message in chat.messages]


def _stop_strings(stop: Sequence[str]) -> tuple[str, ...]:
    if len(stop) > MAX_STOP_STRINGS:
        raise invalid("stop", f"has {len(stop)} strings, more than the limit of {MAX_STOP_STRINGS}")
    if any(not 1 <= len(text) <= MAX_STOP_CHARS for text in stop):
        raise invalid("stop", f"has a string that is empty or longer than {MAX_STOP_CHARS} characters")
    return tuple(stop)


def _response(request_id: str, item: TextChunk | TextEnd, with_receipt: bool) -> GenerateResponse:
    if isinstance(item, TextChunk):
        return GenerateResponse(request_id=request_id, text=item.text, tokens=item.tokens)
    finish = Finish(
        reason=item.reason,
        prompt_tokens=item.prompt_tokens,
        completion_tokens=item.completion_tokens,
        cached_tokens=item.cached_tokens,
    )
    if with_receipt:
        finish.receipt.CopyFrom(item.receipt)
    return GenerateResponse(request_id=request_id, finish=finish)

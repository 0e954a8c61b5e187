"""The two generation endpoints: one request from its body to the last byte of its answer.

1. refuse at once while draining, or when too many requests are here already
2. read and check the body, plan what to generate
3. from here on watch the connection: when the client leaves, everything below is cancelled, on the workers too
4. tokenise the prompts off the event loop, check the context's length
5. run all choices at the same time; send their text as events, or collect it into one body

Failures: before the first byte, an error status; after it, one error event; a client that left gets nothing.
"""

import logging
import re
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from starlette.datastructures import Headers

from kvferry_rpc.common_pb2 import ErrorCode, KVReceipt
from router.generation import GenerationRequest, TextChunk, TextEnd
from router.generation_plan import (
    Conversation,
    GenerationPlan,
    ModelLimits,
    Prompt,
    RequestScope,
    build_requests,
    plan_chat,
    plan_completion,
)
from router.http.asgi import RawHeaders, Receive, Scope, Send, send_body
from router.http.choices import interleave
from router.http.errors import ClientGone, to_http_error
from router.http.json_body import BodyReader, decode_body
from router.http.openai_requests import ChatBody, CompletionBody
from router.http.openai_responses import Answer, AnswerHead, AnswerShape, ChatShape, CompletionShape, usage_of
from router.http.services import Services
from router.http.sse import ClientWatch, EventStream, event
from router.text.text_generation import generate
from router.text.tokenizer import AsyncTokenizer, Tokenizer
from runtime.errors import KvferryError
from runtime.telemetry import request_context

logger = logging.getLogger(__name__)

B = TypeVar("B")
# Not a registered status; the one that proxies log for a client that left.
CLIENT_GONE_STATUS = 499
_CLIENT_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(frozen=True, slots=True)
class EndpointKind(Generic[B]):
    """What tells one generation endpoint from the other."""

    name: str
    id_prefix: str
    body_type: type[B]
    plan: Callable[[B, ModelLimits], GenerationPlan]
    shape: Callable[[AnswerHead, Tokenizer, Sequence[str]], AnswerShape]


CHAT = EndpointKind("chat", "chatcmpl-", ChatBody, plan_chat, lambda head, tokens, _: ChatShape(head, tokens))
COMPLETIONS = EndpointKind("completions", "cmpl-", CompletionBody, plan_completion, CompletionShape)


@dataclass(frozen=True, slots=True)
class _Job:
    """A request after tokenising: what to run and how to dress the answer."""

    plan: GenerationPlan
    requests: list[GenerationRequest]
    shape: AnswerShape
    headers: RawHeaders

    def receipt(self, ends: Sequence[TextEnd | None]) -> KVReceipt | None:
        """The first choice's receipt, if the client wants one."""
        first = ends[0]
        return first.receipt if self.plan.want_receipt and first is not None else None


class RequestCap:
    """At most `limit` requests in this process, from the first byte of the body to the last of the answer.

    The queues of the cluster have their own bounds; this one bounds what waits in front of them.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.in_flight = 0

    def __enter__(self) -> None:
        if self.in_flight >= self._limit:
            message = f"There are {self._limit} requests here already."
            raise KvferryError(ErrorCode.OVERLOADED, message, retry_after_ms=1000)
        self.in_flight += 1

    def __exit__(self, *_: object) -> None:
        self.in_flight -= 1


class GenerationEndpoint(Generic[B]):
    """An ASGI application for one of the endpoints. Raises HttpError or ClientGone before the first byte is sent."""

    def __init__(self, kind: EndpointKind[B], services: Services, bodies: BodyReader, cap: RequestCap) -> None:
        self._kind = kind
        self._services = services
        self._bodies = bodies
        self._cap = cap

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = self._kind.id_prefix + secrets.token_hex(12)
        headers = Headers(scope=scope)
        started = self._services.clock.now()
        status = 500
        with request_context(request_id):
            try:
                status = await self._answer(request_id, headers, receive, send)
            except ClientGone:
                status = CLIENT_GONE_STATUS
                raise
            except Exception as problem:
                error = to_http_error(problem)
                error.headers["x-request-id"] = request_id
                status = error.status
                raise error from None
            finally:
                duration_ms = (self._services.clock.now() - started) * 1000
                _log(self._kind.name, status, duration_ms, headers.get("x-request-id", ""))

    async def _answer(self, request_id: str, headers: Headers, receive: Receive, send: Send) -> int:
        """Returns the status that tells how it went; a failure inside a stream has one too."""
        with ExitStack() as held:
            with self._services.at_door():
                if self._services.draining():
                    raise KvferryError(ErrorCode.UNAVAILABLE, "This router is shutting down.", retry_after_ms=1000)
                held.enter_context(self._cap)
                plan = await self._plan(headers, receive)
            with ClientWatch(receive):
                with self._services.at_door():
                    job = await self._prepare(plan, request_id)
                if plan.stream:
                    return await self._stream(job, send)
                data = await self._collect(job)
            await send_body(send, 200, data, headers=job.headers)
            return 200

    async def _plan(self, headers: Headers, receive: Receive) -> GenerationPlan:
        body = await decode_body(await self._bodies.read(headers, receive), self._kind.body_type)
        plan = self._kind.plan(body, self._services.limits())
        return replace(plan, want_receipt=True) if headers.get("x-kvferry-receipt") == "1" else plan

    async def _prepare(self, plan: GenerationPlan, request_id: str) -> _Job:
        limits = self._services.limits()
        prompt_ids = [await token_ids_of(prompt, self._services.tokenizer) for prompt in plan.prompts]
        scope = RequestScope(request_id, self._services.clock.now() + self._services.request_timeout_s)
        head = AnswerHead(
            request_id=request_id,
            model=limits.model,
            created=int(time.time()),
            logprobs=plan.sampling.HasField("num_logprobs"),
            usage_in_chunks=plan.stream and plan.include_usage,
        )
        echoes = []
        if plan.echo:
            for prompt, token_ids in zip(plan.prompts, prompt_ids, strict=True):
                text = prompt if isinstance(prompt, str) else await self._services.tokenizer.decode(token_ids)
                echoes.extend([text] * plan.num_choices)
        return _Job(
            plan=plan,
            requests=build_requests(plan, prompt_ids, limits, scope),
            shape=self._kind.shape(head, self._services.tokenizer.tokenizer, echoes),
            headers=[(b"x-request-id", request_id.encode())],
        )

    def _texts(self, job: _Job) -> AsyncGenerator[tuple[int, TextChunk | TextEnd], None]:
        tokenizer = self._services.tokenizer.tokenizer
        return interleave([generate(self._services.source, request, tokenizer) for request in job.requests])

    async def _collect(self, job: _Job) -> bytes:
        answers = [Answer() for _ in job.requests]
        async with aclosing(self._texts(job)) as items:
            async for index, item in items:
                answers[index].add(item)
        ends = [answer.end for answer in answers if answer.end is not None]
        return job.shape.body(answers, usage_of(ends, job.plan.num_choices), job.receipt(ends))

    async def _stream(self, job: _Job, send: Send) -> int:
        async with EventStream(send, headers=job.headers, quiet_s=self._services.quiet_s) as stream:
            try:
                await self._send_events(job, stream)
            except Exception as problem:
                error = to_http_error(problem)
                if not stream.started:
                    raise error from None
                await stream.fail(error)
                return error.status
        return 200

    async def _send_events(self, job: _Job, stream: EventStream) -> None:
        ends: list[TextEnd | None] = [None] * len(job.requests)
        opened: set[int] = set()
        async with aclosing(self._texts(job)) as items:
            async for index, item in items:
                chunks = []
                if index not in opened:
                    opened.add(index)
                    chunks.append(job.shape.opening(index))
                if isinstance(item, TextEnd):
                    ends[index] = item
                    is_last = None not in ends and not job.plan.include_usage
                    chunks.append(job.shape.finish(index, item, job.receipt(ends) if is_last else None))
                else:
                    chunks.append(job.shape.delta(index, item))
                if data := b"".join(event(chunk) for chunk in chunks if chunk is not None):
                    await stream.send(data)
        if job.plan.include_usage:
            usage = usage_of([end for end in ends if end is not None], job.plan.num_choices)
            await stream.send(event(job.shape.usage(usage, job.receipt(ends))))
        await stream.close()


async def token_ids_of(prompt: Prompt, tokenizer: AsyncTokenizer) -> Sequence[int]:
    """The ids of a prompt; ids that the client gave are used as they are. Raises KvferryError for a bad chat."""
    if isinstance(prompt, str):
        return await tokenizer.encode(prompt)
    if isinstance(prompt, Conversation):
        return await tokenizer.encode_chat([{"role": m.role, "content": m.text()} for m in prompt.messages])
    return prompt


def _log(endpoint: str, status: int, duration_ms: float, client_request_id: str) -> None:
    """One line a request; a quiet one unless it failed or the client gave it a name to be found by."""
    named = _CLIENT_REQUEST_ID.fullmatch(client_request_id) is not None
    level = logging.WARNING if status >= 500 else logging.INFO if named else logging.DEBUG
    name = client_request_id if named else "-"
    logger.log(level, "%s status=%d duration_ms=%.0f client_request_id=%s", endpoint, status, duration_ms, name)

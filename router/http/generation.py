"""The generation endpoints: one request from its body to the last byte of its answer.

1. refuse at once while draining, or when too many requests are here already
2. read and check the body, plan what to generate
3. from here on watch the connection: when the client leaves, everything below is cancelled, on the workers too
4. tokenise the prompts off the event loop, check the context's length
5. run all choices at the same time; send their text as events, or collect it into one body

Failures: before the first byte, an error status; after it, one error event; a client that left gets nothing.
"""

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from starlette.datastructures import Headers

from kvferry_rpc.common_pb2 import ErrorCode, KVReceipt
from router.generation import GenerationRequest, TextChunk, TextEnd
from router.http.asgi import ClientPipe, RawHeaders, Receive, Scope, Send, client_pipe, send_body, tenant_of
from router.http.best_of import best_answers
from router.http.choices import AnswerSink, run_choices
from router.http.deadline import deadline_of
from router.http.endpoint_kind import AnswerShape, Asked, EndpointKind
from router.http.errors import ClientGone, to_http_error
from router.http.json_body import LARGE_BODY_BYTES, BodyReader, decode_body
from router.http.openai_responses import Answer, AnswerHead, Echo, usage_of
from router.http.services import Services
from router.http.sse import ClientWatch, EventStream
from router.observation.access_log import AccessNote, access_note
from router.plans.chat_plan import syntax_behind, template_messages
from router.plans.generation_plan import (
    Conversation,
    GenerationPlan,
    Prompt,
    RequestScope,
    build_requests,
)
from router.text.chat_reader import ChatSyntax
from router.text.tokenizer import AsyncTokenizer
from runtime.errors import KvferryError
from runtime.telemetry import request_context
from runtime.tracing import trace_id_of

logger = logging.getLogger(__name__)

B = TypeVar("B")
# Not a registered status; the one that proxies log for a client that left.
CLIENT_GONE_STATUS = 499
_CLIENT_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(frozen=True, slots=True)
class _Job:
    """A request after tokenising: what to run and how to dress the answer."""

    asked: Asked
    requests: list[GenerationRequest]
    chat: ChatSyntax | None
    shape: AnswerShape
    headers: RawHeaders
    note: AccessNote

    @property
    def plan(self) -> GenerationPlan:
        return self.asked.plan

    def receipt(self, ends: Sequence[TextEnd | None]) -> KVReceipt | None:
        """The first choice's receipt, if the client wants one."""
        first = ends[0]
        return first.receipt if self.plan.want_receipt and first is not None else None


class GenerationEndpoint(Generic[B]):
    """An ASGI application for one of the endpoints. Raises HttpError or ClientGone before the first byte is sent."""

    def __init__(self, kind: EndpointKind[B], services: Services, bodies: BodyReader) -> None:
        self._kind = kind
        self._services = services
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = self._kind.id_prefix + secrets.token_hex(12)
        headers = Headers(scope=scope)
        started = self._services.clock.now()
        status = 500
        traceparent = self._services.begin_trace(headers.get("traceparent"))
        note = access_note(scope)
        note.request_id, note.trace_id = request_id, trace_id_of(traceparent)
        with request_context(request_id, note.trace_id):
            try:
                status = await self._answer(request_id, traceparent, scope, receive, send)
            except ClientGone:
                status = CLIENT_GONE_STATUS
                raise
            except Exception as problem:
                error = to_http_error(problem)
                error.headers.update(dict.fromkeys(self._kind.id_headers, request_id))
                status = error.status
                try:
                    raise error from None
                finally:
                    # Its traceback has this frame: together they would hold the prompt until the collector comes.
                    del error
            finally:
                duration_ms = (self._services.clock.now() - started) * 1000
                _log(self._kind.name, status, duration_ms, headers.get("x-request-id", ""))

    async def _answer(self, request_id: str, traceparent: str, scope: Scope, receive: Receive, send: Send) -> int:
        """Returns the status that tells how it went; a failure inside a stream has one too."""
        with ExitStack() as held:
            with self._services.at_door():
                if self._services.draining():
                    raise KvferryError(ErrorCode.UNAVAILABLE, "This router is shutting down.", retry_after_ms=1000)
                held.enter_context(self._services.cap)
                headers, now = Headers(scope=scope), self._services.clock.now()
                deadline = deadline_of(headers, now, self._services.request_timeout_s)
                asked = await self._read(headers, receive)
                plan, tenant = asked.plan, tenant_of(scope)
                tenant.check_priority(plan.priority)
                tenant.check_choices(plan.num_sequences, plan.choices_field)
            pipe = client_pipe(scope)
            with ClientWatch(receive, pipe), asked.fields.applied():
                with self._services.at_door():
                    salt = tenant.salt_for(plan.cache_salt)
                    request = RequestScope(
                        request_id, deadline, salt, tenant.name, plan.priority, plan.slo, self._kind.name, traceparent
                    )
                    job = await self._prepare(asked, request, access_note(scope))
                if plan.stream:
                    return await self._stream(job, pipe, send)
                data = await self._collect(job)
            await send_body(send, 200, data, headers=job.headers)
            return 200

    async def _read(self, headers: Headers, receive: Receive) -> Asked:
        data = await self._bodies.read(headers, receive)
        body, limits = await decode_body(data, self._kind.body_type), self._services.limits()
        if len(data) > LARGE_BODY_BYTES:
            asked = await asyncio.to_thread(self._kind.read, body, limits)
        else:
            asked = self._kind.read(body, limits)
        if headers.get("x-kvferry-receipt") == "1":
            asked = replace(asked, plan=replace(asked.plan, want_receipt=True))
        return asked

    async def _prepare(self, asked: Asked, scope: RequestScope, note: AccessNote) -> _Job:
        plan, limits = asked.plan, self._services.limits()
        most = limits.max_context_tokens - 1
        prompt_ids = [await token_ids_of(prompt, self._services.tokenizer, max_tokens=most) for prompt in plan.prompts]
        note.prompt_tokens = sum(map(len, prompt_ids))
        head = AnswerHead(
            request_id=scope.request_id,
            model=limits.model,
            created=int(time.time()),
            logprobs=plan.num_logprobs is not None,
            usage_in_chunks=plan.stream and plan.include_usage,
            echo_logprobs=plan.num_logprobs if plan.echo else None,
            prompt_logprobs=plan.prompt_logprobs,
            prompt_tokens=note.prompt_tokens,
        )
        echoes = await self._echoes(plan, prompt_ids) if plan.echo else []
        return _Job(
            asked=asked,
            requests=build_requests(plan, prompt_ids, limits, scope),
            chat=plan.chat and syntax_behind(plan.chat, prompt_ids[0], self._services.tokenizer.tokenizer),
            shape=asked.shape(plan, head, self._services.tokenizer.tokenizer, echoes),
            headers=[(name.encode(), scope.request_id.encode()) for name in self._kind.id_headers],
            note=note,
        )

    async def _echoes(self, plan: GenerationPlan, prompt_ids: Sequence[Sequence[int]]) -> list[Echo]:
        """The prompt of each choice as it comes back: as it was given; with logprobs, whose offsets count in it, as its
        tokens read."""
        echoes: list[Echo] = []
        for prompt, token_ids in zip(plan.prompts, prompt_ids, strict=True):
            as_given = isinstance(prompt, str) and plan.num_logprobs is None
            text = str(prompt) if as_given else await self._services.tokenizer.decode(token_ids)
            echoes += [Echo(text, token_ids)] * plan.num_shown
        return echoes

    async def _run(self, job: _Job, sink: AnswerSink) -> None:
        await run_choices(self._services.source, job.requests, job.chat, self._services.tokenizer.tokenizer, sink)

    async def _collect(self, job: _Job) -> bytes:
        answers = [Answer() for _ in job.requests]
        await self._run(job, _Collected(answers))
        ends = [answer.end for answer in answers if answer.end is not None]
        job.note.output_tokens = sum(end.completion_tokens for end in ends)
        shown = best_answers(answers, job.plan.num_choices, job.plan.num_shown)
        receipt = job.receipt([answer.end for answer in shown])
        return job.shape.body(shown, usage_of(ends, job.plan.num_choices), receipt)

    async def _stream(self, job: _Job, pipe: ClientPipe | None, send: Send) -> int:
        shape, quiet_s = job.shape, self._services.quiet_s
        stream = EventStream(send, headers=job.headers, quiet_s=quiet_s, heartbeat=shape.heartbeat, pipe=pipe)
        async with stream:
            try:
                with job.asked.fields.applied():
                    await self._run(job, _Streamed(job, stream))
                    await stream.close(shape.closing())
            except Exception as problem:
                error = to_http_error(problem)
                if not stream.started:
                    try:
                        raise error from None
                    finally:
                        del error  # as above
                await stream.close(shape.failure(error))
                return error.status
        return 200


class _Collected:
    """An AnswerSink for an answer that is sent when it is whole."""

    def __init__(self, answers: Sequence[Answer]) -> None:
        self._answers = answers

    def push(self, index: int, item: TextChunk | TextEnd) -> bool:
        self._answers[index].add(item)
        return True

    async def flush(self) -> None:
        """There is always room."""


class _Streamed:
    """An AnswerSink for an answer that is sent as it comes."""

    def __init__(self, job: _Job, stream: EventStream) -> None:
        self._shape = job.shape
        self._note = job.note
        self._stream = stream
        self._running = len(job.requests)

    def push(self, index: int, item: TextChunk | TextEnd) -> bool:
        data = self._shape.events(index, item)
        if isinstance(item, TextEnd):
            self._note.output_tokens += item.completion_tokens
            self._running -= 1
            if not self._running:
                self._stream.hold(data)
                return True
        return not data or self._stream.push(data)

    async def flush(self) -> None:
        await self._stream.flush()


async def token_ids_of(prompt: Prompt, tokenizer: AsyncTokenizer, *, max_tokens: int | None = None) -> Sequence[int]:
    """The ids of a prompt; ids that the client gave are used as they are. Raises KvferryError for a bad chat, and for a
    text that clearly has more than `max_tokens`."""
    if isinstance(prompt, str):
        return await tokenizer.encode(prompt, max_tokens=max_tokens)
    if isinstance(prompt, Conversation):
        return await tokenizer.encode_chat(template_messages(prompt.messages), prompt.tools, max_tokens=max_tokens)
    return prompt


def _log(endpoint: str, status: int, duration_ms: float, client_request_id: str) -> None:
    """One line a request; a quiet one unless it failed or the client gave it a name to be found by."""
    named = _CLIENT_REQUEST_ID.fullmatch(client_request_id) is not None
    level = logging.WARNING if status >= 500 else logging.INFO if named else logging.DEBUG
    name = client_request_id if named else "-"
    logger.log(level, "%s status=%d duration_ms=%.0f client_request_id=%s", endpoint, status, duration_ms, name)

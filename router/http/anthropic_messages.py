"""Answers in the shape of Anthropic's Messages API: whole messages, streams of typed events, and errors."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import orjson

from kvferry_rpc.common_pb2 import FinishReason, KVReceipt
from router.generation import TextChunk, TextEnd
from router.http.answer_parts import AnswerPart, Change, PartCutter, PartKind, PartStep, parts_of
from router.http.errors import HttpError
from router.http.openai_responses import Answer, AnswerHead, receipt_fields
from router.http.sse import HEARTBEAT, named_event
from router.plans.generation_plan import GenerationPlan
from router.text.chat_events import ChatChunk, ChatEnd, ChatEvent, ReasoningDelta

_ERROR_TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_OPENINGS: Final[Mapping[PartKind, Mapping[str, Any]]] = {
    PartKind.REASONING: {"type": "thinking", "thinking": "", "signature": ""},
    PartKind.TEXT: {"type": "text", "text": ""},
    PartKind.CALL: {"type": "tool_use", "input": {}},
}
# The type of a delta, and the name of what it adds.
_DELTAS: Final[Mapping[PartKind, tuple[str, str]]] = {
    PartKind.REASONING: ("thinking_delta", "thinking"),
    PartKind.TEXT: ("text_delta", "text"),
    PartKind.CALL: ("input_json_delta", "partial_json"),
}


class MessageShape:
    """The answer to one request of `/v1/messages`: one choice, whose chunks are ChatChunks."""

    def __init__(self, plan: GenerationPlan, head: AnswerHead, *, hide_thinking: bool) -> None:
        self._plan = plan
        self._head = head
        self._hide_thinking = hide_thinking
        self._cutter = PartCutter()
        self._begun = False
        self._end: TextEnd | None = None

    def body(self, answers: Sequence[Answer], usage: dict[str, Any], receipt: KVReceipt | None) -> bytes:
        end = _ended(answers[0].end)
        parts = parts_of(self._shown(answers[0].events))
        return orjson.dumps(
            {
                **self._message([_block(part) for part in parts], _usage(end)),
                **_stop(end),
                **_receipt(receipt),
            }
        )

    def events(self, index: int, item: TextChunk | TextEnd) -> bytes:
        """The message begins with the first token, whether or not it has text."""
        begun, self._begun = self._begun, True
        events = [] if begun else [self._start()]
        if isinstance(item, TextEnd):
            self._end = item
            events += map(_block_event, self._cutter.finish())
        elif isinstance(item, ChatChunk):
            for event in self._shown(item.events):
                events += map(_block_event, self._cutter.push(event))
        return b"".join(map(_event, events))

    def closing(self) -> bytes:
        end = _ended(self._end)
        delta = {
            "type": "message_delta",
            "delta": _stop(end),
            "usage": _usage(end),
            **_receipt(end.receipt if self._plan.want_receipt else None),
        }
        return _event(delta) + _event({"type": "message_stop"})

    def failure(self, error: HttpError) -> bytes:
        return named_event("error", error_body(error, self._head.request_id))

    def heartbeat(self) -> bytes:
        # Before the message has begun clients expect no event.
        return _event({"type": "ping"}) if self._begun else HEARTBEAT

    def _shown(self, events: Iterable[ChatEvent]) -> Iterable[ChatEvent]:
        if not self._hide_thinking:
            return events
        return [event for event in events if not isinstance(event, ReasoningDelta)]

    def _start(self) -> dict[str, Any]:
        # What of the prompt was cached is known at the end.
        usage = _usage_fields(self._head.prompt_tokens, 0, 0)
        message = {**self._message([], usage), "stop_reason": None, "stop_sequence": None}
        return {"type": "message_start", "message": message}

    def _message(self, content: list[dict[str, Any]], usage: dict[str, int]) -> dict[str, Any]:
        return {
            "id": self._head.request_id,
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": content,
            "usage": usage,
        }


def error_body(error: HttpError, request_id: str | None) -> bytes:
    """A failure in Anthropic's shape."""
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return orjson.dumps({"type": "error", "error": {"type": kind, "message": error.message}, "request_id": request_id})


def _event(fields: dict[str, Any]) -> bytes:
    return named_event(fields["type"], orjson.dumps(fields))


def _block_event(step: PartStep) -> dict[str, Any]:
    change, part, piece = step
    if change is Change.OPENED:
        return {"type": "content_block_start", "index": part.index, "content_block": _opening(part)}
    if change is Change.GREW:
        kind, name = _DELTAS[part.kind]
        return {"type": "content_block_delta", "index": part.index, "delta": {"type": kind, name: piece}}
    return {"type": "content_block_stop", "index": part.index}


def _opening(part: AnswerPart) -> dict[str, Any]:
    block = dict(_OPENINGS[part.kind])
    if part.kind is PartKind.CALL:
        block |= {"id": part.call_id, "name": part.name}
    return block


def _block(part: AnswerPart) -> dict[str, Any]:
    if part.kind is PartKind.CALL:
        return {**_opening(part), "input": _input(part.text)}
    return {**_opening(part), _DELTAS[part.kind][1]: part.text}


def _input(arguments: str) -> Any:
    """The arguments of a call as an object, as they were written: an empty one where the answer broke off within."""
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return {}
    # Not encoded again, which could change numbers.
    return orjson.Fragment(arguments) if isinstance(value, dict) else {}


def _ended(end: TextEnd | None) -> TextEnd:
    if end is None:
        raise AssertionError("a message that has not ended has no reason to stop")
    return end


def _stop(end: TextEnd) -> dict[str, Any]:
    """An answer cut short says so, calls or not: the last one may be incomplete."""
    if end.reason == FinishReason.LENGTH:
        reason = "max_tokens"
    elif end.stop_string is not None:
        reason = "stop_sequence"
    else:
        reason = "tool_use" if isinstance(end, ChatEnd) and end.made_calls else "end_turn"
    return {"stop_reason": reason, "stop_sequence": end.stop_string if reason == "stop_sequence" else None}


def _usage(end: TextEnd) -> dict[str, int]:
    return _usage_fields(end.prompt_tokens, end.cached_tokens, end.completion_tokens)


def _usage_fields(prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> dict[str, int]:
    """`input_tokens` are those that were not cached, as Anthropic counts."""
    return {
        "input_tokens": prompt_tokens - cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": completion_tokens,
    }


def _receipt(receipt: KVReceipt | None) -> dict[str, Any]:
    return {} if receipt is None else {"kv_receipt": receipt_fields(receipt)}

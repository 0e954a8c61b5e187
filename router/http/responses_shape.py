"""Answers in the shape of OpenAI's Responses API: one object, or a stream of typed, numbered events."""

from collections.abc import Sequence
from typing import Any, Final

import orjson

from kvferry_rpc.common_pb2 import FinishReason, KVReceipt, TokenOutput
from router.generation import TextChunk, TextEnd
from router.http.answer_parts import AnswerPart, Change, PartCutter, PartStep, parts_of
from router.http.errors import HttpError
from router.http.openai_logprobs import TokenTexts, chat_logprobs
from router.http.openai_responses import Answer, AnswerHead, receipt_fields
from router.http.responses_items import Fields, ItemShape
from router.http.sse import HEARTBEAT, named_event
from router.plans.generation_plan import GenerationPlan
from router.text.chat_events import ChatChunk, ChatEnd

_FAILURES: Final = {400: "invalid_prompt", 429: "rate_limit_exceeded"}


class ResponseShape:
    """The answer to one request of `/v1/responses`: one choice, whose chunks are ChatChunks.

    With logprobs an answer is nothing but one text, so all tokens are that text's.
    """

    def __init__(self, plan: GenerationPlan, head: AnswerHead, tokens: TokenTexts, echo: Fields) -> None:
        """`echo` has the fields of the answer that repeat what was asked for."""
        self._plan = plan
        self._head = head
        self._tokens = tokens
        self._echo = echo
        self._items = ItemShape(head.request_id.removeprefix("resp_"))
        self._cutter = PartCutter(never_empty=True)
        self._num_events = 0
        self._logprobs: list[Fields] = []
        # How many of them have been sent.
        self._num_shown = 0
        self._end: TextEnd | None = None

    def body(self, answers: Sequence[Answer], usage: dict[str, Any], receipt: KVReceipt | None) -> bytes:
        answer = answers[0]
        parts = parts_of(answer.events, never_empty=True)
        self._take_logprobs(answer.tokens)
        return orjson.dumps(self._ended(parts, answer.end, receipt))

    def events(self, index: int, item: TextChunk | TextEnd) -> bytes:
        """The response begins with the first token, whether or not it has text."""
        events = self._begin()
        if isinstance(item, TextEnd):
            self._end = item
            for step in self._cutter.finish():
                events += self._part_events(step, _last_status(item))
        elif isinstance(item, ChatChunk):
            self._take_logprobs(item.tokens)
            for event in item.events:
                for step in self._cutter.push(event):
                    events += self._part_events(step, "completed")
        return self._numbered(events)

    def closing(self) -> bytes:
        receipt = self._end.receipt if self._plan.want_receipt and self._end is not None else None
        response = self._ended(self._cutter.parts, self._end, receipt)
        return self._numbered([{"type": f"response.{response['status']}", "response": response}])

    def failure(self, error: HttpError) -> bytes:
        problem = {"code": _FAILURES.get(error.status, "server_error"), "message": error.message}
        response = self._response("failed", self._output(self._cutter.parts, "incomplete")) | {"error": problem}
        return self._numbered([*self._begin(), {"type": "response.failed", "response": response}])

    def heartbeat(self) -> bytes:
        return HEARTBEAT

    def _begin(self) -> list[Fields]:
        if self._num_events:
            return []
        response = self._response("in_progress", [])
        return [{"type": f"response.{kind}", "response": response} for kind in ("created", "in_progress")]

    def _part_events(self, step: PartStep, status: str) -> list[Fields]:
        change, part, piece = step
        if change is Change.OPENED:
            return self._items.opened(part)
        if change is Change.GREW:
            return self._items.grew(part, piece, self._new_logprobs())
        # Those of tokens that made no text: a stop string, a special token.
        rest = self._new_logprobs()
        last = self._items.grew(part, "", rest) if rest else []
        return last + self._items.closed(part, status, self._logprobs)

    def _take_logprobs(self, tokens: Sequence[TokenOutput]) -> None:
        if self._head.logprobs:
            self._logprobs += chat_logprobs(tokens, self._tokens)["content"]

    def _new_logprobs(self) -> list[Fields]:
        new = self._logprobs[self._num_shown :]
        self._num_shown = len(self._logprobs)
        return new

    def _numbered(self, events: Sequence[Fields]) -> bytes:
        frames = []
        for event in events:
            fields = event | {"sequence_number": self._num_events}
            frames.append(named_event(event["type"], orjson.dumps(fields)))
            self._num_events += 1
        return b"".join(frames)

    def _ended(self, parts: Sequence[AnswerPart], end: TextEnd | None, receipt: KVReceipt | None) -> Fields:
        if end is None:
            raise AssertionError("a response that has not ended has no status")
        status = _last_status(end)
        response = self._response(status, self._output(parts, status)) | {"usage": _usage(end)}
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        if receipt is not None:
            response["kv_receipt"] = receipt_fields(receipt)
        return response

    def _output(self, parts: Sequence[AnswerPart], last_status: str) -> list[Fields]:
        # With logprobs there is one part.
        return [
            self._items.item(part, last_status if part is parts[-1] else "completed", self._logprobs) for part in parts
        ]

    def _response(self, status: str, output: list[Fields]) -> Fields:
        return {
            "id": self._head.request_id,
            "object": "response",
            "created_at": self._head.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._head.model,
            "output": output,
            "usage": None,
            **self._echo,
        }


def _last_status(end: TextEnd) -> str:
    """Of the response, and of the item with which it ends."""
    return "incomplete" if end.reason == FinishReason.LENGTH else "completed"


def _usage(end: TextEnd) -> Fields:
    return {
        "input_tokens": end.prompt_tokens,
        "input_tokens_details": {"cached_tokens": end.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": end.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": end.reasoning_tokens if isinstance(end, ChatEnd) else 0},
        "total_tokens": end.prompt_tokens + end.completion_tokens,
    }

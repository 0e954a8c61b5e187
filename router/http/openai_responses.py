"""Answers in OpenAI's shapes: whole bodies and stream chunks, for chat and for completions.

A choice's chunks are: an opening (chat: the role; completions: the echoed prompt, if any), deltas, and one with
nothing but the finish_reason, which is null in all others.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from kvferry_rpc.common_pb2 import FinishReason, KVReceipt, TokenOutput
from router.generation import TextChunk, TextEnd
from router.http.openai_logprobs import CompletionLogprobs, TokenTexts, chat_logprobs

_FINISH_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What is the same in everything sent for one request. `usage_in_chunks` puts a null usage into each chunk."""

    request_id: str
    model: str
    created: int
    logprobs: bool = False
    usage_in_chunks: bool = False


@dataclass(slots=True)
class Answer:
    """One choice, collected. `end` is None until the choice has ended."""

    pieces: list[str] = field(default_factory=list)
    tokens: list[TokenOutput] = field(default_factory=list)
    end: TextEnd | None = None

    def add(self, item: TextChunk | TextEnd) -> None:
        """Take the next item of the choice's text stream."""
        if isinstance(item, TextEnd):
            self.end = item
        else:
            self.pieces.append(item.text)
            self.tokens.extend(item.tokens)


class AnswerShape(Protocol):
    """How one endpoint dresses its answers. Chunks are JSON objects, ready to be sent as events."""

    def opening(self, index: int) -> bytes | None:
        """The chunk before the first text of a choice, if there is one."""

    def delta(self, index: int, chunk: TextChunk) -> bytes | None:
        """A piece of text; None when it holds nothing to show yet."""

    def finish(self, index: int, end: TextEnd, receipt: KVReceipt | None) -> bytes:
        """The last chunk of a choice."""

    def usage(self, usage: dict[str, Any], receipt: KVReceipt | None) -> bytes:
        """The chunk without choices that tells what the request cost."""

    def body(self, answers: Sequence[Answer], usage: dict[str, Any], receipt: KVReceipt | None) -> bytes:
        """The whole answer of a request that did not stream."""


class ChatShape:
    """`/v1/chat/completions`."""

    def __init__(self, head: AnswerHead, tokens: TokenTexts) -> None:
        self._head = head
        self._tokens = tokens

    def opening(self, index: int) -> bytes | None:
        return self._chunk(index, {"role": "assistant", "content": ""})

    def delta(self, index: int, chunk: TextChunk) -> bytes | None:
        logprobs = chat_logprobs(chunk.tokens, self._tokens) if self._head.logprobs and chunk.tokens else None
        if not chunk.text and logprobs is None:
            return None
        return self._chunk(index, {"content": chunk.text}, logprobs=logprobs)

    def finish(self, index: int, end: TextEnd, receipt: KVReceipt | None) -> bytes:
        return self._chunk(index, {}, finish_reason=_FINISH_REASONS[end.reason], receipt=receipt)

    def usage(self, usage: dict[str, Any], receipt: KVReceipt | None) -> bytes:
        return _dump(self._head, "chat.completion.chunk", [], usage=usage, receipt=receipt)

    def body(self, answers: Sequence[Answer], usage: dict[str, Any], receipt: KVReceipt | None) -> bytes:
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": "".join(answer.pieces), "refusal": None},
                "logprobs": chat_logprobs(answer.tokens, self._tokens) if self._head.logprobs else None,
                "finish_reason": _finish_reason(answer),
            }
            for index, answer in enumerate(answers)
        ]
        return _dump(self._head, "chat.completion", choices, usage=usage, receipt=receipt)

    def _chunk(
        self,
        index: int,
        delta: dict[str, str],
        *,
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
        receipt: KVReceipt | None = None,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return _dump(self._head, "chat.completion.chunk", [choice], receipt=receipt)


class CompletionShape:
    """`/v1/completions`. `echoes` holds the prompt's text for each choice, or nothing."""

    def __init__(self, head: AnswerHead, tokens: TokenTexts, echoes: Sequence[str] = ()) -> None:
        self._head = head
        self._tokens = tokens
        self._echoes = echoes
        self._logprobs_of: dict[int, CompletionLogprobs] = {}

    def opening(self, index: int) -> bytes | None:
        return self._chunk(index, self._echoes[index]) if self._echoes else None

    def delta(self, index: int, chunk: TextChunk) -> bytes | None:
        logprobs = self._logprobs(index, chunk.tokens) if self._head.logprobs and chunk.tokens else None
        if not chunk.text and logprobs is None:
            return None
        return self._chunk(index, chunk.text, logprobs=logprobs)

    def finish(self, index: int, end: TextEnd, receipt: KVReceipt | None) -> bytes:
        return self._chunk(index, "", finish_reason=_FINISH_REASONS[end.reason], receipt=receipt)

    def usage(self, usage: dict[str, Any], receipt: KVReceipt | None) -> bytes:
        return _dump(self._head, "text_completion", [], usage=usage, receipt=receipt)

    def body(self, answers: Sequence[Answer], usage: dict[str, Any], receipt: KVReceipt | None) -> bytes:
        choices = [
            {
                "index": index,
                "text": "".join([*self._echoes[index : index + 1], *answer.pieces]),
                "logprobs": self._logprobs(index, answer.tokens) if self._head.logprobs else None,
                "finish_reason": _finish_reason(answer),
            }
            for index, answer in enumerate(answers)
        ]
        return _dump(self._head, "text_completion", choices, usage=usage, receipt=receipt)

    def _logprobs(self, index: int, tokens: Sequence[TokenOutput]) -> dict[str, Any]:
        if index not in self._logprobs_of:
            self._logprobs_of[index] = CompletionLogprobs(self._tokens)
        return self._logprobs_of[index].shape(tokens)

    def _chunk(
        self,
        index: int,
        text: str,
        *,
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
        receipt: KVReceipt | None = None,
    ) -> bytes:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
        return _dump(self._head, "text_completion", [choice], receipt=receipt)


def usage_of(ends: Sequence[TextEnd], num_choices: int) -> dict[str, Any]:
    """What a request cost. `ends` go prompt by prompt, `num_choices` each: a prompt counts once, answers all count,
    and cached tokens are those of each prompt's first choice (the others always find the first one's blocks)."""
    firsts = ends[::num_choices]
    prompt_tokens = sum(end.prompt_tokens for end in firsts)
    completion_tokens = sum(end.completion_tokens for end in ends)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(end.cached_tokens for end in firsts)},
    }


def receipt_fields(receipt: KVReceipt) -> dict[str, Any]:
    """A receipt as JSON: all fields, also those at zero; the checksum in hexadecimal, times to a microsecond."""
    fields: dict[str, Any] = {}
    for descriptor in KVReceipt.DESCRIPTOR.fields:
        value = getattr(receipt, descriptor.name)
        if isinstance(value, bytes):
            value = value.hex()
        elif isinstance(value, float):
            value = round(value, 3)
        elif descriptor.is_repeated:
            value = list(value)
        fields[descriptor.name] = value
    return fields


def _finish_reason(answer: Answer) -> str:
    if answer.end is None:
        raise AssertionError("a choice that has not ended has no finish_reason")
    return _FINISH_REASONS[answer.end.reason]


def _dump(
    head: AnswerHead,
    kind: str,
    choices: list[dict[str, Any]],
    *,
    usage: dict[str, Any] | None = None,
    receipt: KVReceipt | None = None,
) -> bytes:
    message: dict[str, Any] = {
        "id": head.request_id,
        "object": kind,
        "created": head.created,
        "model": head.model,
        "choices": choices,
    }
    if usage is not None or head.usage_in_chunks:
        message["usage"] = usage
    if receipt is not None:
        message["kv_receipt"] = receipt_fields(receipt)
    return orjson.dumps(message)

"""Answers in OpenAI's shapes: whole bodies and stream chunks, for chat and for completions.

A choice's chunks are: an opening (chat: the role; completions: the echoed prompt, if any), deltas, and one with
nothing but the finish_reason, which is null in all others.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from kvferry_rpc.common_pb2 import FinishReason, KVReceipt, PromptTokenLogprob, TokenOutput
from router.dispatch.receipts import json_fields
from router.generation import TextChunk, TextEnd
from router.http.openai_logprobs import CompletionLogprobs, TokenTexts, chat_logprobs, prompt_logprobs
from router.http.openai_messages import chat_delta, chat_message
from router.text.chat_events import ChatChunk, ChatEnd, ChatEvent

_FINISH_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What is the same in everything sent for one request. `usage_in_chunks` puts a null usage into each chunk.

    `echo_logprobs`: how many alternatives an echoed prompt's logprobs have, None = it has none. `prompt_logprobs`: the
    same for those in vLLM's form. `prompt_tokens` counts those of all prompts.
    """

    request_id: str
    model: str
    created: int
    logprobs: bool = False
    usage_in_chunks: bool = False
    echo_logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that comes back before its answer."""

    text: str
    token_ids: Sequence[int]


@dataclass(slots=True)
class Answer:
    """One choice, collected. `events` are those of a chat. `end` is None until the choice has ended."""

    pieces: list[str] = field(default_factory=list)
    events: list[ChatEvent] = field(default_factory=list)
    tokens: list[TokenOutput] = field(default_factory=list)
    prompt_logprobs: list[PromptTokenLogprob] = field(default_factory=list)
    end: TextEnd | None = None

    def add(self, item: TextChunk | TextEnd) -> None:
        """Take the next item of the choice's text stream."""
        if isinstance(item, TextEnd):
            self.end = item
        else:
            self.pieces.append(item.text)
            self.tokens.extend(item.tokens)
            self.prompt_logprobs.extend(item.prompt_logprobs)
            if isinstance(item, ChatChunk):
                self.events.extend(item.events)


class ChunkShape(Protocol):
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
    """`/v1/chat/completions`: takes ChatChunks and ChatEnds. What one chunk made final is one delta."""

    def __init__(self, head: AnswerHead, tokens: TokenTexts) -> None:
        self._head = head
        self._tokens = tokens

    def opening(self, index: int) -> bytes | None:
        return self._chunk(index, {"role": "assistant", "content": ""})

    def delta(self, index: int, chunk: TextChunk) -> bytes | None:
        logprobs = chat_logprobs(chunk.tokens, self._tokens) if self._head.logprobs and chunk.tokens else None
        events = chunk.events if isinstance(chunk, ChatChunk) else ()
        if not events and logprobs is None:
            return None
        return self._chunk(index, chat_delta(events) or {"content": ""}, logprobs=logprobs)

    def finish(self, index: int, end: TextEnd, receipt: KVReceipt | None) -> bytes:
        return self._chunk(index, {}, finish_reason=_finish_reason(end), receipt=receipt)

    def usage(self, usage: dict[str, Any], receipt: KVReceipt | None) -> bytes:
        return _dump(self._head, "chat.completion.chunk", [], usage=usage, receipt=receipt)

    def body(self, answers: Sequence[Answer], usage: dict[str, Any], receipt: KVReceipt | None) -> bytes:
        choices = [
            {
                "index": index,
                "message": chat_message(answer.events),
                "logprobs": chat_logprobs(answer.tokens, self._tokens) if self._head.logprobs else None,
                "finish_reason": _finish_reason(answer.end),
            }
            for index, answer in enumerate(answers)
        ]
        of_prompt = _prompt_logprobs(self._head, answers[0], self._tokens)
        return _dump(self._head, "chat.completion", choices, usage=usage, receipt=receipt, extra=of_prompt)

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
        receipt: KVReceipt | None = None,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return _dump(self._head, "chat.completion.chunk", [choice], receipt=receipt)


class CompletionShape:
    """`/v1/completions`. `echoes` holds the prompt for each choice, or nothing.

    An echo with logprobs comes with the first delta, which brings them; without, as an opening.
    """

    def __init__(self, head: AnswerHead, tokens: TokenTexts, echoes: Sequence[Echo] = ()) -> None:
        self._head = head
        self._tokens = tokens
        self._echoes = echoes
        self._logprobs_of: dict[int, CompletionLogprobs] = {}

    def opening(self, index: int) -> bytes | None:
        if not self._echoes or self._head.echo_logprobs is not None:
            return None
        return self._chunk(index, self._echoes[index].text)

    def delta(self, index: int, chunk: TextChunk) -> bytes | None:
        text = chunk.text
        wanted = self._head.logprobs and bool(chunk.tokens)
        if self._head.echo_logprobs is not None and index not in self._logprobs_of:
            text, wanted = self._echoes[index].text + text, True
        logprobs = self._logprobs(index, chunk.prompt_logprobs, chunk.tokens) if wanted else None
        if not text and logprobs is None:
            return None
        return self._chunk(index, text, logprobs=logprobs)

    def finish(self, index: int, end: TextEnd, receipt: KVReceipt | None) -> bytes:
        return self._chunk(index, "", finish_reason=_finish_reason(end), receipt=receipt)

    def usage(self, usage: dict[str, Any], receipt: KVReceipt | None) -> bytes:
        return _dump(self._head, "text_completion", [], usage=usage, receipt=receipt)

    def body(self, answers: Sequence[Answer], usage: dict[str, Any], receipt: KVReceipt | None) -> bytes:
        choices = [self._choice(index, answer) for index, answer in enumerate(answers)]
        return _dump(self._head, "text_completion", choices, usage=usage, receipt=receipt)

    def _choice(self, index: int, answer: Answer) -> dict[str, Any]:
        wanted = self._head.logprobs
        return {
            "index": index,
            "text": "".join([*(echo.text for echo in self._echoes[index : index + 1]), *answer.pieces]),
            "logprobs": self._logprobs(index, answer.prompt_logprobs, answer.tokens) if wanted else None,
            "finish_reason": _finish_reason(answer.end),
            **_prompt_logprobs(self._head, answer, self._tokens),
        }

    def _logprobs(
        self, index: int, prompt: Sequence[PromptTokenLogprob], tokens: Sequence[TokenOutput]
    ) -> dict[str, Any]:
        """Of the next tokens of a choice, and of its prompt before the first of them where that is echoed."""
        shaper, alternatives = self._logprobs_of.get(index), self._head.echo_logprobs
        if shaper is not None:
            return shaper.shape(tokens)
        shaper = self._logprobs_of[index] = CompletionLogprobs(self._tokens)
        if alternatives is None:
            return shaper.shape(tokens)
        echoed = shaper.shape_prompt(self._echoes[index].token_ids, prompt, alternatives)
        return {name: echoed[name] + values for name, values in shaper.shape(tokens).items()}

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
    and cached tokens are those of each prompt's first choice (the others always find the first one's blocks). Those of
    a chat tell how many tokens were reasoning."""
    firsts = ends[::num_choices]
    prompt_tokens = sum(end.prompt_tokens for end in firsts)
    completion_tokens = sum(end.completion_tokens for end in ends)
    chats = [end for end in ends if isinstance(end, ChatEnd)]
    of_chat = {"completion_tokens_details": {"reasoning_tokens": sum(end.reasoning_tokens for end in chats)}}
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(end.cached_tokens for end in firsts)},
        **(of_chat if chats else {}),
    }


def receipt_fields(receipt: KVReceipt) -> dict[str, Any]:
    """A receipt as JSON: all fields, also those at zero; the checksum in hexadecimal, times to a microsecond."""
    return json_fields(receipt)


def _prompt_logprobs(head: AnswerHead, answer: Answer, texts: TokenTexts) -> dict[str, Any]:
    """The field `prompt_logprobs` of an answer, if the client wants it."""
    if head.prompt_logprobs is None:
        return {}
    return {"prompt_logprobs": prompt_logprobs(answer.prompt_logprobs, head.prompt_logprobs, texts)}


def _finish_reason(end: TextEnd | None) -> str:
    if end is None:
        raise AssertionError("a choice that has not ended has no finish_reason")
    # An answer cut short says so, calls or not: the last one may be incomplete.
    if isinstance(end, ChatEnd) and end.made_calls and end.reason == FinishReason.STOP:
        return "tool_calls"
    return _FINISH_REASONS[end.reason]


def _dump(
    head: AnswerHead,
    kind: str,
    choices: list[dict[str, Any]],
    *,
    usage: dict[str, Any] | None = None,
    receipt: KVReceipt | None = None,
    extra: dict[str, Any] | None = None,
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
    message.update(extra or {})
    return orjson.dumps(message)

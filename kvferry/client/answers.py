"""From the messages of a gRPC answer to the client's values and events."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Final

from kvferry.client.types import (
    Alternative,
    ChatAnswer,
    ClusterState,
    Completion,
    FinishReason,
    Model,
    PromptLogprob,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCall,
    ToolCallArguments,
    ToolCallStart,
    Usage,
    WorkerState,
)
from kvferry_rpc import common_pb2
from kvferry_rpc.common_pb2 import ErrorCode, PromptTokenLogprob, TokenOutput
from kvferry_rpc.public_pb2 import ClusterStateResponse, Finish, GenerateResponse, ListModelsResponse
from runtime.errors import KvferryError

_REASONS: Final[dict[int, FinishReason]] = {
    common_pb2.STOP: "stop",
    common_pb2.LENGTH: "length",
    common_pb2.TOOL_CALLS: "tool_calls",
}
Delta = TextDelta | ReasoningDelta | ToolCallStart | ToolCallArguments


class AnswerBuilder:
    """Collects one choice of an answer, part by part."""

    def __init__(self) -> None:
        self._request_id = ""
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[ToolCallStart, list[str]]] = []
        self._tokens: list[TokenOutput] = []
        self._prompt: list[PromptTokenLogprob] = []
        self._finish: Finish | None = None

    def add(self, part: GenerateResponse) -> list[Delta]:
        """Take the next part; returns what it says."""
        self._request_id = part.request_id
        self._tokens.extend(part.tokens)
        self._prompt.extend(part.prompt_logprobs)
        if part.HasField("finish"):
            self._finish = part.finish
        said: list[Delta] = []
        if part.reasoning:
            self._reasoning.append(part.reasoning)
            said.append(ReasoningDelta(part.reasoning))
        if part.text:
            self._text.append(part.text)
            said.append(TextDelta(part.text))
        for call in part.tool_calls:
            if call.name:
                start = ToolCallStart(call.index, call.id, call.name)
                self._calls.append((start, []))
                said.append(start)
            if call.arguments:
                self._calls[call.index][1].append(call.arguments)
                said.append(ToolCallArguments(call.index, call.arguments))
        return said

    def completion(self) -> Completion:
        """The whole answer. Raises KvferryError (INTERNAL) when it has not ended."""
        return Completion(**self._known())

    def chat(self) -> ChatAnswer:
        """The same for a conversation."""
        calls = tuple(ToolCall(start.id, start.name, "".join(pieces)) for start, pieces in self._calls)
        return ChatAnswer(**self._known(), reasoning="".join(self._reasoning), tool_calls=calls)

    def _known(self) -> dict[str, Any]:
        finish = self._finish
        if finish is None:
            raise KvferryError(ErrorCode.INTERNAL, "the answer ended without saying why")
        return {
            "request_id": self._request_id,
            "text": "".join(self._text),
            "finish_reason": _REASONS.get(finish.reason, "stop"),
            "usage": Usage(
                finish.prompt_tokens, finish.completion_tokens, finish.cached_tokens, finish.reasoning_tokens
            ),
            "token_ids": tuple(token.token_id for token in self._tokens),
            "logprobs": tuple(
                TokenLogprob(token.token_id, token.logprob, _alternatives(token))
                for token in self._tokens
                if token.HasField("logprob")
            ),
            "prompt_logprobs": tuple(
                PromptLogprob(entry.position, entry.token_id, entry.logprob, entry.rank, _alternatives(entry))
                for entry in self._prompt
            ),
            "stop_string": finish.stop_string if finish.HasField("stop_string") else None,
            "receipt": finish.receipt if finish.HasField("receipt") else None,
        }


class ChoicesBuilder:
    """Collects all choices of an answer."""

    def __init__(self, n: int) -> None:
        self._builders = [AnswerBuilder() for _ in range(n)]

    def add(self, part: GenerateResponse) -> None:
        """Take the next part. Raises KvferryError (INTERNAL) when it is of a choice that nobody asked for."""
        if part.index >= len(self._builders):
            raise KvferryError(ErrorCode.INTERNAL, f"the answer has a choice {part.index} that nobody asked for")
        self._builders[part.index].add(part)

    def completions(self) -> tuple[Completion, ...]:
        """Raises KvferryError (INTERNAL) when one has not ended."""
        return tuple(builder.completion() for builder in self._builders)

    def chats(self) -> tuple[ChatAnswer, ...]:
        """The same for a conversation."""
        return tuple(builder.chat() for builder in self._builders)


def models(answer: ListModelsResponse) -> list[Model]:
    """The models of an answer."""
    return [Model(model.id, model.max_context_tokens) for model in answer.models]


def first_model(found: Sequence[Model], address: str) -> str:
    """Its name. Raises KvferryError (UNKNOWN_MODEL) when there is none."""
    if not found:
        raise KvferryError(ErrorCode.UNKNOWN_MODEL, f"{address} serves no model yet")
    return found[0].id


def cluster_state(answer: ClusterStateResponse) -> ClusterState:
    """The snapshot of an answer."""
    names = [field.name for field in fields(WorkerState)]
    return ClusterState(
        model=answer.model,
        router_id=answer.router_id,
        requests_in_flight=answer.requests_in_flight,
        requests_queued=answer.requests_queued,
        workers=tuple(WorkerState(**{name: getattr(worker, name) for name in names}) for worker in answer.workers),
    )


def _alternatives(scored: TokenOutput | PromptTokenLogprob) -> tuple[Alternative, ...]:
    return tuple(Alternative(entry.token_id, entry.logprob) for entry in scored.top_logprobs)

"""The answers of the HTTP API as types, for its OpenAPI document alone: what is sent is built by hand elsewhere.

A field that may be UNSET is one that an answer may lack. A test holds real answers against these types.
"""

from types import GenericAlias
from typing import Annotated, Any, Literal

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from msgspec import UNSET, Meta, Struct, UnsetType, defstruct

from kvferry_rpc.common_pb2 import KVReceipt, Migration

Count = Annotated[int, Meta(ge=0)]


def _of_message(name: str, descriptor: Descriptor, nested: type[Struct] | None = None) -> type[Struct]:
    """A protobuf message as `router.dispatch.receipts.json_fields` shows it; repeated messages in it are `nested`."""
    scalars: dict[int, Any] = {
        FieldDescriptor.TYPE_STRING: str,
        FieldDescriptor.TYPE_BYTES: Annotated[str, Meta(pattern="^([0-9a-f]{2})*$")],
        FieldDescriptor.TYPE_BOOL: bool,
        FieldDescriptor.TYPE_FLOAT: float,
        FieldDescriptor.TYPE_UINT32: Count,
        FieldDescriptor.TYPE_UINT64: Count,
        FieldDescriptor.TYPE_MESSAGE: nested,
    }
    fields: list[tuple[str, Any]] = []
    for field in descriptor.fields:
        kind = scalars[field.type]
        fields.append((field.name, GenericAlias(list, (kind,)) if field.is_repeated else kind))
    return defstruct(name, fields)


Receipt: Any = _of_message("KvReceipt", KVReceipt.DESCRIPTOR, _of_message("KvMigration", Migration.DESCRIPTOR))


class ErrorDetail(Struct):
    """`param` is the field at fault, or null; `code` is a stable word for programs."""

    message: str
    type: str
    param: str | None
    code: str


class Error(Struct):
    """Every failure, also as the data of the last event of a stream that went wrong."""

    error: ErrorDetail


class CachedTokens(Struct):
    cached_tokens: Count


class ReasoningTokens(Struct):
    reasoning_tokens: Count


class Usage(Struct):
    """A prompt counts once, answers all count. `cached_tokens`: of the prompts, what no worker had to compute.
    `reasoning_tokens`: of the answers to a chat, what came up to the last piece of reasoning."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens | UnsetType = UNSET


class TokenLogprob(Struct):
    token: str
    logprob: float
    bytes: list[Annotated[int, Meta(ge=0, le=255)]]


class ChosenToken(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Struct):
    content: list[ChosenToken]
    refusal: None


class PromptLogprob(Struct):
    """`rank` 1 is the most likely."""

    logprob: float
    rank: Annotated[int, Meta(ge=1)]
    decoded_token: str


# By token id, the prompt's own first; null for the first token.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionLogprobs(Struct):
    """Four parallel lists. The first token of an echoed prompt has nulls."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[Count]


class AnsweredFunction(Struct):
    """`arguments` is JSON, whole unless the answer was cut off."""

    name: str
    arguments: str


class AnsweredCall(Struct):
    id: str
    type: Literal["function"]
    function: AnsweredFunction


class AnswerMessage(Struct):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: Annotated[list[AnsweredCall], Meta(min_length=1)] | UnsetType = UNSET


class ChatChoice(Struct):
    index: Count
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(Struct):
    id: str
    object: Literal["chat.completion"]
    created: Count
    model: str
    choices: list[ChatChoice]
    usage: Usage
    kv_receipt: Receipt | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class FunctionDelta(Struct):
    arguments: str
    name: str | UnsetType = UNSET


class CallDelta(Struct):
    """`id`, `type` and `name` come where a call begins."""

    index: Count
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(Struct):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET


class ChatChunkChoice(Struct):
    index: Count
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None


class ChatCompletionChunk(Struct):
    id: str
    object: Literal["chat.completion.chunk"]
    created: Count
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    kv_receipt: Receipt | UnsetType = UNSET


class CompletionChoice(Struct):
    index: Count
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(Struct):
    id: str
    object: Literal["text_completion"]
    created: Count
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    kv_receipt: Receipt | UnsetType = UNSET


class CompletionChunkChoice(Struct):
    index: Count
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class CompletionChunk(Struct):
    id: str
    object: Literal["text_completion"]
    created: Count
    model: str
    choices: list[CompletionChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    kv_receipt: Receipt | UnsetType = UNSET


class Model(Struct):
    """`max_model_len`: the most tokens of prompt and answer together."""

    id: str
    object: Literal["model"]
    created: Count
    owned_by: str
    max_model_len: Count


class ModelList(Struct):
    object: Literal["list"]
    data: list[Model]


class Tokens(Struct):
    model: str
    tokens: list[Count]
    count: Count
    max_model_len: Count


class Health(Struct):
    status: Literal["ok"]


class Readiness(Struct):
    status: Literal["ready"]


class PhaseBegin(Struct):
    phase: str
    attempt: Count
    worker: str
    after_ms: float


class DebugRequest(Struct):
    """What a request does, what it waits for, and since when. Times in seconds since 1970."""

    id: str
    tenant: str
    model: str
    endpoint: str
    phase: Literal["queued", "prefill", "transfer", "decode", "finished", "failed", "cancelled"]
    waits_for: str
    arrived_at: float
    since: float
    in_phase_ms: float
    phases: list[PhaseBegin]
    attempt: Count
    prefill_worker: str
    decode_worker: str
    prompt_tokens: Count
    cached_tokens: Count | None
    output_tokens: Count
    max_tokens: Count
    error: str


class DebugRequests(Struct):
    object: Literal["list"]
    now: float
    in_flight: list[DebugRequest]
    ended: list[DebugRequest]

"""The answers of OpenAI's Responses API as types, for the OpenAPI document alone (see `openapi_answers`)."""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from router.http.openapi_answers import CachedTokens, ChosenToken, Count, Receipt

_Status = Literal["in_progress", "completed", "incomplete"]


class TextContent(Struct, tag_field="type", tag="output_text"):
    text: str
    annotations: Annotated[list[Any], Meta(max_length=0)]
    logprobs: list[ChosenToken]


class ReasoningContent(Struct, tag_field="type", tag="reasoning_text"):
    text: str


class MessageOutput(Struct, tag_field="type", tag="message"):
    id: str
    status: _Status
    role: Literal["assistant"]
    content: list[TextContent]


class ReasoningOutput(Struct, tag_field="type", tag="reasoning"):
    id: str
    status: _Status
    summary: Annotated[list[Any], Meta(max_length=0)]
    content: list[ReasoningContent]


class CallOutput(Struct, tag_field="type", tag="function_call"):
    """`arguments` is JSON, whole unless the answer was cut off."""

    id: str
    status: _Status
    call_id: str
    name: str
    arguments: str


OutputItem = MessageOutput | ReasoningOutput | CallOutput
ContentPart = TextContent | ReasoningContent


class InputTokensDetails(CachedTokens):
    cache_write_tokens: Count


class OutputTokensDetails(Struct):
    reasoning_tokens: Count


class ResponseUsage(Struct):
    input_tokens: Count
    input_tokens_details: InputTokensDetails
    output_tokens: Count
    output_tokens_details: OutputTokensDetails
    total_tokens: Count


class ResponseFailure(Struct):
    code: str
    message: str


class IncompleteDetails(Struct):
    reason: Literal["max_output_tokens"]


class Response(Struct):
    """Answers are not kept. What repeats the request has defaults filled in."""

    id: str
    object: Literal["response"]
    created_at: Count
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    temperature: float
    top_p: float
    top_logprobs: Count
    tools: list[dict[str, Any]]
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any]
    text: dict[str, Any]
    reasoning: dict[str, Any]
    background: Literal[False]
    previous_response_id: None
    service_tier: str
    store: Literal[False]
    truncation: str
    user: str | None
    kv_receipt: Receipt | UnsetType = UNSET


class ResponseEvent(Struct):
    """About the whole answer."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    sequence_number: Count
    response: Response


class ItemEvent(Struct):
    type: Literal["response.output_item.added", "response.output_item.done"]
    sequence_number: Count
    output_index: Count
    item: OutputItem


class ContentEvent(Struct):
    type: Literal["response.content_part.added", "response.content_part.done"]
    sequence_number: Count
    item_id: str
    output_index: Count
    content_index: Count
    part: ContentPart


class PieceEvent(Struct):
    """A piece of text, reasoning or a call's arguments; `logprobs` are of text."""

    type: Literal[
        "response.output_text.delta",
        "response.reasoning_text.delta",
        "response.function_call_arguments.delta",
    ]
    sequence_number: Count
    item_id: str
    output_index: Count
    delta: str
    content_index: Count | UnsetType = UNSET
    logprobs: list[ChosenToken] | UnsetType = UNSET


class WholeEvent(Struct):
    """All of a text or of reasoning; `logprobs` are of text."""

    type: Literal["response.output_text.done", "response.reasoning_text.done"]
    sequence_number: Count
    item_id: str
    output_index: Count
    content_index: Count
    text: str
    logprobs: list[ChosenToken] | UnsetType = UNSET


class ArgumentsEvent(Struct):
    type: Literal["response.function_call_arguments.done"]
    sequence_number: Count
    item_id: str
    output_index: Count
    arguments: str
    name: str


# One with the member `type` in common, which JSON Schema tells apart and msgspec's own unions do not.
RESPONSE_EVENTS = (ResponseEvent, ItemEvent, ContentEvent, PieceEvent, WholeEvent, ArgumentsEvent)

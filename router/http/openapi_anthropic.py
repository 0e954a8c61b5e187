"""The answers of Anthropic's Messages API as types, for the OpenAPI document alone (see `openapi_answers`)."""

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from router.http.openapi_answers import Count, Receipt

_StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessageUsage(Struct):
    """`input_tokens` are those that were not cached."""

    input_tokens: Count
    cache_creation_input_tokens: Count
    cache_read_input_tokens: Count
    output_tokens: Count


class AnswerText(Struct, tag_field="type", tag="text"):
    text: str


class AnswerThinking(Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


class AnswerToolUse(Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


AnswerBlock = AnswerText | AnswerThinking | AnswerToolUse


class MessageBase(Struct):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnswerBlock]
    usage: MessageUsage


class AnthropicMessage(MessageBase, kw_only=True):
    stop_reason: _StopReason
    stop_sequence: str | None
    kv_receipt: Receipt | UnsetType = UNSET


class BegunMessage(MessageBase, kw_only=True):
    stop_reason: None
    stop_sequence: None


class MessageStart(Struct, tag_field="type", tag="message_start"):
    message: BegunMessage


class BlockStart(Struct, tag_field="type", tag="content_block_start"):
    index: Count
    content_block: AnswerBlock


class TextDelta(Struct, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(Struct, tag_field="type", tag="thinking_delta"):
    thinking: str


class InputDelta(Struct, tag_field="type", tag="input_json_delta"):
    partial_json: str


class BlockDelta(Struct, tag_field="type", tag="content_block_delta"):
    index: Count
    delta: TextDelta | ThinkingDelta | InputDelta


class BlockStop(Struct, tag_field="type", tag="content_block_stop"):
    index: Count


class StopFields(Struct):
    stop_reason: _StopReason
    stop_sequence: str | None


class MessageDelta(Struct, tag_field="type", tag="message_delta"):
    delta: StopFields
    usage: MessageUsage
    kv_receipt: Receipt | UnsetType = UNSET


class MessageStop(Struct, tag_field="type", tag="message_stop"):
    """The last event of a stream that went well."""


class Ping(Struct, tag_field="type", tag="ping"):
    """Sent in a long silence."""


class AnthropicErrorDetail(Struct):
    type: str
    message: str


class AnthropicError(Struct, tag_field="type", tag="error"):
    """Every failure below /v1/messages, also as the last event of a stream that went wrong."""

    error: AnthropicErrorDetail
    request_id: str | None


MessageEvent = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | Ping | AnthropicError


class TokenCount(Struct):
    input_tokens: Count

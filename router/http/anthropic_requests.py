"""The bodies of Anthropic's Messages API, as types. What is not here is refused by name, never ignored in silence.

Taken without effect: `cache_control` (prefixes are cached anyway), `metadata`, `service_tier`, a tool result's
`is_error` (its content says what is wrong), the signature of thinking.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from router.http.openai_requests import CacheSalt, Priority, TokenCount
from runtime.limits import MAX_MESSAGES, MAX_TOOLS

Id = Annotated[str, Meta(min_length=1, max_length=256)]


class CacheControl(Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    text: str
    cache_control: CacheControl | None = None
    # An answer that comes back may have an empty list of them.
    citations: Annotated[list[Any], Meta(max_length=0)] | None = None


class LoneText(Struct, frozen=True, forbid_unknown_fields=True):
    """A TextBlock where there is no other kind: a tagged type that stands alone may lack its tag, this one may not."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: Annotated[list[Any], Meta(max_length=0)] | None = None


class ThinkingBlock(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str | None = None


class ToolUseBlock(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="tool_use"):
    id: Id
    name: Id
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    # So that an answer can be sent back as a client dumps it.
    caller: None = None
    toolset_name: None = None


class ToolResultBlock(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="tool_result"):
    tool_use_id: Id
    content: str | list[LoneText] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


Block = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock


class InputMessage(Struct, frozen=True, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Meta(min_length=1, max_length=MAX_MESSAGES)]


class Tool(Struct, frozen=True, forbid_unknown_fields=True):
    """A tool of the client; the schema is checked by `router.text.tools`. Tools of the server do not exist here."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None


class AutoChoice(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="auto"):
    disable_parallel_tool_use: bool | None = None


class AnyChoice(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="any"):
    disable_parallel_tool_use: bool | None = None


class ToolChoice(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="tool"):
    name: str
    disable_parallel_tool_use: bool | None = None


class NoneChoice(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="none"):
    """No tool may be called."""


class ThinkingEnabled(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="enabled"):
    """The budget has no effect: max_tokens bounds thinking and answer together."""

    budget_tokens: TokenCount
    display: Literal["summarized", "omitted"] | None = None


class ThinkingAdaptive(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="adaptive"):
    display: Literal["summarized", "omitted"] | None = None


class ThinkingDisabled(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="disabled"):
    """The answer shows none."""


class OutputFormat(Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct, frozen=True, forbid_unknown_fields=True):
    format: OutputFormat | None = None
    effort: None = None


class Metadata(Struct, frozen=True, forbid_unknown_fields=True):
    user_id: str | None = None


class CountBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/messages/count_tokens`."""

    model: str
    messages: Annotated[list[InputMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | list[LoneText] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: AutoChoice | AnyChoice | ToolChoice | NoneChoice | None = None
    thinking: ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None


class MessagesBody(CountBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/messages`."""

    max_tokens: TokenCount
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    top_p: float | None = None
    # Without effect.
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    # Extensions of Anthropic's API.
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    kv_receipt: bool | None = None
    cache_salt: CacheSalt | None = None
    priority: Priority | None = None
    slo: Literal["interactive", "batch"] | None = None
    # Not supported.
    container: None = None
    inference_geo: None = None

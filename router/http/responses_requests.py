"""The body of OpenAI's Responses API, as types. What is not here is refused by name, never ignored in silence.

Answers are not kept, so nothing can refer to an earlier one: the client sends the conversation. Taken without effect:
`user`, `safety_identifier`, `prompt_cache_key`, `prompt_cache_retention`, `store` (false), `background` (false),
`service_tier` (auto or default), `truncation` (disabled), ids and states of items.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from router.http.openai_requests import (
    CacheSalt,
    JsonObjectFormat,
    Logprobs,
    Priority,
    TextFormat,
    TokenCount,
)
from runtime.limits import MAX_MESSAGES, MAX_TOOLS

LOGPROBS = "message.output_text.logprobs"

# The second has no effect: reasoning comes as it is.
Included = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]
Id = Annotated[str, Meta(min_length=1, max_length=256)]
ItemStatus = Literal["in_progress", "completed", "incomplete"]
Empty = Annotated[list[Any], Meta(max_length=0)]


class InputText(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="input_text"):
    text: str


class LoneInputText(Struct, frozen=True, forbid_unknown_fields=True):
    """An InputText where there is no other kind: a tagged type that stands alone may lack its tag, this one may not."""

    type: Literal["input_text"]
    text: str


class OutputText(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="output_text"):
    """A piece of an earlier answer, as it was given out."""

    text: str
    annotations: Empty | None = None
    logprobs: list[Any] | None = None


class MessageItem(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="message"):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText | OutputText]
    id: str | None = None
    status: ItemStatus | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class FunctionCallItem(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="function_call"):
    call_id: Id
    name: Id
    arguments: str
    id: str | None = None
    status: ItemStatus | None = None
    # So that an answer can be sent back as a client dumps it.
    is_async: None = field(default=None, name="async")
    caller: None = None
    namespace: None = None


class FunctionOutputItem(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="function_call_output"):
    call_id: Id
    output: str | list[LoneInputText]
    id: str | None = None
    status: ItemStatus | None = None


class ReasoningText(Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="reasoning"):
    """Reasoning of an earlier answer. Summaries and encrypted ones are of other servers."""

    id: str | None = None
    content: list[ReasoningText] | None = None
    summary: Empty | None = None
    encrypted_content: None = None
    status: ItemStatus | None = None


Item = MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem


class JsonSchemaText(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    """`strict` has no effect: the schema is always enforced."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class TextOptions(Struct, frozen=True, forbid_unknown_fields=True):
    format: TextFormat | JsonObjectFormat | JsonSchemaText | None = None
    verbosity: None = None


class ReasoningOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """A model thinks as its template has it."""

    effort: None = None
    summary: None = None
    generate_summary: None = None


class NamedTool(Struct, frozen=True, forbid_unknown_fields=True):
    """This function has to be called."""

    type: Literal["function"]
    name: str


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """Padding against eavesdroppers is not done, whatever the default elsewhere."""

    include_obfuscation: Literal[False] | None = None


class ResponsesBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/responses`. Items are made into types one by one, since a message need not say its type."""

    model: str
    input: str | Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: TokenCount | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Logprobs | None = None
    include: Annotated[list[Included], Meta(max_length=8)] | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    metadata: Annotated[dict[str, str], Meta(max_length=16)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Without effect.
    store: bool | None = None
    background: bool | None = None
    truncation: Literal["disabled"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    # Extensions of OpenAI's API.
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    kv_receipt: bool | None = None
    cache_salt: CacheSalt | None = None
    priority: Priority | None = None
    slo: Literal["interactive", "batch"] | None = None
    # Not supported.
    context_management: None = None
    conversation: None = None
    max_tool_calls: None = None
    moderation: None = None
    previous_response_id: None = None
    prompt: None = None

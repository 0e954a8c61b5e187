"""The bodies that the HTTP API takes, as types. What is not here is refused by name, never ignored in silence.

`X | None = None`: null means absent. A field of type `None` exists in OpenAI's API but not here: only null is taken.
Taken without effect, because no effect is what they ask for here: `user`, `safety_identifier`, `metadata`,
`prompt_cache_key`, `store` (false), `service_tier` (auto or default), `modalities` (text).
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from runtime.limits import (
    MAX_CACHE_SALT_CHARS,
    MAX_CHOICES,
    MAX_MESSAGES,
    MAX_PRIORITY,
    MAX_STOP_TOKENS,
    MAX_TOOLS,
    MAX_TOP_LOGPROBS,
)

Choices = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
Logprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
# Wide enough for any context; the real bound depends on the prompt and has its own error code.
TokenCount = Annotated[int, Meta(ge=1, le=2**31 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**32 - 1)]
CacheSalt = Annotated[str, Meta(min_length=1, max_length=MAX_CACHE_SALT_CHARS)]
# What they may hold is checked by `router.text.tools`, for every front door.
Tools = Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MAX_TOOLS)]
Priority = Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]


class TextPart(Struct, frozen=True, forbid_unknown_fields=True):
    """A piece of a message's text. Pieces are joined with nothing between them."""

    type: Literal["text"]
    text: str


class CalledFunction(Struct, frozen=True, forbid_unknown_fields=True):
    """`arguments` is the JSON text of an object."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    arguments: str


class ToolCall(Struct, frozen=True, forbid_unknown_fields=True):
    """A call in an earlier answer, as it was given out."""

    id: Annotated[str, Meta(min_length=1, max_length=256)]
    type: Literal["function"]
    function: CalledFunction


class Message(Struct, frozen=True, forbid_unknown_fields=True):
    """One message of a conversation. The null fields let a client send back an answer as it got it."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: Annotated[str, Meta(max_length=256)] | None = None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=MAX_TOOLS)] | None = None
    tool_call_id: Annotated[str, Meta(max_length=256)] | None = None
    # Extension of OpenAI's API.
    reasoning_content: str | None = None

    def text(self) -> str:
        """The content as one string, empty when there is none."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "".join(part.text for part in self.content)


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None


class TextFormat(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """Any text."""


class JsonObjectFormat(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_object"):
    """Any JSON object."""


class JsonSchema(Struct, frozen=True, forbid_unknown_fields=True):
    """`strict` has no effect: the schema is always enforced."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    """JSON that keeps to a schema."""

    json_schema: JsonSchema


class NamedFunction(Struct, frozen=True, forbid_unknown_fields=True):
    name: str


class NamedToolChoice(Struct, frozen=True, forbid_unknown_fields=True):
    """This function has to be called."""

    type: Literal["function"]
    function: NamedFunction


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class StructuredOutputs(Struct, frozen=True, forbid_unknown_fields=True):
    """Exactly one of these: vLLM's names."""

    json: dict[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    grammar: str | None = None


class GenerationBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What both generation endpoints take. Ranges of floats are checked later, by `runtime.limits`."""

    model: str
    max_tokens: TokenCount | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: Choices | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None
    # Extensions of OpenAI's API.
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKENS)] | None = None
    structured_outputs: StructuredOutputs | None = None
    kv_receipt: bool | None = None
    prompt_logprobs: Logprobs | None = None
    cache_salt: CacheSalt | None = None
    priority: Priority | None = None
    slo: Literal["interactive", "batch"] | None = None


class ChatBody(GenerationBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    response_format: ResponseFormat | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    # Without effect.
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    modalities: Annotated[list[Literal["text"]], Meta(min_length=1, max_length=1)] | None = None
    safety_identifier: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: bool | None = None
    # Not supported.
    audio: None = None
    chat_template_kwargs: None = None
    function_call: None = None
    functions: None = None
    prediction: None = None
    reasoning_effort: None = None
    verbosity: None = None
    web_search_options: None = None


class CompletionBody(GenerationBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/completions`. The prompt is a string, strings, token ids, or lists of token ids."""

    prompt: str | list[int | str | list[int]]
    # 0 with `echo`: the prompt alone.
    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    echo: bool | None = None
    best_of: Choices | None = None
    logprobs: Logprobs | None = None
    suffix: None = None


class TokenizeBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /tokenize`: exactly one of `prompt` and `messages`, with which there may be `tools`."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    tools: Tools | None = None

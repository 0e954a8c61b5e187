"""From the arguments of the Python client to gRPC requests. Ranges are the router's business."""

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, TypedDict

from kvferry.client.types import Ebnf, JsonObject, JsonSchema, Message, Regex, ResponseFormat, Tool
from kvferry_rpc import public_pb2
from kvferry_rpc.common_pb2 import Grammar, LogitBias, SamplingParams
from kvferry_rpc.public_pb2 import ChatMessage, ChatPrompt, GenerateRequest, TokenIds, TokenizeRequest, ToolChoice
from runtime.errors import KvferryError, invalid

AnyMessage = Message | tuple[str, str]
"""Or a pair of role and content."""
_MODES: Final = {"auto": ToolChoice.AUTO, "none": ToolChoice.NONE, "required": ToolChoice.REQUIRED}
_SAMPLING: Final = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "ignore_eos",
    "seed",
)


class GenerationOptions(TypedDict, total=False):
    """How to answer; docs/api.md has bounds and defaults. None is the same as absent.

    `model`: default the first one served. `logprobs` and `prompt_logprobs`: how many alternatives each token has.
    `timeout_s`: of the whole call, retries included; default the client's.
    """

    model: str | None
    max_tokens: int | None
    min_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    logit_bias: Mapping[int, float] | None
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    logprobs: int | None
    prompt_logprobs: int | None
    response_format: ResponseFormat | None
    cache_salt: str | None
    priority: int | None
    slo: Literal["interactive", "batch"] | None
    with_receipt: bool | None
    timeout_s: float | None


class ChatOptions(GenerationOptions, total=False):
    """For conversations also tools. A `tool_choice` that is one of the tools has to be called."""

    tools: Sequence[Tool] | None
    tool_choice: Literal["auto", "none", "required"] | Tool | None
    parallel_tool_calls: bool | None


def chat_request(
    model: str,
    messages: Sequence[AnyMessage],
    sampling: SamplingParams | None = None,
    *,
    with_receipt: bool = True,
) -> GenerateRequest:
    """A request for an answer to a conversation."""
    return GenerateRequest(
        model=model, chat=_chat(messages), sampling=sampling or SamplingParams(), with_receipt=with_receipt
    )


def text_request(
    model: str, text: str, sampling: SamplingParams | None = None, *, with_receipt: bool = True
) -> GenerateRequest:
    """A request to continue `text`."""
    return GenerateRequest(model=model, text=text, sampling=sampling or SamplingParams(), with_receipt=with_receipt)


def request_for_chat(model: str, messages: Sequence[AnyMessage], n: int, options: ChatOptions) -> GenerateRequest:
    """Raises KvferryError (INVALID_REQUEST) for what protobuf cannot hold, naming the option."""
    chat, tools = _chat(messages), _tools(options.get("tools"))
    request: GenerateRequest = _held("model", lambda: GenerateRequest(model=model, chat=chat, tools=tools))
    choice = options.get("tool_choice")
    if isinstance(choice, Tool):
        request.tool_choice.function = choice.name
    elif choice is not None:
        if choice not in _MODES:
            raise invalid("tool_choice", f"must be a tool or one of {tuple(_MODES)}, not {choice!r}")
        request.tool_choice.mode = _MODES[choice]
    _set(request, "parallel_tool_calls", options.get("parallel_tool_calls"))
    return _filled(request, n, options)


def request_for_text(model: str, prompt: str | Sequence[int], n: int, options: GenerationOptions) -> GenerateRequest:
    """The same for a text, or token ids, to be continued."""
    request: GenerateRequest = _held("model", lambda: GenerateRequest(model=model))
    if isinstance(prompt, str):
        _set(request, "text", prompt)
    else:
        request.tokens.CopyFrom(_held("prompt", lambda: TokenIds(ids=prompt)))
    return _filled(request, n, options)


def request_to_tokenize(
    model: str, prompt: str | Sequence[AnyMessage], tools: Sequence[Tool] | None
) -> TokenizeRequest:
    """The same for a text or a conversation to be tokenised."""
    chat = None if isinstance(prompt, str) else _chat(prompt)
    request: TokenizeRequest = _held("model", lambda: TokenizeRequest(model=model, chat=chat, tools=_tools(tools)))
    if isinstance(prompt, str):
        _set(request, "text", prompt, "prompt")
    return request


def _filled(request: GenerateRequest, n: int, options: GenerationOptions) -> GenerateRequest:
    sampling = request.sampling
    values: Mapping[str, Any] = options
    for name in _SAMPLING:
        _set(sampling, name, values.get(name))
    _set(sampling, "num_logprobs", options.get("logprobs"), "logprobs")
    _set(sampling, "prompt_logprobs", options.get("prompt_logprobs"))
    sampling.stop_token_ids.extend(_held("stop_token_ids", lambda: list(options.get("stop_token_ids") or ())))
    bias = options.get("logit_bias") or {}
    sampling.logit_bias.extend(
        _held("logit_bias", lambda: [LogitBias(token_id=token_id, bias=value) for token_id, value in bias.items()])
    )
    if (answer_format := options.get("response_format")) is not None:
        sampling.grammar.CopyFrom(_held("response_format", lambda: _grammar(answer_format)))
    request.has_seed = options.get("seed") is not None
    stop = options.get("stop") or ()
    _held("stop", lambda: request.stop.extend((stop,) if isinstance(stop, str) else stop))
    for name in ("cache_salt", "priority", "slo", "with_receipt"):
        _set(request, name, values.get(name))
    _set(request, "n", n)
    return request


def _set(message: SamplingParams | GenerateRequest | TokenizeRequest, field: str, value: Any, option: str = "") -> None:
    if value is not None:
        _held(option or field, lambda: setattr(message, field, value))


def _held(option: str, make: Any) -> Any:
    """What `make` gives; it builds a part of a message, which may be out of what protobuf can hold."""
    try:
        return make()
    except (TypeError, ValueError) as error:
        raise invalid(option, f"is not valid: {error}") from None


def _chat(messages: Sequence[AnyMessage]) -> ChatPrompt:
    return ChatPrompt(messages=[_message(index, message) for index, message in enumerate(messages)])


def _message(index: int, message: AnyMessage) -> ChatMessage:
    if isinstance(message, tuple):
        role, content = message
        message = Message(role, content)
    plain = message

    def make() -> ChatMessage:
        return ChatMessage(
            role=plain.role,
            content=plain.content,
            tool_calls=[
                public_pb2.ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in plain.tool_calls
            ],
            tool_call_id=plain.tool_call_id,
            name=plain.name,
            reasoning_content=plain.reasoning,
        )

    made: ChatMessage = _held(f"messages[{index}]", make)
    return made


def _tools(tools: Sequence[Tool] | None) -> list[public_pb2.Tool]:
    return [_held(f"tools[{index}]", functools.partial(_tool, index, tool)) for index, tool in enumerate(tools or ())]


def _tool(index: int, tool: Tool) -> public_pb2.Tool:
    parameters = "" if tool.parameters is None else _json(f"tools[{index}].parameters", tool.parameters)
    return public_pb2.Tool(name=tool.name, description=tool.description, parameters_json=parameters, strict=tool.strict)


def _grammar(asked: ResponseFormat) -> Grammar:
    field = "response_format"
    match asked:
        case JsonObject():
            return Grammar(kind=Grammar.JSON_OBJECT, field=field)
        case JsonSchema(schema):
            return Grammar(kind=Grammar.JSON_SCHEMA, text=_json(field, schema), field=field)
        case Regex(pattern):
            return Grammar(kind=Grammar.REGEX, text=pattern, field=field)
        case Ebnf(grammar):
            return Grammar(kind=Grammar.EBNF, text=grammar, field=field)


def _json(field: str, value: Any) -> str:
    """Raises KvferryError for what JSON cannot hold."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        failure: KvferryError = invalid(field, f"is not JSON: {error}")
        raise failure from None

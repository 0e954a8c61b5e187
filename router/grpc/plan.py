"""From a gRPC request to what is to be generated: the checks that HTTP has, and errors that name protobuf's fields."""

import re
from collections.abc import Sequence
from typing import Any, Final

from kvferry_rpc.common_pb2 import Grammar, SamplingParams
from kvferry_rpc.public_pb2 import ChatMessage, ChatPrompt, GenerateRequest, Tool, ToolChoice
from router.admission.slo import SLO_NAMES
from router.http.field_names import FieldNames
from router.http.json_body import convert
from router.http.openai_requests import Message
from router.plans.chat_plan import answer_grammar, check_messages
from router.plans.generation_plan import Conversation, GenerationPlan, ModelLimits, Prompt, check_model
from router.text.tools import ToolMode, ToolUse, chat_syntax, tool_use
from runtime.errors import invalid
from runtime.grammar_limits import grammar_field, parse_schema
from runtime.limits import (
    MAX_CACHE_SALT_CHARS,
    MAX_CHOICES,
    MAX_MESSAGES,
    MAX_PRIORITY,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_TOOL_BYTES,
    MAX_TOOLS,
    check_sampling,
    check_token_ids,
)

FIELDS: Final = FieldNames(
    beginnings=(
        (re.compile(r"messages\[(\d+)\]\.tool_calls\[(\d+)\]\.function"), r"chat.messages[\1].tool_calls[\2]"),
        (re.compile(r"messages\["), "chat.messages["),
        (re.compile(r"messages$"), "chat"),
        (re.compile(r"tools\[(\d+)\]\.function\.parameters"), r"tools[\1].parameters_json"),
        (re.compile(r"tools\[(\d+)\]\.function"), r"tools[\1]"),
    )
)
"""From the names of a chat body, which the shared checks know."""
_MODES: Final = {ToolChoice.AUTO: ToolMode.AUTO, ToolChoice.NONE: ToolMode.NONE, ToolChoice.REQUIRED: ToolMode.REQUIRED}


def plan_generation(request: GenerateRequest, limits: ModelLimits) -> GenerationPlan:
    """Raises KvferryError naming the field at fault; `FIELDS` has this API's names for some."""
    check_model(request.model, limits)
    prompt = _generate_prompt(request, limits)
    use = _tool_use(request)
    grammar = answer_grammar(_asked_grammar(request), grammar_field(request.sampling.grammar), use)
    asked_tokens = request.sampling.max_tokens or None
    sampling = SamplingParams()
    sampling.CopyFrom(request.sampling)
    sampling.max_tokens = min(asked_tokens or limits.max_context_tokens, limits.max_context_tokens)
    if request.prompt_only:
        # A worker always samples a token; nobody sees that one.
        asked_tokens = sampling.max_tokens = 1
    if grammar is not None:
        sampling.grammar.CopyFrom(grammar)
    check_sampling(sampling, vocab_size=limits.vocab_size, max_context_tokens=limits.max_context_tokens)
    is_chat = isinstance(prompt, Conversation)
    return GenerationPlan(
        prompts=(Conversation(prompt.messages, use.tools) if isinstance(prompt, Conversation) else prompt,),
        prompt_field=request.WhichOneof("prompt") or "prompt",
        num_choices=_num_choices(request),
        sampling=sampling,
        max_tokens=asked_tokens,
        max_tokens_field="max_tokens",
        seed=sampling.seed if request.has_seed or sampling.seed else None,
        stop=_stop_strings(request.stop),
        stream=True,
        include_usage=True,
        want_receipt=request.with_receipt,
        cache_salt=_cache_salt(request),
        priority=_priority(request),
        slo=_slo(request),
        chat=chat_syntax(use, limits.chat, has_grammar=grammar is not None) if is_chat else None,
        prompt_only=request.prompt_only,
    )


def conversation(chat: ChatPrompt, tools: Sequence[Tool]) -> Conversation:
    """A conversation to be tokenised. Raises KvferryError naming the field at fault."""
    return Conversation(_messages(chat), tool_use(_plain_tools(tools), None, None, parallel=True).tools)


def _generate_prompt(request: GenerateRequest, limits: ModelLimits) -> Prompt:
    """The prompt, without tools."""
    field = request.WhichOneof("prompt")
    if field == "chat":
        return Conversation(_messages(request.chat))
    if request.tools:
        raise invalid("tools", "needs chat")
    if field == "text":
        return request.text
    if field == "tokens":
        token_ids = list(request.tokens.ids)
        check_token_ids("tokens", token_ids, vocab_size=limits.vocab_size, max_tokens=len(token_ids))
        return tuple(token_ids)
    raise invalid("prompt", "must be set")


def _messages(chat: ChatPrompt) -> tuple[Message, ...]:
    if not 1 <= len(chat.messages) <= MAX_MESSAGES:
        raise invalid("chat", f"must have 1 to {MAX_MESSAGES} messages, not {len(chat.messages)}")
    messages = tuple(_message(index, message) for index, message in enumerate(chat.messages))
    check_messages(messages)
    return messages


def _message(index: int, message: ChatMessage) -> Message:
    """The same in the type of the shared checks, where empty is what protobuf means by absent. The types of both agree,
    so only bounds are left to refuse."""
    plain: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        plain["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        plain["tool_call_id"] = message.tool_call_id
    if message.name:
        plain["name"] = message.name
    if message.HasField("reasoning_content"):
        plain["reasoning_content"] = message.reasoning_content
    checked: Message = convert(f"messages[{index}]", plain, Message)
    return checked


def _tool_use(request: GenerateRequest) -> ToolUse:
    chosen = request.tool_choice.WhichOneof("choice")
    mode = only = None
    if chosen == "function":
        only = request.tool_choice.function
    elif chosen == "mode":
        mode = _MODES.get(request.tool_choice.mode)
        if mode is None:
            raise invalid("tool_choice", f"has the mode {request.tool_choice.mode}, which this server does not know")
    parallel = request.parallel_tool_calls if request.HasField("parallel_tool_calls") else True
    return tool_use(_plain_tools(request.tools), mode, only, parallel=parallel)


def _plain_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Tools in OpenAI's shape, whose order of keys is that of its own examples: templates show them as they are."""
    if len(tools) > MAX_TOOLS:
        raise invalid("tools", f"has {len(tools)} entries, more than the limit of {MAX_TOOLS}")
    # Before parsing, which takes time.
    if sum(len(tool.parameters_json) for tool in tools) > MAX_TOOL_BYTES:
        raise invalid("tools", f"are longer than {MAX_TOOL_BYTES} bytes together")
    plain: list[dict[str, Any]] = []
    for index, tool in enumerate(tools):
        function: dict[str, Any] = {"name": tool.name}
        if tool.HasField("description"):
            function["description"] = tool.description
        if tool.parameters_json:
            function["parameters"] = parse_schema(f"tools[{index}].parameters_json", tool.parameters_json)
        if tool.HasField("strict"):
            function["strict"] = tool.strict
        plain.append({"type": "function", "function": function})
    return plain


def _asked_grammar(request: GenerateRequest) -> Grammar | None:
    return request.sampling.grammar if request.sampling.HasField("grammar") else None


def _num_choices(request: GenerateRequest) -> int:
    if request.n > MAX_CHOICES:
        raise invalid("n", f"must be at most {MAX_CHOICES}, not {request.n}")
    return request.n or 1


def _stop_strings(stop: Sequence[str]) -> tuple[str, ...]:
    if len(stop) > MAX_STOP_STRINGS:
        raise invalid("stop", f"has {len(stop)} strings, more than the limit of {MAX_STOP_STRINGS}")
    if any(not 1 <= len(text) <= MAX_STOP_CHARS for text in stop):
        raise invalid("stop", f"has a string that is empty or longer than {MAX_STOP_CHARS} characters")
    return tuple(stop)


def _cache_salt(request: GenerateRequest) -> str:
    if len(request.cache_salt) > MAX_CACHE_SALT_CHARS:
        raise invalid("cache_salt", f"is longer than {MAX_CACHE_SALT_CHARS} characters")
    return request.cache_salt


def _priority(request: GenerateRequest) -> int:
    if abs(request.priority) > MAX_PRIORITY:
        raise invalid("priority", f"must be in [-{MAX_PRIORITY}, {MAX_PRIORITY}], not {request.priority}")
    return request.priority


def _slo(request: GenerateRequest) -> str:
    if request.slo and request.slo not in SLO_NAMES:
        raise invalid("slo", f"is {request.slo[:40]!r}, which is none of {SLO_NAMES}")
    return request.slo

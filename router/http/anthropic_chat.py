"""From a body of Anthropic's Messages API to the chat that it means.

A message of blocks may become several of a chat: the results of tools are messages of their own there.
"""

import re
from collections.abc import Sequence
from typing import Any, Final

from router.http.anthropic_requests import (
    AnyChoice,
    Block,
    CountBody,
    InputMessage,
    LoneText,
    MessagesBody,
    NoneChoice,
    TextBlock,
    ThinkingBlock,
    ThinkingDisabled,
    Tool,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
)
from router.http.field_names import FieldNames
from router.http.openai_requests import (
    CalledFunction,
    ChatBody,
    JsonSchema,
    JsonSchemaFormat,
    Message,
    NamedFunction,
    NamedToolChoice,
    ToolCall,
)
from router.text.tools import json_text
from runtime.errors import invalid
from runtime.limits import MAX_MESSAGES

_BEGINNINGS: Final = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"tools\[(\d+)\]\.function\.parameters", r"tools[\1].input_schema"),
        (r"tools\[(\d+)\]\.function", r"tools[\1]"),
        (r"stop$", "stop_sequences"),
        (r"response_format\.json_schema\.schema", "output_config.format.schema"),
        (r"response_format$", "output_config.format"),
        (r"parallel_tool_calls$", "tool_choice.disable_parallel_tool_use"),
    )
)


def chat_of(body: CountBody) -> tuple[ChatBody, FieldNames]:
    """The chat, and where its fields come from. Raises KvferryError (INVALID_REQUEST) naming a field of `body`."""
    conversation = _Conversation()
    if system := _text(body.system or ""):
        conversation.add(Message("system", system), "system")
    for index, message in enumerate(body.messages):
        conversation.add_message(f"messages[{index}]", message)
    last = len(body.messages) - 1
    if body.messages[last].role == "assistant":
        raise invalid(f"messages[{last}].role", "must not be assistant: an answer is never the rest of another")
    if len(conversation.messages) > MAX_MESSAGES:
        raise invalid("messages", f"have more than {MAX_MESSAGES} messages and results of tools")
    choice = body.tool_choice
    parallel = choice is None or isinstance(choice, NoneChoice) or not choice.disable_parallel_tool_use
    chat = ChatBody(
        model=body.model,
        messages=conversation.messages,
        tools=[_tool(tool) for tool in body.tools or ()] or None,
        tool_choice=_tool_choice(body),
        parallel_tool_calls=parallel,
        response_format=_format(body),
        **_generation_fields(body),
    )
    return chat, FieldNames(tuple(conversation.origins), _BEGINNINGS)


def hides_thinking(body: MessagesBody, *, has_reasoning: bool) -> bool:
    """Whether the answer leaves its thinking out; `has_reasoning`: it can have some.

    Raises KvferryError (INVALID_REQUEST) when it is asked for and the model has none that can be told apart.
    """
    thinking = body.thinking
    if thinking is None or isinstance(thinking, ThinkingDisabled):
        return thinking is not None
    if not has_reasoning:
        raise invalid("thinking", "cannot be had: none is told apart in the answers of this model")
    return thinking.display == "omitted"


class _Conversation:
    """Messages of a chat, and which part of the body each comes from."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.origins: list[str] = []

    def add(self, message: Message, origin: str) -> None:
        self.messages.append(message)
        self.origins.append(origin)

    def add_message(self, field: str, message: InputMessage) -> None:
        """One message of the body. Raises KvferryError for a block that its role cannot have."""
        if isinstance(message.content, str):
            self.add(Message(message.role, message.content), field)
        elif message.role == "assistant":
            self.add(_assistant_message(field, message.content), field)
        else:
            self._add_blocks(field, message)

    def _add_blocks(self, field: str, message: InputMessage) -> None:
        texts: list[TextBlock] = []
        for index, block in enumerate(message.content):
            place = f"{field}.content[{index}]"
            if isinstance(block, TextBlock):
                texts.append(block)
            elif isinstance(block, ToolResultBlock) and message.role == "user":
                if texts:
                    self.add(Message(message.role, _text(texts)), field)
                    texts = []
                self.add(Message("tool", _text(block.content or ""), tool_call_id=block.tool_use_id), place)
            else:
                raise invalid(f"{place}.type", f"is of no use in a message of the role {message.role}")
        if texts:
            self.add(Message(message.role, _text(texts)), field)


def _assistant_message(field: str, blocks: Sequence[Block]) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for index, block in enumerate(blocks):
        match block:
            case TextBlock(text):
                texts.append(text)
            case ThinkingBlock(thinking):
                thoughts.append(thinking)
            case ToolUseBlock(call_id, name, arguments):
                text = json_text(f"{field}.content[{index}].input", arguments)
                calls.append(ToolCall(call_id, "function", CalledFunction(name, text)))
            case ToolResultBlock():
                raise invalid(f"{field}.content[{index}].type", "is of no use in a message of the role assistant")
    return Message(
        "assistant",
        "".join(texts),
        tool_calls=calls or None,
        reasoning_content="".join(thoughts) if thoughts else None,
    )


def _text(content: str | Sequence[TextBlock | LoneText]) -> str:
    """Blocks are joined with nothing between them, as parts of a chat message are."""
    return content if isinstance(content, str) else "".join(block.text for block in content)


def _tool(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _tool_choice(body: CountBody) -> Any:
    match body.tool_choice:
        case None:
            return None
        case NoneChoice():
            return "none"
        case AnyChoice():
            return "required"
        case ToolChoice(name):
            return NamedToolChoice("function", NamedFunction(name))
        case _:
            return "auto"


def _format(body: CountBody) -> JsonSchemaFormat | None:
    asked = body.output_config.format if body.output_config is not None else None
    return None if asked is None else JsonSchemaFormat(JsonSchema("answer", asked.schema))


def _generation_fields(body: CountBody) -> dict[str, Any]:
    if not isinstance(body, MessagesBody):
        return {}
    same = ("max_tokens", "stream", "temperature", "top_k", "top_p", "seed", "kv_receipt", "cache_salt", "priority")
    return {**{name: getattr(body, name) for name in same}, "slo": body.slo, "stop": body.stop_sequences}

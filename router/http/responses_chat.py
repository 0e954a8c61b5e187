"""From a body of OpenAI's Responses API to the chat that it means.

Items of an answer that follow each other (reasoning, a text, calls) are one message of a chat, as the model wrote them.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from router.http.field_names import FieldNames
from router.http.json_body import convert
from router.http.openai_requests import (
    CalledFunction,
    ChatBody,
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    Message,
    NamedFunction,
    NamedToolChoice,
    ResponseFormat,
    ToolCall,
)
from router.http.responses_requests import (
    LOGPROBS,
    FunctionCallItem,
    FunctionOutputItem,
    InputText,
    Item,
    JsonSchemaText,
    LoneInputText,
    MessageItem,
    NamedTool,
    OutputText,
    ReasoningItem,
    ResponsesBody,
)
from runtime.errors import invalid

_BEGINNINGS: Final = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"tools\[(\d+)\]\.function", r"tools[\1]"),
        (r"max_tokens$", "max_output_tokens"),
        (r"messages$", "input"),
        (r"response_format\.json_schema", "text.format"),
        (r"response_format$", "text.format"),
    )
)


def chat_of(body: ResponsesBody) -> tuple[ChatBody, FieldNames]:
    """The chat, and where its fields come from. Raises KvferryError (INVALID_REQUEST) naming a field of `body`."""
    _check(body)
    conversation = _Conversation()
    if body.instructions:
        conversation.add(Message("system", body.instructions), "instructions")
    if isinstance(body.input, str):
        conversation.add(Message("user", body.input), "input")
    else:
        for index, value in enumerate(body.input):
            conversation.add_item(f"input[{index}]", value)
    conversation.flush()
    logprobs = LOGPROBS in (body.include or ())
    chat = ChatBody(
        model=body.model,
        messages=conversation.messages,
        max_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        seed=body.seed,
        stream=body.stream,
        logprobs=logprobs,
        top_logprobs=body.top_logprobs if logprobs else None,
        tools=[_tool(tool) for tool in body.tools or ()] or None,
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_format(body),
        kv_receipt=body.kv_receipt,
        cache_salt=body.cache_salt,
        priority=body.priority,
        slo=body.slo,
    )
    return chat, FieldNames(tuple(conversation.origins), _BEGINNINGS)


def _check(body: ResponsesBody) -> None:
    if body.store:
        raise invalid("store", "must be false: answers are not kept")
    if body.background:
        raise invalid("background", "must be false: answers are not kept")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "needs stream to be true")
    if body.top_logprobs and LOGPROBS not in (body.include or ()):
        raise invalid("top_logprobs", f"needs include to have {LOGPROBS}")


@dataclass(slots=True)
class _Turn:
    """What the assistant did until somebody else's turn came; `origin` is where it begins in the input."""

    origin: str
    thoughts: list[str] = field(default_factory=list)
    text: str | None = None
    calls: list[ToolCall] = field(default_factory=list)

    def message(self) -> Message:
        return Message(
            "assistant",
            self.text or "",
            tool_calls=self.calls or None,
            reasoning_content="".join(self.thoughts) or None,
        )


class _Conversation:
    """Messages of a chat, and which part of the body each comes from."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.origins: list[str] = []
        self._turn: _Turn | None = None

    def add(self, message: Message, origin: str) -> None:
        self.messages.append(message)
        self.origins.append(origin)

    def add_item(self, place: str, value: dict[str, Any]) -> None:
        """The next item of the input. Raises KvferryError (INVALID_REQUEST) naming the field that is wrong."""
        item: Item = convert(place, value if "type" in value else {"type": "message", **value}, Item)
        match item:
            case ReasoningItem(content=content):
                self._turn_at(place, goes_on=False).thoughts += [piece.text for piece in content or ()]
            case MessageItem(role="assistant", content=content):
                self._turn_at(place, goes_on=False).text = _text(content)
            case FunctionCallItem(call_id, name, arguments):
                call = ToolCall(call_id, "function", CalledFunction(name, arguments))
                self._turn_at(place, goes_on=True).calls.append(call)
            case MessageItem(role=role, content=content):
                self.flush()
                self.add(Message(role, _text(content)), place)
            case FunctionOutputItem(call_id, output):
                self.flush()
                self.add(Message("tool", _text(output), tool_call_id=call_id), place)

    def flush(self) -> None:
        """End the assistant's turn, if there is one."""
        if self._turn is not None:
            self.add(self._turn.message(), self._turn.origin)
        self._turn = None

    def _turn_at(self, place: str, *, goes_on: bool) -> _Turn:
        """The turn that an item of the assistant belongs to. Unless it `goes_on`, a text or calls end the one before:
        within a message reasoning comes before text, and text before calls."""
        if self._turn is not None and not goes_on and (self._turn.text is not None or self._turn.calls):
            self.flush()
        if self._turn is None:
            self._turn = _Turn(place)
        return self._turn


def _text(content: str | Sequence[InputText | LoneInputText | OutputText]) -> str:
    """Pieces are joined with nothing between them, as parts of a chat message are."""
    return content if isinstance(content, str) else "".join(piece.text for piece in content)


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """The function beside its type, as here, or within it, as in a chat: what is wrong with it is found there."""
    return {"type": tool.get("type"), "function": {name: value for name, value in tool.items() if name != "type"}}


def _tool_choice(choice: Any) -> Any:
    return NamedToolChoice("function", NamedFunction(choice.name)) if isinstance(choice, NamedTool) else choice


def _format(body: ResponsesBody) -> ResponseFormat | None:
    asked = body.text.format if body.text is not None else None
    if isinstance(asked, JsonSchemaText):
        return JsonSchemaFormat(JsonSchema(asked.name, asked.schema, asked.description, asked.strict))
    return JsonObjectFormat() if isinstance(asked, JsonObjectFormat) else None

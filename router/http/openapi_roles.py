"""Messages and items, whose fields depend on who speaks: for the OpenAPI document.

What is checked where bodies become chats, `chat_plan.check_messages` first of all, is said here once more as schemas; a
test holds the two together. No schema can say that a result has to name a call before it.
"""

from collections.abc import Sequence
from typing import Any, Final

from router.http.openapi_bounds import FUNCTION_NAME, NULL, PARAMETERS, Schema, list_of
from runtime.limits import MAX_MESSAGES

_REF: Final = "#/components/schemas/"
_ITEMS: Final = ("MessageItem", "FunctionCallItem", "FunctionOutputItem", "ReasoningItem")


def refined(components: Schema) -> Schema:
    """The components that differ from what their types say."""
    return {
        "Message": _chat_message(components["Message"]),
        "InputMessage": _anthropic_message(components["InputMessage"]),
        "Tool": _with(components["Tool"], name=FUNCTION_NAME, input_schema=PARAMETERS),
        "MessageItem": _of_any_type(components["MessageItem"]),
        "InputItem": _any_of(_ITEMS),
    }


def _chat_message(message: Schema) -> Schema:
    of_assistants, of_tools = ("tool_calls", "reasoning_content"), ("tool_call_id", "name")
    of_assistant = _variant(message, ["assistant"], lacks=of_tools)
    return {
        "anyOf": [
            _variant(message, ["system", "developer", "user"], needs=["content"], lacks=(*of_assistants, *of_tools)),
            # It says something, or calls.
            _needing(of_assistant, ["content"]),
            _needing(of_assistant, ["tool_calls"]),
            _variant(message, ["tool"], needs=["content", "tool_call_id"], lacks=of_assistants),
        ]
    }


def _anthropic_message(message: Schema) -> Schema:
    blocks = {
        "user": ("TextBlock", "ToolResultBlock"),
        "assistant": ("TextBlock", "ThinkingBlock", "ToolUseBlock"),
        "system": ("TextBlock",),
    }
    return {
        "anyOf": [
            _with(message, role={"enum": [role]}, content=_text_or(list_of(_any_of(names), MAX_MESSAGES, 1)))
            for role, names in blocks.items()
        ]
    }


def _of_any_type(item: Schema) -> Schema:
    """A message need not say that it is one."""
    return {**item, "required": [name for name in item["required"] if name != "type"]}


def _variant(message: Schema, roles: Sequence[str], *, needs: Sequence[str] = (), lacks: Sequence[str] = ()) -> Schema:
    absent = dict.fromkeys(lacks, NULL)
    return _needing(_with(message, role={"enum": list(roles)}, **absent), needs)


def _needing(schema: Schema, names: Sequence[str]) -> Schema:
    """With these fields, and none of them null or an empty list."""
    fields: dict[str, Any] = {}
    for name in names:
        branches = [branch for branch in schema["properties"][name]["anyOf"] if branch != NULL]
        fields[name] = {"anyOf": branches}
        if name == "tool_calls":
            fields[name] = {"anyOf": [branch | {"minItems": 1} for branch in branches]}
    return {**_with(schema, **fields), "required": [*schema["required"], *names]}


def _with(schema: Schema, **fields: Schema) -> Schema:
    return {**schema, "properties": {**schema["properties"], **fields}}


def _text_or(other: Schema) -> Schema:
    return {"anyOf": [{"type": "string"}, other]}


def _any_of(names: Sequence[str]) -> Schema:
    return {"anyOf": [{"$ref": _REF + name} for name in names]}

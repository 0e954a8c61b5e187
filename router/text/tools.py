"""Tools of a chat request: checked, chosen, and made into a grammar where a call is forced. For every front door.

Tools come as parsed JSON in OpenAI's shape and are rendered by the chat template as they are, so that the prompt is
that of transformers. Their schemas are enforced only where a call is forced; else they are words for the model.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from kvferry_rpc.common_pb2 import Grammar
from router.text.chat_format import ChatFormat
from router.text.chat_reader import ChatSyntax
from runtime.errors import invalid
from runtime.grammar_limits import parse_schema, schema_text
from runtime.json_schema import check_schema, rebased
from runtime.limits import MAX_TOOL_BYTES, MAX_TOOLS

MAX_FORCED_CALLS: Final = 16
_NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_FUNCTION_KEYS: Final = frozenset(["name", "description", "parameters", "strict"])
_NO_PARAMETERS: Final[Mapping[str, Any]] = {"type": "object", "properties": {}, "additionalProperties": False}


class ToolMode(Enum):
    """Whether the model may, or has to, call a tool."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request says of tools, checked.

    `tools` are for the chat template; empty where the model must not know of any. `names` are those that may be
    called, `only` the one that has to be.
    """

    mode: ToolMode = ToolMode.NONE
    tools: tuple[dict[str, Any], ...] = ()
    parallel: bool = True
    only: str | None = None

    @property
    def names(self) -> frozenset[str]:
        """Of the functions that may be called."""
        if self.only is not None:
            return frozenset([self.only])
        return frozenset(tool["function"]["name"] for tool in self.tools)


def tool_use(tools: Sequence[Any], mode: ToolMode | None, only: str | None, *, parallel: bool) -> ToolUse:
    """What the fields `tools`, `tool_choice` and `parallel_tool_calls` mean together.

    `mode` is None when the client left it out; `only` names the function of a choice that is one. Raises KvferryError
    (INVALID_REQUEST) naming the field.
    """
    checked = _checked_tools(tools)
    if not checked:
        if only is not None or mode not in (None, ToolMode.NONE):
            raise invalid("tool_choice", "needs tools to choose from")
        return ToolUse()
    if mode is ToolMode.NONE:
        return ToolUse()
    if only is not None:
        if all(tool["function"]["name"] != only for tool in checked):
            raise invalid("tool_choice", f"names the function {only[:80]!r}, which is not among the tools")
        return ToolUse(ToolMode.REQUIRED, checked, parallel=False, only=only)
    return ToolUse(mode or ToolMode.AUTO, checked, parallel=parallel)


def chat_syntax(use: ToolUse, chat_format: ChatFormat, *, has_grammar: bool) -> ChatSyntax:
    """What to look for in the answers. A grammar leaves no room for reasoning.

    Raises KvferryError (INVALID_REQUEST) when it is not known how this model calls tools.
    """
    forced = use.mode is ToolMode.REQUIRED
    if use.tools and chat_format.tools is None:
        raise invalid("tools", "cannot be used: how this model calls tools is not known here (--tool-parser)")
    return ChatSyntax(
        tools=chat_format.tools if use.tools else None,
        names=use.names,
        forced=forced,
        # Of a forced call the grammar counts.
        single=not use.parallel and not forced,
        reasoning=chat_format.reasoning and not (forced or has_grammar),
    )


def forced_grammar(use: ToolUse) -> Grammar | None:
    """The grammar of an answer that has to be calls: a JSON array of `{"name", "arguments"}`; None if it need not be.

    An array whatever the model's own format is, because the markers of formats may be special tokens, which no grammar
    can generate. Raises KvferryError (INVALID_REQUEST) naming the tool whose schema cannot be enforced.
    """
    if use.mode is not ToolMode.REQUIRED:
        return None
    calls: list[dict[str, Any]] = []
    chosen = [(index, tool["function"]) for index, tool in enumerate(use.tools)]
    chosen = [entry for entry in chosen if use.only in (None, entry[1]["name"])]
    for index, function in chosen:
        parameters = function.get("parameters", _NO_PARAMETERS)
        check_schema(f"tools[{index}].function.parameters", parameters)
        place = f"#/items/anyOf/{len(calls)}/properties/arguments"
        properties = {"name": {"const": function["name"]}, "arguments": rebased(parameters, place)}
        calls.append(
            {
                "type": "object",
                "properties": properties,
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    most = MAX_FORCED_CALLS if use.parallel else 1
    schema = {"type": "array", "items": {"anyOf": calls}, "minItems": 1, "maxItems": most}
    return Grammar(kind=Grammar.JSON_SCHEMA, text=schema_text("tools", schema), field="tools")


def call_for_template(field: str, call: Mapping[str, Any]) -> dict[str, Any]:
    """A call of an earlier answer as chat templates expect it: its arguments as an object, not as JSON text.

    Raises KvferryError (INVALID_REQUEST) naming the place below `field`.
    """
    function = call["function"]
    text = function["arguments"]
    # Some clients send back nothing where there was nothing.
    arguments = parse_schema(f"{field}.function.arguments", text) if text.strip() else {}
    if not isinstance(arguments, dict):
        raise invalid(f"{field}.function.arguments", "must be the JSON text of an object")
    return {
        "id": call["id"],
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _checked_tools(tools: Sequence[Any]) -> tuple[dict[str, Any], ...]:
    if len(tools) > MAX_TOOLS:
        raise invalid("tools", f"has {len(tools)} entries, more than the limit of {MAX_TOOLS}")
    checked: list[dict[str, Any]] = []
    names: set[str] = set()
    num_bytes = 0
    for index, tool in enumerate(tools):
        field = f"tools[{index}]"
        text = json_text(field, tool)
        num_bytes += len(text.encode())
        if num_bytes > MAX_TOOL_BYTES:
            raise invalid("tools", f"are longer than {MAX_TOOL_BYTES} bytes together")
        function = _checked_function(field, parse_schema(field, text))
        if function["name"] in names:
            raise invalid(f"{field}.function.name", f"is {function['name']!r}, as of another tool")
        names.add(function["name"])
        checked.append({"type": "function", "function": function})
    return tuple(checked)


def json_text(field: str, value: Any) -> str:
    """Parsed JSON as text again. Raises KvferryError (INVALID_REQUEST) for what cannot be."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        text.encode()
    except RecursionError:
        raise invalid(field, "is nested too deeply") from None
    except UnicodeEncodeError:
        raise invalid(field, "holds half of a surrogate pair, which is not text") from None
    except ValueError:
        raise invalid(field, "has a number that is not finite or too long") from None
    return text


def _checked_function(field: str, tool: Any) -> dict[str, Any]:
    """The function of a tool, without what is null."""
    if not isinstance(tool, dict):
        raise invalid(field, "must be an object")
    if tool.get("type") != "function":
        raise invalid(f"{field}.type", "must be function: other tools are not supported by this server")
    _refuse_others(field, tool, frozenset(["type", "function"]))
    field = f"{field}.function"
    if not isinstance(tool.get("function"), dict):
        raise invalid(field, "must be an object")
    function = {key: value for key, value in tool["function"].items() if value is not None}
    _refuse_others(field, function, _FUNCTION_KEYS)
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise invalid(f"{field}.name", "must be 1 to 64 of A-Z a-z 0-9 _ -")
    if not isinstance(function.get("description", ""), str):
        raise invalid(f"{field}.description", "must be a string")
    if not isinstance(function.get("strict", False), bool):
        raise invalid(f"{field}.strict", "must be true or false")
    parameters = function.get("parameters", _NO_PARAMETERS)
    if not isinstance(parameters, dict) or parameters.get("type") != "object":
        raise invalid(f"{field}.parameters", 'must be a JSON Schema of the type "object"')
    return function


def _refuse_others(field: str, value: Mapping[str, Any], known: frozenset[str]) -> None:
    for key in value:
        if key not in known:
            raise invalid(f"{field}.{key[:64]}", "is not a field that this server supports")

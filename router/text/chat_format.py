"""How a model writes tool calls and reasoning: chosen by name, or recognised from its chat template."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from router.text.reasoning import CLOSE, OPEN
from router.text.tool_parsers import HermesParser, Llama3Parser, MistralParser, ToolCallParser

TOOL_PARSERS: Final[Mapping[str, type[ToolCallParser]]] = {
    "hermes": HermesParser,
    "llama3": Llama3Parser,
    "mistral": MistralParser,
}
# What only templates of one format have in them. The order counts: some formats borrow another one's marker.
_SIGNS: Final = (
    ("<function=", None),  # Qwen3-Coder: a markup of its own inside <tool_call>
    ("<arg_key>", None),  # GLM, likewise
    ("[TOOL_CALLS]", "mistral"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3"),
    ('"parameters": dictionary of argument name', "llama3"),
)


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """What is read from the text of a model's answers. `tools` is one of TOOL_PARSERS; None: the model's way to call
    tools is not known, so requests with tools are refused. `reasoning`: `<think>` blocks are told apart."""

    tools: str | None = None
    reasoning: bool = False


NO_CHAT_FORMAT: Final = ChatFormat()
"""Everything is content."""


def chat_format(tool_parser: str, reasoning_parser: str, template_source: str) -> ChatFormat:
    """What the flags of the same names mean for a model with this template ("" for none): `auto` recognises, `none`
    reads nothing."""
    tools = _recognised(template_source) if tool_parser == "auto" else tool_parser
    reasoning = reasoning_parser == "think"
    if reasoning_parser == "auto":
        reasoning = OPEN in template_source or CLOSE in template_source
    return ChatFormat(tools if tools in TOOL_PARSERS else None, reasoning)


def _recognised(template_source: str) -> str | None:
    return next((name for sign, name in _SIGNS if sign in template_source), None)

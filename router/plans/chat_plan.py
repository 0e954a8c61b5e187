"""What the fields of a chat request mean together: messages, tools, and what shape the answer must have."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from kvferry_rpc.common_pb2 import Grammar
from router.http.openai_requests import ChatBody, Message, NamedToolChoice
from router.plans.structured_output import grammar_of
from router.text.chat_reader import ChatSyntax
from router.text.reasoning import opens_in_prompt
from router.text.tokenizer import Tokenizer
from router.text.tools import ToolMode, ToolUse, forced_grammar, tool_use
from runtime.errors import invalid

# More than "<think>" and the blanks behind it have, even letter by letter.
_LAST_PROMPT_TOKENS: Final = 16
_NOT_SUPPORTED: Final = "is not supported by this server"


def check_messages(messages: Sequence[Message]) -> None:
    """Raises KvferryError (INVALID_REQUEST) naming the field of the message that is not right for its role, or of the
    result that is of no call before it."""
    called: set[str] = set()
    for index, message in enumerate(messages):
        field = f"messages[{index}]"
        if message.role != "assistant":
            for name in ("tool_calls", "reasoning_content"):
                if getattr(message, name) is not None:
                    raise invalid(f"{field}.{name}", "is for messages of the role assistant")
        if message.role == "tool":
            if message.tool_call_id is None:
                raise invalid(f"{field}.tool_call_id", "is required in a message of the role tool")
        elif message.tool_call_id is not None:
            raise invalid(f"{field}.tool_call_id", "is for messages of the role tool")
        elif message.name is not None:
            raise invalid(f"{field}.name", _NOT_SUPPORTED + " but in messages of the role tool")
        if message.content is None and not message.tool_calls:
            raise invalid(f"{field}.content", "is required: a string or a list of text parts")
        if message.role == "tool" and message.tool_call_id not in called:
            raise invalid(f"{field}.tool_call_id", "names no call of a message of the assistant before it")
        called.update(call.id for call in message.tool_calls or ())


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as `ChatTemplate.render` takes them. A developer is the system; no content is an empty one, since
    templates put it where text is expected."""
    return [_template_message(message) for message in messages]


def requested_tools(body: ChatBody) -> ToolUse:
    """Raises KvferryError (INVALID_REQUEST) naming the field."""
    choice = body.tool_choice
    only = choice.function.name if isinstance(choice, NamedToolChoice) else None
    mode = ToolMode(choice) if isinstance(choice, str) else None
    return tool_use(body.tools or (), mode, only, parallel=body.parallel_tool_calls is not False)


def chat_grammar(body: ChatBody, use: ToolUse) -> Grammar | None:
    """The grammar of the answer, if it has to have one. Raises what `answer_grammar` raises."""
    field = "structured_outputs" if body.structured_outputs is not None else "response_format"
    return answer_grammar(grammar_of(body), field, use)


def answer_grammar(asked: Grammar | None, field: str, use: ToolUse) -> Grammar | None:
    """The grammar of the answer, if it has to have one: the one that `field` asks for, or that of a forced call.

    Raises KvferryError (INVALID_REQUEST): tools and a format exclude each other unless no tool may be called, since
    the format would hold for the calls too.
    """
    if asked is not None and use.tools:
        raise invalid(field, "cannot be used together with tools, unless tool_choice is none")
    return forced_grammar(use) if asked is None else asked


def syntax_behind(syntax: ChatSyntax, prompt_ids: Sequence[int], tokenizer: Tokenizer) -> ChatSyntax:
    """What to look for in the answers, now that the prompt is known, which may have opened a block of reasoning."""
    if not syntax.reasoning:
        return syntax
    end_of_prompt = tokenizer.decode(prompt_ids[-_LAST_PROMPT_TOKENS:], skip_special_tokens=False)
    return replace(syntax, think_open=opens_in_prompt(end_of_prompt))


def _template_message(message: Message) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": message.text(),
    }
    for name in ("name", "tool_call_id", "reasoning_content"):
        value = getattr(message, name)
        if value is not None:
            plain[name] = value
    if message.tool_calls:
        plain["tool_calls"] = [
            {"id": call.id, "function": {"name": call.function.name, "arguments": call.function.arguments}}
            for call in message.tool_calls
        ]
    return plain

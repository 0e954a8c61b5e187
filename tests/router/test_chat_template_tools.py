"""Tools and calls in chat templates: rendered as transformers renders them, refused where a template has no place."""

from functools import cache
from typing import Any

import pytest
from transformers import AutoTokenizer

from router.text.chat_template import ChatTemplate
from runtime.errors import KvferryError
from tests.support.tiny_tokenizers import TINY_REAL
from tests.support.tool_templates import SPECIAL, TEMPLATES, TOOLS

ARGUMENTS = '{"city": "Tromsø <\\"N\\">", "days": 3, "more": [null, {"a": 1.5}]}'
PARSED = {"city": 'Tromsø <"N">', "days": 3, "more": [None, {"a": 1.5}]}
CALL_ID = "abcdefghi"
PLAIN = "{% for message in messages %}{{ message.role ~ ':' ~ message.content }}{% endfor %}"


def conversation(arguments: Any) -> list[dict[str, Any]]:
    call: dict[str, Any] = {"id": CALL_ID, "type": "function"}
    call["function"] = {"name": "get_weather", "arguments": arguments}
    return [
        {"role": "user", "content": "How is it in Tromsø?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": CALL_ID, "content": '{"sky": "clear"}'},
        {"role": "assistant", "content": "Clear."},
        {"role": "user", "content": "And tomorrow?"},
    ]


@cache
def reference() -> Any:
    return AutoTokenizer.from_pretrained(TINY_REAL)


@pytest.mark.parametrize("style", TEMPLATES)
@pytest.mark.parametrize("tools", [[], TOOLS])
@pytest.mark.parametrize("length", [1, 3, 5])
def test_tools_and_calls_render_as_in_transformers(style: str, tools: list[Any], length: int) -> None:
    expected = reference().apply_chat_template(
        conversation(PARSED)[:length],
        tools=tools or None,
        chat_template=TEMPLATES[style],
        tokenize=False,
        add_generation_prompt=True,
    )
    text = ChatTemplate(TEMPLATES[style], SPECIAL).render(conversation(ARGUMENTS)[:length], tools)
    assert text == expected
    assert ("get_weather" in text) == (bool(tools) or length > 1)


def refusal(source: str, messages: list[dict[str, Any]], tools: Any = ()) -> KvferryError:
    with pytest.raises(KvferryError) as caught:
        ChatTemplate(source, SPECIAL).render(messages, tools)
    return caught.value


def test_a_template_without_a_place_for_tools_or_calls_refuses_them() -> None:
    assert refusal(PLAIN, conversation(ARGUMENTS)[:1], TOOLS).field == "tools"
    # A variable of this name that the template makes itself is not the client's.
    own = "{% set tools = 1 %}{{ tools }}" + PLAIN
    assert refusal(own, conversation(ARGUMENTS)[:1], TOOLS).field == "tools"
    assert refusal(PLAIN, conversation(ARGUMENTS)).field == "messages[1].tool_calls"
    assert refusal(PLAIN, [{"role": "tool", "tool_call_id": "x", "content": ""}]).field == "messages[0].role"


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "user", "content": "x", "tool_calls": []}, "messages[0]"),
        ({"role": "tool", "content": "x", "tool_call_id": 5}, "messages[0].tool_call_id"),
        ({"role": "assistant", "content": "x", "name": "y"}, "messages[0]"),
        ({"role": "assistant", "tool_calls": []}, "messages[0]"),
    ],
)
def test_fields_of_another_role_are_refused(message: dict[str, Any], field: str) -> None:
    assert refusal(TEMPLATES["hermes"], [message]).field == field


def test_half_a_character_in_the_arguments_of_a_call_is_refused() -> None:
    messages = conversation('{"a": "\\ud800"}')
    assert refusal(TEMPLATES["hermes"], messages).field == "messages"


def test_the_arguments_of_a_call_are_checked_where_they_are_read() -> None:
    assert refusal(TEMPLATES["hermes"], conversation("[1]")).field == "messages[1].tool_calls[0].function.arguments"


def test_reasoning_of_an_earlier_answer_reaches_the_template() -> None:
    messages = [{"role": "assistant", "content": "x", "reasoning_content": "Hm."}]
    assert "<think>Hm.</think>" in ChatTemplate(TEMPLATES["hermes"], SPECIAL).render(messages)


def test_a_refusal_by_the_template_names_the_messages() -> None:
    two = conversation(ARGUMENTS)
    two[1]["tool_calls"] = two[1]["tool_calls"] * 2
    assert "One call at a time." in refusal(TEMPLATES["llama3"], two).message

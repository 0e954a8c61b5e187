"""Calls in the text of a model: found in every format, the same in every cut, nothing lost, never slow."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.text.chat_events import ChatEvent, ContentDelta, ToolCallArguments, ToolCallStart
from router.text.chat_format import chat_format
from router.text.tool_parsers import ArrayParser, HermesParser, Llama3Parser, MistralParser, ToolCallParser
from tests.support.cuts import calls_of, content_of, merged, pieces_of
from tests.support.tool_templates import TEMPLATES, written

PARSERS: dict[str, type[ToolCallParser]] = {
    "hermes": HermesParser,
    "llama3": Llama3Parser,
    "mistral": MistralParser,
    "mistral-args": MistralParser,
    "forced": ArrayParser,
}
NAMES = frozenset(["get_weather", "clock", "f"])
SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=4)
ARGUMENTS = st.dictionaries(
    st.text(max_size=4), st.none() | st.integers() | st.text(max_size=9) | st.lists(st.text(max_size=3), max_size=2)
)
CALLS = st.lists(st.tuples(st.sampled_from(sorted(NAMES)), ARGUMENTS), min_size=1, max_size=3)
# Text that is made of what the formats are made of.
PARTS = [
    "<tool_call>", "</tool_call>", "<tool", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<", "[", "]", ";",
    ",", " ", "\n", "Hello", "{", "}", '{"name": "f", "arguments": {"a": "b{"}}', '{"name": "f", "parameters": {}}',
    '{"name": "f"', '"name": "nobody"', ', "arguments": {"x": [1, 2', ', "arguments"', ":", "f", '"', "\\",
    '{"a": 1}', "é\U0001f600",
]  # fmt: skip
NOISE = st.lists(st.sampled_from(PARTS), max_size=12).map("".join)


def read(style: str, text: str, sizes: list[int] | None = None, **options: Any) -> list[ChatEvent]:
    parser = PARSERS[style](NAMES, lambda index: f"id-{index}", **options)
    events: list[ChatEvent] = []
    for piece in pieces_of(text, sizes or [max(1, len(text))]):
        events.extend(parser.push(piece))
    return merged([*events, *parser.finish()])


@settings(deadline=None, max_examples=15)
@given(calls=CALLS, sizes=SIZES)
@pytest.mark.parametrize("style", PARSERS)
def test_every_call_is_found_with_its_arguments_in_every_cut(
    style: str, calls: list[tuple[str, dict[str, Any]]], sizes: list[int]
) -> None:
    events = read(style, written(style, calls), sizes)
    assert [(name, json.loads(arguments)) for name, arguments in calls_of(events)] == calls
    assert content_of(events) == ""
    starts = [event for event in events if isinstance(event, ToolCallStart)]
    assert [(start.index, start.call_id) for start in starts] == [(i, f"id-{i}") for i in range(len(calls))]


@settings(deadline=None, max_examples=40)
@given(text=NOISE, sizes=SIZES, single=st.booleans())
@pytest.mark.parametrize("style", ["hermes", "llama3", "mistral", "forced"])
def test_no_cut_changes_what_is_read(style: str, text: str, sizes: list[int], single: bool) -> None:
    assert read(style, text, sizes, single=single) == read(style, text, single=single)


@settings(deadline=None, max_examples=40)
@given(text=NOISE, sizes=SIZES)
@pytest.mark.parametrize("style", ["hermes", "llama3", "mistral", "forced"])
def test_text_without_a_call_comes_out_as_it_went_in(style: str, text: str, sizes: list[int]) -> None:
    events = read(style, text, sizes)
    if not calls_of(events):
        assert content_of(events) == text
    else:
        # What is not content is in the calls, or is the blanks, marks and members around them.
        assert all(part in text for part in [event.text for event in events if isinstance(event, ContentDelta)])
        assert all(arguments in text or arguments == "{}" for _, arguments in calls_of(events))


@pytest.mark.parametrize(
    ("style", "text"),
    [
        ("hermes", "<tool_call>get_weather()</tool_call>"),
        ("hermes", '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>'),
        ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "name": "clock", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f" "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "argum'),
        ("hermes", "An unfinished <tool_ca"),
        ("hermes", "<tool_call>"),
        ("hermes", '<tool_call>{"name": "' + "f" * 500 + '", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"' + "f" * 500 + '": 1, "name": "f", "arguments": {}}</tool_call>'),
        ("llama3", '{"city": "Oslo", "days": 3}'),
        ("llama3", 'Take this: {"name": "f", "parameters": {}}'),
        ("llama3", "<|python_tag|>search.call(query='x')"),
        ("llama3", ' {"name'),
        ("mistral", "[TOOL_CALLS] none of these"),
        ("mistral", "[TOOL_CALLS]nobody[ARGS]{}"),
        ("mistral", "[TOOL_CALLS]f[WHAT]{}"),
        ("mistral", "[TOOL_CALLS] []"),
        ("mistral", "[TOOL_CALLS]" + "f" * 400 + "{}"),
        ("forced", '[{"name'),
        ("forced", "Hello"),
    ],
)
def test_what_only_begins_like_a_call_is_content(style: str, text: str) -> None:
    for sizes in ([1], [3], [len(text)]):
        assert read(style, text, sizes) == [ContentDelta(text)]


def test_text_around_calls_is_content_and_blanks_next_to_them_are_not() -> None:
    call = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    events = read("hermes", f"Let me see. \n{call}\n\n{call}\n And now? ", [2])
    assert events == [
        ContentDelta("Let me see."),
        ToolCallStart(0, "id-0", "f"),
        ToolCallArguments(0, '{"a": 1}'),
        ToolCallStart(1, "id-1", "f"),
        ToolCallArguments(1, '{"a": 1}'),
        ContentDelta("And now? "),
    ]


def test_arguments_are_passed_on_as_they_come() -> None:
    parser = HermesParser(NAMES, str)
    assert parser.push('<tool_call>{"name": "f", "arguments": ') == []
    assert parser.push('{"text": "lo') == [ToolCallStart(0, "0", "f"), ToolCallArguments(0, '{"text": "lo')]
    assert parser.push("ng") == [ToolCallArguments(0, "ng")]
    assert parser.push('"}') == [ToolCallArguments(0, '"}')]
    assert parser.push("}</tool_call>") == []
    assert parser.finish() == []


def test_members_come_in_any_order_and_others_are_read_over() -> None:
    text = '<tool_call>{"id": [1, {"x": 2}], "arguments": {"a": "}"}, "type": "function", "name": "f"}</tool_call>'
    assert calls_of(read("hermes", text, [1])) == [("f", '{"a": "}"}')]


@pytest.mark.parametrize("rest", ["", ', "arguments": null', ', "parameters": null'])
def test_a_call_without_arguments_has_an_empty_object(rest: str) -> None:
    assert calls_of(read("hermes", f'<tool_call>{{"name": "f"{rest}}}</tool_call>', [1])) == [("f", "{}")]


def test_json_that_breaks_inside_the_arguments_leaves_what_was_right_and_the_rest_is_content() -> None:
    for sizes in ([1], [4], [200]):
        events = read("hermes", '<tool_call>{"name": "f", "arguments": {"a": oops}}</tool_call>', sizes)
        assert calls_of(events) == [("f", '{"a": ')]
        assert content_of(events) == "oops}}</tool_call>"


def test_a_call_cut_off_by_the_end_keeps_what_there_was() -> None:
    assert calls_of(read("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1, 2', [3])) == [("f", '{"a": [1, 2')]


@pytest.mark.parametrize("closing", ["", "\n", "</tool", "\n</tool_call"])
def test_a_missing_or_unfinished_closing_marker_is_no_content(closing: str) -> None:
    events = read("hermes", '<tool_call>{"name": "f", "arguments": {}}' + closing, [2])
    assert calls_of(events) == [("f", "{}")]
    assert content_of(events) == ""


def test_a_good_call_right_behind_a_bad_one_is_found() -> None:
    good = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    for bad in ("<tool_call>", '<tool_call>{"name": ', "<tool_call>{oops}</tool_call>"):
        events = read("hermes", bad + good, [1])
        assert calls_of(events) == [("f", "{}")]
        assert content_of(events) == bad.rstrip()


@pytest.mark.parametrize("start", ["", " \n", "<|python_tag|>", "Well. <|python_tag|>"])
def test_llamas_calls_stand_at_the_start_or_behind_the_tag(start: str) -> None:
    text = start + '{"type": "function", "name": "f", "parameters": {"a": 1}};{"name": "clock", "parameters": {}}'
    events = read("llama3", text, [5])
    assert calls_of(events) == [("f", '{"a": 1}'), ("clock", "{}")]
    assert content_of(events) == ("Well." if "Well" in start else "")


def test_text_behind_llamas_last_call_is_content() -> None:
    events = read("llama3", '{"name": "f", "parameters": {}};\n Done {"name": "f", "parameters": {}}')
    assert calls_of(events) == [("f", "{}")]
    assert content_of(events) == ';\n Done {"name": "f", "parameters": {}}'


@pytest.mark.parametrize(
    "text",
    [
        'f[ARGS]{"a": 1}',
        'f[CALL_ID]abcdefghi[ARGS]{"a": 1}',
        'f{"a": 1}',
        ' f [ARGS] {"a": 1}',
        '[{"name": "f", "arguments": {"a": 1}, "id": "abcdefghi"}]',
        ' [ {"name": "f", "arguments": {"a": 1}} ] ',
    ],
)
def test_mistral_writes_a_call_in_several_ways(text: str) -> None:
    events = read("mistral", "Sure.[TOOL_CALLS]" + text, [1])
    assert calls_of(events) == [("f", '{"a": 1}')]
    assert content_of(events) == "Sure."


@pytest.mark.parametrize("style", ["hermes", "llama3", "mistral", "mistral-args"])
def test_with_one_call_wanted_the_answer_is_over_behind_it(style: str) -> None:
    parser = PARSERS[style](NAMES, str, single=True)
    events = [
        event for piece in pieces_of(written(style, [("f", {}), ("clock", {})]), [3]) for event in parser.push(piece)
    ]
    assert calls_of([*events, *parser.finish()]) == [("f", "{}")]
    assert parser.is_done


@pytest.mark.parametrize("style", ["hermes", "llama3", "mistral", "forced"])
@pytest.mark.parametrize(
    "unit",
    [
        "<tool_call>", "<tool_call", "<tool_call>{", '<tool_call>{"name":', "[TOOL_CALLS]", "[TOOL_CALLS]f[", "\n<",
        "[TOOL_CALLS][{", "<|python_tag|>{", '{"name": "f", "parameters": {}};', "[", "{", " ", "\\", '"', ",",
        '<tool_call>{"name": "f", "arguments": {"a": "', '<tool_call>{"name": "f", "arguments": {}}</tool_cal',
    ],
)  # fmt: skip
def test_the_work_grows_with_the_text_not_with_its_square(style: str, unit: str) -> None:
    """Counted, not timed: how often a state looks at the text."""
    assert steps(style, unit * 120) <= 2.5 * steps(style, unit * 60) + 50


def steps(style: str, text: str) -> int:
    """Characters looked at, at most: what each call of a state came past, and what it held back."""
    parser = PARSERS[style](NAMES, str)
    looked = 0
    for piece in pieces_of(text, [40]):
        piece, parser._held = parser._held + piece, ""
        index = 0
        while index < len(piece):
            before, index = index, parser._state(piece, index)
            looked += index - before + len(parser._held) + 1
    return looked


@pytest.mark.parametrize("style", TEMPLATES)
def test_the_format_is_recognised_from_the_template(style: str) -> None:
    assert chat_format("auto", "auto", TEMPLATES[style]).tools == style
    assert chat_format("none", "none", TEMPLATES[style]).tools is None
    assert chat_format("llama3", "none", TEMPLATES[style]).tools == "llama3"


@pytest.mark.parametrize("source", ["", "{{ messages }}", "<tool_call><function=f>", "<tool_call>f<arg_key>"])
def test_formats_that_are_not_read_are_not_taken_for_others(source: str) -> None:
    assert chat_format("auto", "auto", source).tools is None


def test_reasoning_is_recognised_by_its_marker() -> None:
    assert chat_format("auto", "auto", "...</think>...").reasoning
    assert not chat_format("auto", "auto", "...").reasoning
    assert not chat_format("auto", "none", "<think>").reasoning
    assert chat_format("auto", "think", "").reasoning

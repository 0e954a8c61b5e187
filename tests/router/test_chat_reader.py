"""The reader of a whole chat: reasoning, content and calls in order, ids that survive a migration, an early end."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry_rpc.common_pb2 import FinishReason, SamplingParams
from router.generation import GenerationRequest, TextChunk
from router.text.chat_events import ChatChunk, ChatEnd, ChatEvent, ContentDelta, ReasoningDelta, ToolCallStart
from router.text.chat_generation import generate_chat
from router.text.chat_reader import ChatReader, ChatSyntax
from tests.support.cuts import calls_of, content_of, merged, pieces_of
from tests.support.http_door import ids_of, one_by_one, tokenizer
from tests.support.scripted_source import Finish, Script, ScriptedSource
from tests.support.sinks import pulled

HERMES = ChatSyntax(tools="hermes", names=frozenset(["f"]), reasoning=True)
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
TEXT = f"<think>\nI should.\n</think>\n\nOne moment.\n{CALL}\n{CALL}"


def read(text: str, sizes: list[int], syntax: ChatSyntax = HERMES, request_id: str = "chatcmpl-1") -> list[ChatEvent]:
    reader = ChatReader(syntax, request_id)
    events = [event for piece in pieces_of(text, sizes) for event in reader.push(piece)]
    return merged([*events, *reader.finish()])


def starts(events: list[ChatEvent]) -> list[ToolCallStart]:
    return [event for event in events if isinstance(event, ToolCallStart)]


@settings(deadline=None, max_examples=40)
@given(sizes=st.lists(st.integers(1, 12), min_size=1, max_size=4))
def test_reasoning_content_and_calls_come_in_order_in_every_cut(sizes: list[int]) -> None:
    events = read(TEXT, sizes)
    assert events[:2] == [ReasoningDelta("I should."), ContentDelta("One moment.")]
    assert calls_of(events) == [("f", '{"a": 1}')] * 2
    assert len(events) == 6


def test_calls_inside_a_thought_are_part_of_it() -> None:
    assert read(f"<think>{CALL}</think>", [3]) == [ReasoningDelta(CALL)]


def test_ids_depend_on_the_request_and_the_index_alone() -> None:
    first, again, other = read(TEXT, [3]), read(TEXT, [50]), read(TEXT, [3], request_id="chatcmpl-2")
    assert starts(first) == starts(again)
    ids = {start.call_id for start in (*starts(first), *starts(other))}
    assert len(ids) == 4
    assert all(call_id.startswith("call_") for call_id in ids)


def test_mistrals_ids_are_of_the_length_that_its_templates_take() -> None:
    syntax = ChatSyntax(tools="mistral", names=frozenset(["f"]))
    (start,) = starts(read("[TOOL_CALLS]f[ARGS]{}", [2], syntax))
    assert len(start.call_id) == 9
    assert start.call_id.isalnum()


def test_without_tools_and_reasoning_text_is_content_as_it_comes() -> None:
    reader = ChatReader(ChatSyntax(), "x")
    assert reader.push(TEXT) == [ContentDelta(TEXT)]
    assert reader.push(" \n<tool_ca") == [ContentDelta(" \n<tool_ca")]
    assert reader.push("") == reader.finish() == []
    assert not reader.made_calls


@pytest.mark.parametrize(
    ("syntax", "shown"),
    [
        (ChatSyntax(), set()),
        (ChatSyntax(reasoning=True), {"<think>", "</think>"}),
        (ChatSyntax(tools="hermes"), {"<tool_call>", "</tool_call>"}),
        (ChatSyntax(tools="mistral", forced=True), set()),
    ],
)
def test_the_markers_that_are_looked_for_become_text(syntax: ChatSyntax, shown: set[str]) -> None:
    assert syntax.shown_tokens == shown


def source_of(script: Script) -> ScriptedSource:
    return ScriptedSource(script)


def run(
    source: ScriptedSource, syntax: ChatSyntax, stop: tuple[str, ...] = ()
) -> AsyncGenerator[TextChunk | ChatEnd, None]:
    request = GenerationRequest("r", (1, 2), SamplingParams(), deadline=9.0, stop=stop)
    return pulled(lambda sink: generate_chat(source, request, tokenizer(), syntax, sink))


async def test_each_chunk_keeps_its_tokens_and_the_end_tells_of_calls() -> None:
    source = source_of(lambda _: [*one_by_one(TEXT), Finish(FinishReason.LENGTH, cached_tokens=2)])
    items = [item async for item in run(source, HERMES)]
    chunks = [item for item in items if isinstance(item, ChatChunk)]
    assert [token.token_id for chunk in chunks for token in chunk.tokens] == ids_of(TEXT)
    assert "".join(chunk.text for chunk in chunks) == TEXT
    end = items[-1]
    assert isinstance(end, ChatEnd)
    assert (end.made_calls, end.reason, end.cached_tokens) == (True, FinishReason.LENGTH, 2)
    assert (end.prompt_tokens, end.completion_tokens) == (2, len(ids_of(TEXT)))


@pytest.mark.parametrize("batch", [1, 4, 500])
@pytest.mark.parametrize("stop", [(), ("never",)])
async def test_when_one_call_is_wanted_the_source_is_told_that_it_is_enough(batch: int, stop: tuple[str, ...]) -> None:
    ids = ids_of(CALL + "\n" + CALL + " and more")
    source = source_of(lambda _: [ids[i : i + batch] for i in range(0, len(ids), batch)])
    syntax = ChatSyntax(tools="hermes", names=frozenset(["f"]), single=True)
    items = [item async for item in run(source, syntax, stop)]
    events = [event for item in items if isinstance(item, ChatChunk) for event in item.events]
    assert calls_of(events) == [("f", '{"a": 1}')]
    assert content_of(events) == ""
    end = items[-1]
    assert isinstance(end, ChatEnd)
    assert end.reason == FinishReason.STOP
    assert end.completion_tokens == sum(len(item.tokens) for item in items if isinstance(item, TextChunk))
    assert end.completion_tokens == len(ids) or batch < 500
    assert source.had_enough == ["r"]
    assert not source.cancelled


async def test_closing_early_cancels_the_request() -> None:
    source = source_of(lambda _: one_by_one(TEXT))
    async with aclosing(run(source, HERMES)) as items:
        await anext(items)
    assert source.cancelled == ["r"]

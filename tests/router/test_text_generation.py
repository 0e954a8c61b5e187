"""Tokens to text: one end, held-back characters, stop strings that cancel."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry_rpc.common_pb2 import ErrorCode, FinishReason, SamplingParams
from router.generation import GenerationRequest, TextChunk, TextEnd
from router.text.detokenizer import cut_at_stop
from router.text.text_generation import generate
from runtime.errors import KvferryError
from tests.support.http_door import ids_of, one_by_one, tokenizer
from tests.support.scripted_source import Finish, ScriptedSource, Step
from tests.support.sinks import pulled

FAMILY = "a \U0001f468\u200d\U0001f469\u200d\U0001f467 b \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 \u5f00\u59cb c"


def request(*stop: str) -> GenerationRequest:
    return GenerationRequest("r", (1, 2, 3), SamplingParams(max_tokens=100), deadline=1.0, stop=stop)


def text_of(source: ScriptedSource, *stop: str) -> AsyncGenerator[TextChunk | TextEnd, None]:
    return pulled(lambda sink: generate(source, request(*stop), tokenizer(), sink))


async def collect(steps: Sequence[Step], *stop: str) -> tuple[list[TextChunk], TextEnd, ScriptedSource]:
    source = ScriptedSource(lambda _: steps)
    items = [item async for item in text_of(source, *stop)]
    chunks = [item for item in items if isinstance(item, TextChunk)]
    assert [type(item) for item in items].count(TextEnd) == 1
    end = items[-1]
    assert isinstance(end, TextEnd)
    return chunks, end, source


async def test_text_arrives_as_it_becomes_final_and_then_one_end() -> None:
    chunks, end, source = await collect([*one_by_one("The cat sat."), Finish(FinishReason.LENGTH, cached_tokens=2)])
    assert "".join(chunk.text for chunk in chunks) == "The cat sat."
    assert (end.reason, end.prompt_tokens, end.cached_tokens) == (FinishReason.LENGTH, 3, 2)
    assert end.completion_tokens == len(ids_of("The cat sat."))
    assert source.cancelled == []


async def test_characters_split_over_tokens_come_whole_and_all_tokens_are_passed_on() -> None:
    chunks, _, _ = await collect([*one_by_one(FAMILY)])
    assert "".join(chunk.text for chunk in chunks) == FAMILY
    assert not any("\ufffd" in chunk.text for chunk in chunks)
    assert [token.token_id for chunk in chunks for token in chunk.tokens] == ids_of(FAMILY)


async def test_held_bytes_are_flushed_at_the_end() -> None:
    unfinished = ids_of("\U0001f9ff")[:-1]
    chunks, end, _ = await collect([unfinished, Finish(FinishReason.LENGTH)])
    assert "".join(chunk.text for chunk in chunks) == tokenizer().decode(unfinished)
    assert end.reason == FinishReason.LENGTH


async def test_a_stop_string_in_what_was_held_to_the_last_still_counts() -> None:
    chunks, end, _ = await collect([ids_of("\U0001f9ff")[:-1], Finish(FinishReason.LENGTH)], "\ufffd")
    assert "".join(chunk.text for chunk in chunks) == ""
    assert end.reason == FinishReason.STOP


async def test_a_stop_string_over_several_tokens_cuts_the_text_and_ends_the_work() -> None:
    text = "alpha beta gamma delta and so on"
    chunks, end, source = await collect(one_by_one(text), "beta gamma")
    assert "".join(chunk.text for chunk in chunks) == "alpha "
    assert end.reason == FinishReason.STOP
    assert (source.had_enough, source.cancelled) == (["r"], [])
    assert end.completion_tokens == sum(len(chunk.tokens) for chunk in chunks) < len(ids_of(text))
    assert end.prompt_tokens == 3
    assert end.receipt.request_id == "r"


async def test_tokens_behind_a_stop_string_in_the_same_batch_are_not_counted() -> None:
    text = "alpha beta gamma delta and so on"
    one, end_of_one, _ = await collect(one_by_one(text), "gamma")
    all_at_once, end, _ = await collect([ids_of(text)], "gamma")
    assert end.completion_tokens == end_of_one.completion_tokens
    assert [t.token_id for c in all_at_once for t in c.tokens] == [t.token_id for c in one for t in c.tokens]


async def test_the_tokens_so_far_begin_with_the_text_so_far() -> None:
    source = ScriptedSource(lambda _: one_by_one("one two three four five"))
    text, tokens = "", b""
    async for item in text_of(source, "two thrice", "five"):
        if isinstance(item, TextChunk):
            text += item.text
            tokens += b"".join(tokenizer().token_bytes(token.token_id) for token in item.tokens)
            assert tokens.decode(errors="replace").startswith(text)
    assert text == "one two three four "


async def test_a_marker_of_one_token_is_not_cut_by_an_unrelated_stop_string() -> None:
    chunks, _, _ = await collect([ids_of("so"), ids_of(" the"), ids_of(" end")], "zzzzzz")
    assert [chunk.text for chunk in chunks] == ["so", " the", " end"]


async def test_closing_early_cancels() -> None:
    source = ScriptedSource(lambda _: one_by_one("one two three"))
    async with aclosing(text_of(source)) as items:
        await anext(items)
    assert source.cancelled == ["r"]
    assert not source.running


async def test_failures_pass_through() -> None:
    lost = KvferryError(ErrorCode.UNAVAILABLE, "lost")
    with pytest.raises(KvferryError, match="lost"):
        await collect([ids_of("one"), lost])


@settings(max_examples=60, deadline=None)
@given(
    text=st.text(alphabet="ab \u00e9\u5f00\U0001f600", max_size=30),
    stop=st.lists(st.text(alphabet="ab \u00e9\u5f00\U0001f600", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(1, 5), min_size=1, max_size=8),
)
async def test_every_chunking_gives_the_text_of_one_piece(text: str, stop: list[str], cuts: list[int]) -> None:
    ids, steps, at = ids_of(text), list[Step](), 0
    while at < len(ids):
        size = cuts[len(steps) % len(cuts)]
        steps.append(ids[at : at + size])
        at += size
    chunks, end, source = await collect([*steps, Finish(FinishReason.LENGTH)], *stop)
    expected, stopped = cut_at_stop(tokenizer().decode(ids), stop)
    assert "".join(chunk.text for chunk in chunks) == expected
    assert end.reason == (FinishReason.STOP if stopped else FinishReason.LENGTH)
    assert not source.running

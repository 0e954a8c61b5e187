"""Anthropic's own client against the door, over a real socket: what it can parse is what it was promised."""

import asyncio
from typing import Any

import anthropic
import pytest

from kvferry_rpc.common_pb2 import ErrorCode, FinishReason
from router.text.chat_format import ChatFormat
from runtime.errors import KvferryError
from tests.support.http_door import MODEL, Door, ids_of, one_by_one
from tests.support.scripted_source import Finish
from tests.support.served_door import anthropic_client, writing_door
from tests.support.tool_templates import CLOCK, WEATHER, written

TEXT = "Good morning \U0001f600, all of you."
ASKED: Any = {"model": MODEL, "max_tokens": 64, "messages": [{"role": "user", "content": "Say something."}]}
CALLS: list[tuple[str, dict[str, Any]]] = [("get_weather", {"city": "Ål \U0001f600"}), ("clock", {})]
GIVEN: list[dict[str, Any]] = [WEATHER["function"], CLOCK["function"]]  # type: ignore[list-item]
TOOLS: Any = [
    {
        "name": tool["name"],
        "description": "A tool.",
        "input_schema": tool.get("parameters", {"type": "object", "properties": {}}),
    }
    for tool in GIVEN
]


async def both(door: Door, **fields: Any) -> tuple[anthropic.types.Message, anthropic.types.Message]:
    """The answer as a whole and as the client puts its stream together."""
    async with anthropic_client(door) as client:
        whole = await client.messages.create(**ASKED, **fields)
        async with client.messages.stream(**ASKED, **fields) as stream:
            streamed = await stream.get_final_message()
    return whole, streamed


def same(whole: anthropic.types.Message, streamed: anthropic.types.Message) -> bool:
    """Whether they are the same but for what is never the same."""
    left, right = (
        answer.model_dump(exclude={"id": True, "content": {"__all__": {"parsed_output"}}})
        for answer in (whole, streamed)
    )
    return left == right


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.STOP])
async def test_a_text_streamed_and_whole(reason: "FinishReason.ValueType") -> None:
    door = Door(lambda _: [*one_by_one(TEXT), Finish(reason, cached_tokens=4)])
    whole, streamed = await both(door)
    assert same(whole, streamed)
    assert [block.type for block in whole.content] == ["text"]
    assert whole.content[0].text == TEXT  # type: ignore[union-attr]
    assert whole.stop_reason == ("max_tokens" if reason == FinishReason.LENGTH else "end_turn")
    assert whole.stop_sequence is None
    prompt_tokens = len(door.source.requests[0].prompt_token_ids)
    assert (whole.usage.input_tokens, whole.usage.cache_read_input_tokens) == (prompt_tokens - 4, 4)
    assert whole.usage.output_tokens == len(ids_of(TEXT))
    assert whole._request_id == whole.id


async def test_the_stop_sequence_that_ended_the_answer_is_named() -> None:
    whole, streamed = await both(Door(lambda _: one_by_one(TEXT)), stop_sequences=["zzz", " all of", " of"])
    assert same(whole, streamed)
    assert whole.content[0].text == TEXT.partition(" all of")[0]  # type: ignore[union-attr]
    assert (whole.stop_reason, whole.stop_sequence) == ("stop_sequence", " all of")


@pytest.mark.parametrize("style", ["hermes", "llama3", "mistral"])
async def test_parallel_calls_streamed_and_whole(style: str) -> None:
    whole, streamed = await both(writing_door(written(style, CALLS), style), tools=TOOLS)
    assert [(block.name, block.input) for block in whole.content if block.type == "tool_use"] == CALLS
    assert whole.stop_reason == streamed.stop_reason == "tool_use"
    assert [block.model_dump(exclude={"id"}) for block in whole.content] == [
        block.model_dump(exclude={"id"}) for block in streamed.content
    ]


async def test_a_whole_round_with_thinking_and_the_result_of_a_tool() -> None:
    text = "<think>\nHm.\n</think>\n\nLet me look.\n" + written("hermes", CALLS[:1])
    door = writing_door(text, chat=ChatFormat("hermes", reasoning=True))
    whole, streamed = await both(door, tools=TOOLS, thinking={"type": "enabled", "budget_tokens": 1024})
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use"]
    assert [block.type for block in streamed.content] == ["thinking", "text", "tool_use"]
    assert whole.content[0].thinking == streamed.content[0].thinking == "Hm."  # type: ignore[union-attr]
    for answer in (whole.content, [block.model_dump() for block in whole.content]):
        result = {"type": "tool_result", "tool_use_id": whole.content[2].id, "content": "Rain."}  # type: ignore[union-attr]
        turns: Any = [
            *ASKED["messages"],
            {"role": "assistant", "content": answer},
            {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
        ]
        async with anthropic_client(door) as client:
            await client.messages.create(**ASKED | {"messages": turns}, tools=TOOLS)
    first, second = door.source.requests[-2:]
    assert first.prompt_token_ids == second.prompt_token_ids
    prompt = door.services.tokenizer.tokenizer.decode(first.prompt_token_ids, skip_special_tokens=False)
    assert '<tool_call>{"name": "get_weather", "arguments": {"city": "Ål \U0001f600"}}</tool_call>' in prompt
    assert "<tool_response>Rain.</tool_response><|im_end|>\n<|im_start|>user\nSo?<|im_end|>" in prompt


async def test_tokens_are_counted_as_a_generation_would() -> None:
    door = writing_door("Fine.")
    asked: Any = {name: ASKED[name] for name in ("model", "messages")}
    async with anthropic_client(door) as client:
        count = await client.messages.count_tokens(**asked, system="Be brief.", tools=TOOLS)
        await client.messages.create(**ASKED, system=[{"type": "text", "text": "Be brief."}], tools=TOOLS)
    assert count.input_tokens == len(door.source.requests[0].prompt_token_ids)


async def test_heartbeats_do_not_disturb_the_client() -> None:
    gate = asyncio.Event()
    asyncio.get_running_loop().call_later(0.1, gate.set)
    door = Door(lambda _: [*one_by_one(TEXT)[:2], gate, *one_by_one(TEXT)[2:]], quiet_s=0.01)
    async with anthropic_client(door) as client, client.messages.stream(**ASKED) as stream:
        assert await stream.get_final_text() == TEXT


async def test_errors_become_the_clients_own() -> None:
    async with anthropic_client(Door(lambda _: one_by_one(TEXT))) as client:
        with pytest.raises(anthropic.BadRequestError, match="temperature must be") as bad:
            await client.messages.create(**ASKED, extra_body={"temperature": 9})
        assert bad.value.type == "invalid_request_error"
        assert (bad.value.request_id or "").startswith("msg_")
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(**ASKED | {"model": "other"})
        with pytest.raises(anthropic.BadRequestError, match="max_tokens may be at most"):
            await client.messages.create(**ASKED | {"max_tokens": 600})
    overload = KvferryError(ErrorCode.OVERLOADED, "full", retry_after_ms=1)
    async with anthropic_client(Door(lambda _: [overload])) as client:
        with pytest.raises(anthropic.RateLimitError) as full:
            await client.messages.create(**ASKED, stream=True)
        assert full.value.type == "rate_limit_error"


async def test_a_failure_in_mid_stream_is_raised_not_swallowed() -> None:
    lost = KvferryError(ErrorCode.UNAVAILABLE, "the worker is lost")
    async with anthropic_client(Door(lambda _: [ids_of("x"), lost])) as client:
        stream = await client.messages.create(**ASKED, stream=True)
        with pytest.raises(anthropic.APIStatusError, match="the worker is lost") as failed:
            async for _ in stream:
                pass
    assert failed.value.type == "overloaded_error"

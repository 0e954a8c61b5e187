"""OpenAI's own client of the Responses API against the door, over a real socket."""

import asyncio
import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from kvferry_rpc.common_pb2 import ErrorCode, FinishReason
from router.text.chat_format import ChatFormat
from runtime.errors import KvferryError
from tests.support.http_door import MODEL, Door, ids_of, one_by_one
from tests.support.scripted_source import Finish
from tests.support.served_door import openai_client, writing_door
from tests.support.tool_templates import CLOCK, WEATHER, written

TEXT = "Good morning \U0001f600, all of you."
ASKED: Any = {"model": MODEL, "input": "Say something."}
CALLS: list[tuple[str, dict[str, Any]]] = [("get_weather", {"city": "Ål \U0001f600"}), ("clock", {})]
TOOLS: Any = [{"type": "function", "strict": None, "parameters": None, **tool["function"]} for tool in (WEATHER, CLOCK)]  # type: ignore[dict-item]
IDS = {"id", "call_id", "created_at"}


async def both(door: Door, **fields: Any) -> tuple[Response, Response]:
    """The answer as a whole, and the last event's of a stream, which the client checked against all others."""
    async with openai_client(door) as client:
        whole = await client.responses.create(**ASKED, **fields)
        async with client.responses.stream(**ASKED, **fields) as stream:
            last = [event async for event in stream][-1]
    assert last.type in ("response.completed", "response.incomplete")
    return whole, last.response


def plain(value: Any) -> Any:
    """A response as JSON, without what is never the same and what only the client adds."""
    if isinstance(value, list):
        return [plain(entry) for entry in value]
    if isinstance(value, dict):
        added = IDS | {"parsed", "parsed_arguments"}
        return {name: plain(entry) for name, entry in value.items() if name not in added}
    return value


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.STOP])
async def test_a_text_streamed_and_whole(reason: "FinishReason.ValueType") -> None:
    door = Door(lambda _: [*one_by_one(TEXT), Finish(reason, cached_tokens=4)])
    whole, streamed = await both(door, instructions="Be brief.", metadata={"a": "b"}, max_output_tokens=50)
    assert plain(whole.model_dump()) == plain(streamed.model_dump())
    assert whole.output_text == TEXT
    cut = reason == FinishReason.LENGTH
    assert whole.status == ("incomplete" if cut else "completed")
    assert (whole.incomplete_details is not None and whole.incomplete_details.reason == "max_output_tokens") == cut
    assert whole.usage is not None
    assert whole.usage.input_tokens == len(door.source.requests[0].prompt_token_ids)
    assert whole.usage.input_tokens_details.cached_tokens == 4
    assert whole.usage.output_tokens == len(ids_of(TEXT))
    assert whole.usage.output_tokens_details.reasoning_tokens == 0
    assert (whole.instructions, whole.metadata, whole.max_output_tokens) == ("Be brief.", {"a": "b"}, 50)
    assert whole.store is False  # type: ignore[attr-defined]


@pytest.mark.parametrize("style", ["hermes", "llama3", "mistral"])
async def test_parallel_calls_streamed_and_whole(style: str) -> None:
    whole, streamed = await both(writing_door(written(style, CALLS), style), tools=TOOLS)
    assert plain(whole.model_dump()) == plain(streamed.model_dump())
    calls = [item for item in whole.output if item.type == "function_call"]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == CALLS
    assert len(calls) == len(whole.output)
    assert len({call.id for call in calls} | {call.call_id for call in calls}) == 4


async def test_a_whole_round_with_reasoning_and_the_result_of_a_tool() -> None:
    text = "<think>\nHm.\n</think>\n\nLet me look.\n" + written("hermes", CALLS)
    door = writing_door(text, chat=ChatFormat("hermes", reasoning=True))
    whole, streamed = await both(door, tools=TOOLS)
    assert plain(whole.model_dump()) == plain(streamed.model_dump())
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call", "function_call"]
    assert whole.output_text == "Let me look."
    assert whole.output[0].content[0].text == "Hm."  # type: ignore[union-attr, index]
    assert whole.usage is not None
    assert 0 < whole.usage.output_tokens_details.reasoning_tokens < whole.usage.output_tokens
    results: Any = [
        {"type": "function_call_output", "call_id": item.call_id, "output": f"Result {index}."}
        for index, item in enumerate(whole.output)
        if item.type == "function_call"
    ]
    for items in (whole.output, [item.model_dump(by_alias=True) for item in whole.output]):
        turns: Any = [{"role": "user", "content": "How is it?"}, *items, *results]
        async with openai_client(door) as client:
            await client.responses.create(model=MODEL, input=turns, tools=TOOLS)
    first, second = door.source.requests[-2:]
    assert first.prompt_token_ids == second.prompt_token_ids
    prompt = door.services.tokenizer.tokenizer.decode(first.prompt_token_ids, skip_special_tokens=False)
    calls = [
        f'\n<tool_call>{{"name": "{name}", "arguments": {json.dumps(given, ensure_ascii=False)}}}</tool_call>'
        for name, given in CALLS
    ]
    assert f"<|im_start|>assistant\nLet me look.{''.join(calls)}<|im_end|>" in prompt
    assert "<tool_response>Result 2.</tool_response>" in prompt


async def test_logprobs_of_a_text_streamed_and_whole() -> None:
    door = Door(lambda _: one_by_one(TEXT))
    asked: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    async with openai_client(door) as client:
        whole = await client.responses.create(**ASKED, **asked)
        events: list[Any] = [event async for event in await client.responses.create(**ASKED, **asked, stream=True)]
    logprobs = whole.output[0].content[0].logprobs
    assert logprobs is not None
    assert b"".join(bytes(entry.bytes) for entry in logprobs).decode() == TEXT
    assert len(logprobs[0].top_logprobs) == 2
    deltas = [entry for event in events if event.type == "response.output_text.delta" for entry in event.logprobs]
    assert [entry.token for entry in deltas] == [entry.token for entry in logprobs]
    assert plain(events[-1].response.output[0].model_dump()) == plain(whole.output[0].model_dump())


async def test_a_schema_becomes_a_grammar() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    asked: Any = {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}}
    door = Door(lambda _: one_by_one('{"a": 1}'))
    async with openai_client(door) as client:
        answer = await client.responses.create(**ASKED, text=asked)
    assert json.loads(answer.output_text) == {"a": 1}
    assert json.loads(door.source.requests[0].sampling.grammar.text) == schema
    assert answer.text is not None
    assert answer.text.model_dump(by_alias=True, exclude_none=True)["format"] == asked["format"]


async def test_heartbeats_do_not_disturb_the_client() -> None:
    gate = asyncio.Event()
    asyncio.get_running_loop().call_later(0.1, gate.set)
    door = Door(lambda _: [gate, *one_by_one(TEXT)], quiet_s=0.01)
    async with openai_client(door) as client, client.responses.stream(**ASKED) as stream:
        assert (await stream.get_final_response()).output_text == TEXT


async def test_errors_become_the_clients_own() -> None:
    async with openai_client(Door(lambda _: one_by_one(TEXT))) as client:
        with pytest.raises(openai.BadRequestError, match="max_output_tokens may be at most") as bad:
            await client.responses.create(**ASKED, max_output_tokens=100_000)
        assert (bad.value.param, bad.value.code) == ("max_output_tokens", "context_length_exceeded")
        with pytest.raises(openai.BadRequestError, match="previous_response_id is not supported"):
            await client.responses.create(**ASKED, previous_response_id="resp_1")
        with pytest.raises(openai.NotFoundError):
            await client.responses.create(**ASKED | {"model": "other"})
    overload = KvferryError(ErrorCode.OVERLOADED, "full", retry_after_ms=1)
    async with openai_client(Door(lambda _: [overload])) as client:
        with pytest.raises(openai.RateLimitError):
            await client.responses.create(**ASKED, stream=True)


async def test_a_failure_in_mid_stream_is_the_last_event() -> None:
    lost = KvferryError(ErrorCode.UNAVAILABLE, "the worker is lost")
    async with openai_client(Door(lambda _: [ids_of("x"), lost])) as client:
        events: list[Any] = [event async for event in await client.responses.create(**ASKED, stream=True)]
    assert events[-1].type == "response.failed"
    assert events[-1].response.status == "failed"
    assert events[-1].response.error.message == "the worker is lost"
    assert events[-1].response.output_text == "x"

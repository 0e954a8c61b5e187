"""The official client against the door, over a real socket: what it can parse is what it was promised."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from kvferry_rpc.common_pb2 import ErrorCode, FinishReason
from router.http.protocol import HttpServer
from runtime.errors import KvferryError
from tests.support.http_door import MODEL, Door, ids_of, one_by_one
from tests.support.scripted_source import Finish

TEXT = "Good morning \U0001f600, all of you."
MESSAGES: Any = [{"role": "user", "content": "Say something."}]


@asynccontextmanager
async def client_of(door: Door) -> AsyncIterator[openai.AsyncOpenAI]:
    server = HttpServer(door.app, host="127.0.0.1", port=0)
    await server.start()
    base_url = f"http://127.0.0.1:{server.port}/v1"
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client
    await server.close(grace_s=1)


def script(_: Any) -> Any:
    return [*one_by_one(TEXT), Finish(FinishReason.LENGTH, cached_tokens=4)]


async def test_models_are_listed() -> None:
    async with client_of(Door(script)) as client:
        assert [model.id async for model in client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL


async def test_a_chat_with_choices_logprobs_and_usage() -> None:
    async with client_of(Door(script)) as client:
        answer = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, n=2, logprobs=True, top_logprobs=2, max_completion_tokens=50, seed=3
        )
    assert [choice.message.content for choice in answer.choices] == [TEXT, TEXT]
    assert answer.choices[0].finish_reason == "length"
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert b"".join(bytes(entry.bytes or []) for entry in logprobs.content).decode() == TEXT
    assert len(logprobs.content[0].top_logprobs) == 2
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2 * len(ids_of(TEXT))
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 4


async def test_a_streamed_chat_with_choices_stop_and_usage() -> None:
    async with client_of(Door(script)) as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, n=2, stop=[" all of"], stream=True, stream_options={"include_usage": True}
        )
        texts, reasons, usage = ["", ""], list[Any](), None
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                reasons.extend([choice.finish_reason] if choice.finish_reason else [])
    assert texts == [TEXT.partition(" all of")[0]] * 2
    assert reasons == ["stop", "stop"]
    assert usage is not None
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


async def test_completions_streamed_and_whole_with_logprobs() -> None:
    async with client_of(Door(script)) as client:
        whole = await client.completions.create(model=MODEL, prompt=["a", "b"], logprobs=1)
        stream = await client.completions.create(model=MODEL, prompt="a", stream=True, logprobs=1)
        chunks = [chunk async for chunk in stream]
    assert [choice.text for choice in whole.choices] == [TEXT, TEXT]
    assert whole.choices[0].logprobs is not None
    assert whole.choices[0].logprobs.text_offset is not None
    assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT


async def test_heartbeats_do_not_disturb_the_client() -> None:
    gate = asyncio.Event()
    asyncio.get_running_loop().call_later(0.1, gate.set)
    async with client_of(Door(lambda _: [gate, *one_by_one(TEXT)], quiet_s=0.01)) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == TEXT


async def test_errors_become_the_clients_own() -> None:
    async with client_of(Door(script)) as client:
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=9)
        assert (bad.value.param, bad.value.code) == ("temperature", "invalid_request")
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="other", messages=MESSAGES)
        with pytest.raises(openai.BadRequestError) as too_long:
            await client.completions.create(model=MODEL, prompt=[5] * 2000)
        assert too_long.value.code == "context_length_exceeded"
    overload = KvferryError(ErrorCode.OVERLOADED, "full", retry_after_ms=1)
    async with client_of(Door(lambda _: [overload])) as client:
        with pytest.raises(openai.RateLimitError):
            await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)


async def test_a_failure_in_mid_stream_is_raised_not_swallowed() -> None:
    lost = KvferryError(ErrorCode.UNAVAILABLE, "the worker is lost")
    async with client_of(Door(lambda _: [ids_of("x"), lost])) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError, match="the worker is lost"):
            async for _ in stream:
                pass


async def test_closing_a_stream_early_cancels_the_request() -> None:
    door = Door(lambda _: [ids_of("x"), asyncio.Event()])
    async with client_of(door) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        await anext(aiter(stream))
        await stream.close()
        await door.source.wait_until(lambda source: not source.running)
    assert len(door.source.cancelled) == 1

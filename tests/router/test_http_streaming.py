"""Streams of the HTTP door: the order of chunks, the late status line, heartbeats, failures, clients that leave."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from kvferry_rpc.common_pb2 import ErrorCode, FinishReason
from router.http.sse import HEARTBEAT
from runtime.errors import KvferryError
from tests.support.http_door import Door, chat_body, completion_body, events, ids_of, one_by_one
from tests.support.scripted_source import Finish

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
TEXT = "Stream me: \U0001f468\u200d\U0001f469\u200d\U0001f467 \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 ok."
LOST = KvferryError(ErrorCode.UNAVAILABLE, "the decode worker is lost")

Texts = Callable[[dict[str, Any]], str]


def chat_text(choice: dict[str, Any]) -> str:
    return str(choice["delta"].get("content", ""))


def completion_text(choice: dict[str, Any]) -> str:
    return str(choice["text"])


BOTH_ENDPOINTS = pytest.mark.parametrize(
    ("path", "body", "text"), [(CHAT, chat_body, chat_text), (COMPLETIONS, completion_body, completion_text)]
)


async def stream(door: Door, path: str, body: dict[str, Any]) -> list[Any]:
    answer = await door.post(path, body | {"stream": True})
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    return events(answer.content)


async def test_chunks_come_in_the_order_that_clients_expect() -> None:
    door = Door(lambda _: [*one_by_one(TEXT), Finish(FinishReason.LENGTH)])
    *chunks, done = await stream(door, CHAT, chat_body())
    assert done == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    first, *middle, last = [chunk["choices"][0] for chunk in chunks]
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert "".join(map(chat_text, middle)) == TEXT
    assert all(choice["delta"]["content"] for choice in middle)
    assert not any("\ufffd" in chat_text(choice) for choice in middle)
    assert (last["delta"], last["finish_reason"]) == ({}, "length")
    assert all("finish_reason" in choice and choice["finish_reason"] is None for choice in [first, *middle])
    assert all("usage" not in chunk for chunk in chunks)


async def test_completion_chunks_do_too() -> None:
    door = Door(lambda _: one_by_one(TEXT))
    *chunks, done = await stream(door, COMPLETIONS, completion_body(echo=True))
    assert done == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["text"] == "Once upon"
    assert "".join(choice["text"] for choice in choices) == "Once upon" + TEXT
    assert (choices[-1]["text"], choices[-1]["finish_reason"]) == ("", "stop")
    assert all(choice["finish_reason"] is None for choice in choices[:-1])


@BOTH_ENDPOINTS
@pytest.mark.parametrize("include_usage", [True, False])
async def test_choices_interleave_and_each_ends_once(path: str, body: Any, text: Texts, include_usage: bool) -> None:
    answers = ["one two three", "four five", TEXT]

    def script(request: Any) -> Any:
        return [*one_by_one(answers[request.sampling.seed]), Finish(cached_tokens=3)]

    door = Door(script)
    options = {"stream_options": {"include_usage": include_usage}}
    *chunks, done = await stream(door, path, body(n=3, seed=0, **options))
    assert done == "[DONE]"
    if include_usage:
        usage = chunks.pop()
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == sum(len(ids_of(answer)) for answer in answers)
        assert usage["usage"]["prompt_tokens"] == len(door.source.requests[0].prompt_token_ids)
        assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
        assert all(chunk["usage"] is None for chunk in chunks)
    else:
        assert all("usage" not in chunk for chunk in chunks)
    for index, answer in enumerate(answers):
        choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(map(text, choices)) == answer
        assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]


@pytest.mark.parametrize("stop", [["beta gamma"], ["b", "delta"], []])
@BOTH_ENDPOINTS
async def test_streamed_text_is_buffered_text(path: str, body: Any, text: Texts, stop: list[str]) -> None:
    door = Door(lambda _: one_by_one("alpha beta gamma delta " + TEXT))
    *chunks, _ = await stream(door, path, body(stop=stop, stream_options={"include_usage": True}))
    whole = (await door.post(path, body(stop=stop))).json()
    choice = whole["choices"][0]
    expected = choice["message"]["content"] if path == CHAT else choice["text"]
    assert "".join(text(chunk["choices"][0]) for chunk in chunks[:-1]) == expected
    assert chunks[-2]["choices"][0]["finish_reason"] == choice["finish_reason"]
    assert chunks[-1]["usage"] == whole["usage"]


@pytest.mark.parametrize(("path", "body"), [(CHAT, chat_body), (COMPLETIONS, completion_body)])
async def test_streamed_logprobs_are_buffered_logprobs(path: str, body: Any) -> None:
    door = Door(lambda _: one_by_one(TEXT))
    ask = {"logprobs": True, "top_logprobs": 1} if path == CHAT else {"logprobs": 1}
    *chunks, _ = await stream(door, path, body(**ask))
    pieces = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    whole = (await door.post(path, body(**ask))).json()["choices"][0]["logprobs"]
    for key, value in whole.items():
        if key != "refusal":
            assert [entry for piece in pieces if piece for entry in piece[key]] == value, key


@pytest.mark.parametrize("include_usage", [True, False])
async def test_the_receipt_is_in_the_last_chunk(include_usage: bool) -> None:
    door = Door(lambda _: one_by_one("x y"))
    options = {"stream_options": {"include_usage": include_usage}}
    *chunks, last, done = await stream(door, CHAT, chat_body(n=2, kv_receipt=True, **options))
    assert last["kv_receipt"]["request_id"] == door.source.requests[0].request_id
    assert not any("kv_receipt" in chunk for chunk in chunks)
    assert done == "[DONE]"


async def test_the_status_waits_for_the_first_item() -> None:
    go = asyncio.Event()
    door = Door(lambda _: [go, ids_of("x")])
    call = door.call(CHAT, chat_body(stream=True))
    await door.source.wait_until(lambda source: bool(source.running))
    assert call.nothing_sent()
    go.set()
    assert (await call.start())["status"] == 200
    await call.task


async def test_each_step_is_sent_as_it_comes() -> None:
    gates = [asyncio.Event() for _ in range(3)]
    door = Door(lambda _: [gates[0], ids_of(" one"), gates[1], ids_of(" two"), gates[2]])
    call = door.call(COMPLETIONS, completion_body(stream=True))
    gates[0].set()
    await call.start()
    assert events(await call.body())[0]["choices"][0]["text"] == " one"
    gates[1].set()
    assert events(await call.body())[0]["choices"][0]["text"] == " two"
    gates[2].set()
    await call.task


async def test_silence_is_filled_with_comments_also_before_the_first_token() -> None:
    first, second = asyncio.Event(), asyncio.Event()
    door = Door(lambda _: [first, ids_of("x"), second, ids_of("y")], quiet_s=0.01)
    call = door.call(CHAT, chat_body(stream=True))
    assert (await call.start())["status"] == 200
    assert [await call.body() for _ in range(3)] == [HEARTBEAT] * 3
    first.set()
    while (piece := await call.body()) == HEARTBEAT:
        pass
    assert events(piece)[0]["choices"][0]["delta"]["role"] == "assistant"
    assert await call.body() == HEARTBEAT
    second.set()
    while not (piece := await call.body()).endswith(b"[DONE]\n\n"):
        pass
    await call.task
    assert call.nothing_sent()


async def test_a_failure_before_the_first_token_is_a_status() -> None:
    answer = await Door(lambda _: [LOST]).post(CHAT, chat_body(stream=True))
    assert (answer.status_code, answer.headers["content-type"]) == (503, "application/json")
    assert answer.json()["error"]["message"] == LOST.message


@pytest.mark.parametrize("failure", [LOST, RuntimeError("SECRET")])
async def test_a_failure_after_the_first_token_is_one_event_and_the_end(failure: Exception) -> None:
    door = Door(lambda _: [ids_of("one"), ids_of("two"), failure])
    *chunks, error = await stream(door, CHAT, chat_body(n=1, stream_options={"include_usage": True}))
    assert set(error) == {"error"}
    assert "SECRET" not in str(error)
    assert error["error"]["code"] == ("unavailable" if failure is LOST else "internal")
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 3


async def test_a_failure_after_a_heartbeat_is_an_event_too() -> None:
    go = asyncio.Event()
    door = Door(lambda _: [go, LOST], quiet_s=0.01)
    call = door.call(CHAT, chat_body(stream=True))
    await call.start()
    assert await call.body() == HEARTBEAT
    go.set()
    while (piece := await call.body()) == HEARTBEAT:
        pass
    assert events(piece)[0]["error"]["code"] == "unavailable"
    await call.task


async def test_one_failing_choice_ends_the_stream_and_the_other_choices() -> None:
    started = asyncio.Event()

    def script(request: Any) -> Any:
        if request.request_id.endswith("-1"):
            return [started, LOST]
        return [ids_of("x"), asyncio.Event()]

    door = Door(script)
    call = door.call(CHAT, chat_body(n=2, stream=True))
    await call.start()
    await call.body()
    started.set()
    assert "error" in events(await call.body())[0]
    await call.task
    assert len(door.source.cancelled) == 1
    assert not door.source.running


@pytest.mark.parametrize("num_choices", [1, 3])
async def test_a_stream_is_cancelled_when_the_client_leaves(num_choices: int) -> None:
    door = Door(lambda _: [ids_of("x"), asyncio.Event()])
    call = door.call(CHAT, chat_body(n=num_choices, stream=True))
    await call.start()
    call.disconnect()
    await asyncio.wait_for(call.task, 5)
    assert not door.source.running
    assert len(door.source.cancelled) == num_choices


async def test_a_reader_that_stalls_stops_the_reading_of_tokens() -> None:
    taken = 0

    def script(_: Any) -> Any:
        nonlocal taken
        for token in ids_of(" word") * 500:
            taken += 1
            yield [token]

    door = Door(script)
    call = door.call(CHAT, chat_body(stream=True))
    call.may_write.clear()
    await door.source.wait_until(lambda source: bool(source.running))
    for _ in range(200):
        await asyncio.sleep(0)
    assert taken == 1
    call.disconnect()
    await asyncio.wait_for(call.task, 5)
    assert not door.source.running


async def test_cancels_at_any_moment_leave_nothing_behind() -> None:
    door = Door(lambda _: [[token] for token in ids_of("word after word after word")])
    for moment in range(60):
        call = door.call(CHAT, chat_body(n=1 + moment % 2, stream=moment % 3 > 0))
        for _ in range(moment):
            await asyncio.sleep(0)
        call.disconnect()
        await asyncio.wait_for(call.task, 5)
        assert not door.source.running
    assert (await door.post(CHAT, chat_body())).status_code == 200

"""The HTTP door in-process: whole answers, and errors in OpenAI's shape."""

import asyncio
import json
import logging
from typing import Any

import pytest

from kvferry_rpc.common_pb2 import ErrorCode, FinishReason
from runtime.errors import KvferryError
from runtime.limits import MAX_BODY_BYTES
from tests.support.http_door import (
    CONTEXT,
    MODEL,
    Door,
    chat_body,
    completion_body,
    ids_of,
    says,
    tokenizer,
)
from tests.support.scripted_source import Finish

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


async def test_a_chat_answer_has_openais_shape() -> None:
    door = Door(says("Hello there.", cached_tokens=16))
    answer = await door.post(CHAT, chat_body())
    body = answer.json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert answer.headers["x-request-id"] == body["id"] == door.source.requests[0].request_id
    assert body["model"] == MODEL
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello there.", "refusal": None}
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "stop", None)
    prompt = tokenizer().encode_chat([{"role": "user", "content": "Say something."}])
    assert list(door.source.requests[0].prompt_token_ids) == prompt
    assert body["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(ids_of("Hello there.")),
        "total_tokens": len(prompt) + len(ids_of("Hello there.")),
        "prompt_tokens_details": {"cached_tokens": 16},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert "kv_receipt" not in body


async def test_a_completion_answer_has_openais_shape() -> None:
    door = Door(says(" a time", reason=FinishReason.LENGTH))
    body = (await door.post(COMPLETIONS, completion_body())).json()
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["choices"] == [{"index": 0, "text": " a time", "logprobs": None, "finish_reason": "length"}]
    assert list(door.source.requests[0].prompt_token_ids) == tokenizer().encode("Once upon")
    assert door.source.requests[0].deadline == 100.0 + door.services.request_timeout_s


async def test_choices_run_together_and_usage_counts_the_prompt_once() -> None:
    together = asyncio.Event()

    def script(request: Any) -> Any:
        if len(door.source.running) == 3:
            together.set()
        words = {"": "one", "1": "two three", "2": "four"}[request.request_id.partition("-")[2].partition("-")[2]]
        return [together, ids_of(words), Finish(cached_tokens=5)]

    door = Door(script)
    body = (await door.post(CHAT, chat_body(n=3, seed=5))).json()
    assert [choice["message"]["content"] for choice in body["choices"]] == ["one", "two three", "four"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert [request.sampling.seed for request in door.source.requests] == [5, 6, 7]
    usage = body["usage"]
    assert usage["prompt_tokens"] == len(door.source.requests[0].prompt_token_ids)
    assert usage["completion_tokens"] == sum(map(len, map(ids_of, ["one", "two three", "four"])))
    assert usage["prompt_tokens_details"] == {"cached_tokens": 5}


async def test_when_one_choice_fails_the_others_are_cancelled() -> None:
    never = asyncio.Event()

    def script(request: Any) -> Any:
        if request.request_id.endswith("-1"):
            return [ids_of("x"), KvferryError(ErrorCode.HANDOFF_FAILED, "blocks did not verify")]
        return [never]

    door = Door(script)
    answer = await door.post(CHAT, chat_body(n=3))
    assert answer.status_code == 502
    assert answer.json()["error"]["code"] == "handoff_failed"
    assert len(door.source.cancelled) == 2
    assert not door.source.running


async def test_several_prompts_make_several_choices() -> None:
    door = Door(says("!"))
    body = (await door.post(COMPLETIONS, completion_body(prompt=["a b", "c"], n=2))).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    prompts = [list(request.prompt_token_ids) for request in door.source.requests]
    assert prompts == [tokenizer().encode(text) for text in ("a b", "a b", "c", "c")]
    assert body["usage"]["prompt_tokens"] == len(prompts[0]) + len(prompts[2])
    assert body["usage"]["completion_tokens"] == 4


async def test_echo_puts_the_prompt_in_front() -> None:
    door = Door(says(" end"))
    body = (await door.post(COMPLETIONS, completion_body(echo=True, n=2))).json()
    assert [choice["text"] for choice in body["choices"]] == ["Once upon end"] * 2
    body = (await door.post(COMPLETIONS, completion_body(prompt=ids_of("Given ids"), echo=True))).json()
    assert body["choices"][0]["text"] == "Given ids end"


async def test_a_stop_string_cuts_the_answer_and_ends_the_work() -> None:
    door = Door(says("alpha beta gamma delta"))
    choice = (await door.post(CHAT, chat_body(stop=["beta gamma"]))).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("alpha ", "stop")
    assert len(door.source.had_enough) == 1


async def test_chat_logprobs_have_openais_shape() -> None:
    door = Door(says("Tiny \U0001f600"))
    body = (await door.post(CHAT, chat_body(logprobs=True, top_logprobs=2))).json()
    entries = body["choices"][0]["logprobs"]["content"]
    ids = ids_of("Tiny \U0001f600")
    assert [entry["token"] for entry in entries] == [tokenizer().token_text(token) for token in ids]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == "Tiny \U0001f600"
    assert [entry["logprob"] for entry in entries] == pytest.approx([-1 / (1 + token % 7) for token in ids])
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    assert set(entries[0]["top_logprobs"][0]) == {"token", "logprob", "bytes"}
    body = (await door.post(CHAT, chat_body(logprobs=True))).json()
    assert body["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


async def test_completion_logprobs_have_openais_shape() -> None:
    text = "go \U0001f600 on"
    door = Door(says(text))
    logprobs = (await door.post(COMPLETIONS, completion_body(logprobs=1))).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [tokenizer().token_text(token) for token in ids_of(text)]
    assert len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == len(logprobs["tokens"])
    for token, logprob, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert top[token] == logprob
    whole = [(at, token) for at, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True)]
    assert all(text[at:].startswith(token) for at, token in whole if "\ufffd" not in token)


async def test_an_infinite_logprob_stays_valid_json() -> None:
    def script(_: Any) -> Any:
        return says("x")(_)

    door = Door(script)
    tokens = door.source.tokens

    async def certain(request: Any) -> Any:
        async for item in tokens(request):
            for token in getattr(item, "tokens", ()):
                token.logprob = float("-inf")
            yield item

    door.source.tokens = certain  # type: ignore[method-assign]
    body = await door.post(CHAT, chat_body(logprobs=True))
    assert json.loads(body.content)["choices"][0]["logprobs"]["content"][0]["logprob"] == -9999.0


@pytest.mark.parametrize("by_header", [True, False])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(("path", "body"), [(CHAT, chat_body), (COMPLETIONS, completion_body)])
async def test_the_receipt_comes_once_when_asked_for_by_field_or_header(
    path: str, body: Any, n: int, stream: bool, by_header: bool
) -> None:
    door = Door(says("x"))
    ask, headers = ({}, {"x-kvferry-receipt": "1"}) if by_header else ({"kv_receipt": True}, {})
    answer = await door.post(path, body(n=n, stream=stream, **ask), headers=headers)
    assert answer.content.count(b'"kv_receipt"') == 1
    last = answer.text.split("data: ")[-2] if stream else answer.text
    receipt = json.loads(last)["kv_receipt"]
    assert receipt["request_id"] == answer.headers["x-request-id"] == door.source.requests[0].request_id
    assert (receipt["transport"], receipt["tokens_recomputed"], receipt["checksum"]) == ("shm", 0, "01")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("path", "body"), [(CHAT, chat_body), (COMPLETIONS, completion_body)])
async def test_no_receipt_comes_unasked(path: str, body: Any, stream: bool) -> None:
    answer = await Door(says("x")).post(path, body(stream=stream), headers={"x-kvferry-receipt": "0"})
    assert answer.status_code == 200
    assert b"kv_receipt" not in answer.content


@pytest.mark.parametrize("code", [value for value in ErrorCode.values() if value])
@pytest.mark.parametrize("stream", [True, False])
async def test_every_failure_of_the_cluster_has_its_status(code: "ErrorCode.ValueType", stream: bool) -> None:
    failure = KvferryError(code, "told so", field="temperature", retry_after_ms=2500)
    door = Door(lambda _: [failure])
    answer = await door.post(CHAT, chat_body(stream=stream))
    error = answer.json()["error"]
    assert answer.status_code == failure.http_status
    assert (error["message"], error["param"]) == ("told so", "temperature")
    assert answer.headers["x-request-id"].startswith("chatcmpl-")
    assert answer.headers.get("retry-after") == ("3" if answer.status_code in (429, 503) else None)
    assert door.refused == []  # The source has counted it already.


@pytest.mark.parametrize("stream", [True, False])
async def test_a_defect_is_told_to_nobody_but_the_log_and_without_the_prompt(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    door = Door(lambda request: [ValueError("SECRET PROMPT")])
    with caplog.at_level(logging.DEBUG):
        answer = await door.post(CHAT, chat_body(stream=stream))
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    assert "SECRET" not in answer.text + caplog.text
    assert "ValueError" in caplog.text


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", CHAT, 405),
        ("POST", "/health", 405),
        ("GET", "/nowhere", 404),
        ("GET", "/", 404),
        ("GET", "/v1/models/", 404),
        ("POST", CHAT + "/", 404),
    ],
)
async def test_wrong_paths_and_methods_have_the_shape_too(method: str, path: str, status: int) -> None:
    async with Door(says("x")).client() as client:
        answer = await client.request(method, path)
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert ("allow" in answer.headers) == (status == 405)


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"x" * (MAX_BODY_BYTES + 1), {}, 413),
        (b"{}", {"content-type": "text/plain"}, 415),
        (b"\xff\xfe", {}, 400),
        (b'{"a":' * 100_000, {}, 400),
    ],
)
async def test_bodies_that_cannot_be_read_are_refused(content: bytes, headers: dict[str, str], status: int) -> None:
    door = Door(says("x"))
    for path in (CHAT, COMPLETIONS, "/tokenize"):
        answer = await door.post(path, content, headers=headers)
        assert (answer.status_code, answer.json()["error"]["type"]) == (status, "invalid_request_error")
    assert door.refused == ["invalid_request"] * 2


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("length", [CONTEXT, 100_000])
async def test_a_prompt_too_long_is_refused_before_any_byte(stream: bool, length: int) -> None:
    door = Door(says("x"))
    answer = await door.post(COMPLETIONS, completion_body(prompt=[5] * length, stream=stream))
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert door.source.requests == []
    assert door.refused == ["context_length_exceeded"]


async def test_no_link_in_a_message_is_ever_followed() -> None:
    visits: list[Any] = []

    def visit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        visits.append(reader)
        writer.close()

    canary = await asyncio.start_server(visit, "127.0.0.1", 0)
    port = canary.sockets[0].getsockname()[1]
    door = Door(says("x"))
    for url in (
        f"http://127.0.0.1:{port}/", f"http://allowed\\@127.0.0.1:{port}/", f"http://2130706433:{port}/",
        f"http://[::ffff:127.0.0.1]:{port}/", "file:///etc/passwd",
    ):  # fmt: skip
        part = {"type": "image_url", "image_url": {"url": url}}
        answer = await door.post(CHAT, chat_body(messages=[{"role": "user", "content": [part]}]))
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "messages[0].content[0].type"
    canary.close()
    await canary.wait_closed()
    assert visits == []


async def test_more_requests_than_the_cap_are_refused_at_once() -> None:
    release = asyncio.Event()
    door = Door(lambda _: [release, ids_of("x")], max_requests=2)
    running = [asyncio.create_task(door.post(CHAT, chat_body())) for _ in range(2)]
    await door.source.wait_until(lambda source: len(source.running) == 2)
    refused = await door.post(CHAT, chat_body())
    assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
    assert int(refused.headers["retry-after"]) >= 1
    release.set()
    assert {answer.status_code for answer in await asyncio.gather(*running)} == {200}
    assert (await door.post(CHAT, chat_body())).status_code == 200


async def test_a_buffered_request_is_cancelled_when_the_client_leaves() -> None:
    door = Door(lambda _: [ids_of("x"), asyncio.Event()])
    call = door.call(CHAT, chat_body(n=2))
    await door.source.wait_until(lambda source: len(source.running) == 2)
    call.disconnect()
    await asyncio.wait_for(call.task, 5)
    assert len(door.source.cancelled) == 2
    assert not door.source.running
    assert call.nothing_sent()


async def test_a_client_that_leaves_while_its_prompt_is_tokenised_starts_nothing() -> None:
    door = Door(says("x"))
    asked, answer = asyncio.Event(), asyncio.Event()

    async def slow_encode(text: str, **_: object) -> list[int]:
        asked.set()
        await answer.wait()
        return [1]

    door.services.tokenizer.encode = slow_encode  # type: ignore[method-assign]
    call = door.call(COMPLETIONS, completion_body())
    await asked.wait()
    call.disconnect()
    await asyncio.wait_for(call.task, 5)
    assert door.source.requests == []
    assert door.refused == ["cancelled"]  # Nobody else could count it.


async def test_a_defect_before_the_cluster_sees_the_request_is_counted_too() -> None:
    door = Door(says("x"))

    async def broken_encode(text: str, **_: object) -> list[int]:
        raise RuntimeError

    door.services.tokenizer.encode = broken_encode  # type: ignore[method-assign]
    assert (await door.post(COMPLETIONS, completion_body())).status_code == 500
    assert door.refused == ["internal"]


@pytest.mark.parametrize(("given", "logged"), [("abc-1", "abc-1"), ("a b\t", "-"), ("x" * 200, "-"), ("", "-")])
async def test_a_clients_own_request_id_goes_to_the_log_only(
    given: str, logged: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, logger="router.http.generation"):
        answer = await Door(says("x")).post(CHAT, chat_body(), headers={"x-request-id": given})
    assert answer.headers["x-request-id"].startswith("chatcmpl-")
    assert f"client_request_id={logged}" in caplog.text

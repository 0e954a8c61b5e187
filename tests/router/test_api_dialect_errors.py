"""What `/v1/messages` and `/v1/responses` refuse, by which name, and in which shape."""

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvferry_rpc.common_pb2 import ErrorCode, FinishReason
from router.http.anthropic_requests import MessagesBody
from router.http.responses_requests import ResponsesBody
from router.tenants import TenantDirectory
from router.text.chat_format import ChatFormat
from runtime.clock import ManualClock
from runtime.errors import KvferryError, invalid
from tests.support.api_dialects import (
    MESSAGES,
    RESPONSES,
    message_of,
    messages_body,
    named_events,
    responses_body,
)
from tests.support.http_door import Door, chat_body, ids_of, says
from tests.support.served_door import writes, writing_door
from tests.support.tool_templates import tool_door

COUNT = "/v1/messages/count_tokens"
KINDS: dict[str, tuple[type, Any]] = {
    MESSAGES: (MessagesBody, messages_body),
    RESPONSES: (ResponsesBody, responses_body),
}
WRONG = ["NaN", "-1", '"0.7"', "true", "[[]]", '{"a": []}', "1.5", "1" + "0" * 30]
TOOL = {"name": "f", "input_schema": {"type": "object"}}


def problem_of(path: str, answer: Any) -> str:
    """The message of an error answer, whose shape is checked."""
    body = answer.json()
    if path == RESPONSES:
        assert set(body["error"]) == {"message", "type", "param", "code"}
        return str(body["error"]["message"])
    assert (set(body), set(body["error"]), body["type"]) == (
        {"type", "error", "request_id"},
        {"type", "message"},
        "error",
    )
    return str(body["error"]["message"])


@pytest.mark.parametrize("path", KINDS)
async def test_wrong_values_are_refused_by_name_and_null_is_absent(path: str) -> None:
    kind, base = KINDS[path]
    door = Door(says("fine"))
    info = msgspec.inspect.type_info(kind)
    assert isinstance(info, msgspec.inspect.StructType)
    for field in info.fields:
        rest = {key: part for key, part in base().items() if key != field.name}
        refused = 0
        for value in WRONG:
            answer = await door.post(path, (json.dumps(rest)[:-1] + f', "{field.name}": {value}}}').encode())
            assert answer.status_code in (200, 400, 404), (field.name, value)
            if answer.status_code != 200:
                refused += 1
                message = problem_of(path, answer)
                assert answer.status_code == 404 or message.startswith(field.name), (field.name, value, message)
        assert refused >= len(WRONG) - 2, field.name
        answer = await door.post(path, base(**{field.name: None}))
        assert answer.status_code == (400 if field.required else 200), field.name
        if field.required:
            assert problem_of(path, answer).startswith(field.name)


PICTURE = {"type": "image", "source": {"type": "url", "url": "URL"}}
PLACES: list[tuple[str, dict[str, Any]]] = [
    (MESSAGES, messages_body(messages=[{"role": "user", "content": [PICTURE]}])),
    (
        MESSAGES,
        messages_body(
            messages=[{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "i", "content": [PICTURE]}]}]
        ),
    ),
    (COUNT, {"model": "tiny-real", "messages": [{"role": "user", "content": [PICTURE]}]}),
    (
        RESPONSES,
        responses_body(input=[{"role": "user", "content": [{"type": "input_image", "image_url": "URL"}]}]),
    ),
    (RESPONSES, responses_body(input=[{"role": "user", "content": [{"type": "input_file", "file_url": "URL"}]}])),
    (
        "/v1/chat/completions",
        chat_body() | {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "URL"}}]}]},
    ),
]


@pytest.mark.parametrize("form", ["http://127.0.0.1:{port}/a.png", "http://allowed\\@127.0.0.1:{port}/"])
async def test_what_a_client_names_is_never_fetched(form: str) -> None:
    visits: list[bool] = []
    canary = await asyncio.start_server(lambda *_: visits.append(True), "127.0.0.1", 0)
    async with canary:
        url = form.format(port=canary.sockets[0].getsockname()[1])
        door = Door(says("fine"))
        for path, body in PLACES:
            answer = await door.post(path, json.loads(json.dumps(body).replace('"URL"', json.dumps(url))))
            assert answer.status_code == 400
            assert ".type is not valid" in answer.json()["error"]["message"]
    assert not visits
    assert not door.source.requests


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 600}, "The prompt has"),
        ({"temprature": 1}, "temprature"),
        ({"stop_sequences": [""]}, "stop_sequences has"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tools": [TOOL | {"input_schema": {}}]}, "tools[0].input_schema"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
        ({"tools": [TOOL], "output_config": {"format": {"type": "json_schema", "schema": {}}}}, "output_config.format"),
        ({"output_config": {"effort": "low"}}, "output_config.effort is not supported"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking cannot"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]}, "messages[1].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "i"}]}]},
            "messages[0].content[0] names no call",
        ),
        (
            {
                "system": "S",
                "messages": [
                    {"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "i"}]},
                    {"role": "user", "content": "Q"},
                ],
            },
            "messages[0].content[0].type",
        ),
    ],
)
async def test_the_messages_api_names_its_own_fields(fields: dict[str, Any], name: str) -> None:
    door = writing_door("never") if "tools" in fields else Door(says("never"))
    answer = await door.post(MESSAGES, messages_body() | fields)
    assert answer.status_code == 400
    assert problem_of(MESSAGES, answer).startswith(name)
    assert not door.source.requests
    assert door.refused == ["context_length_exceeded" if name.startswith("The") else "invalid_request"]


FLAT = {"type": "function", "name": "f", "parameters": {"type": "object"}}


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"max_output_tokens": 600}, "max_output_tokens"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"previous_response_id": "r"}, "previous_response_id"),
        ({"truncation": "auto"}, "truncation"),
        ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stream_options": {}}, "stream_options"),
        ({"tools": [FLAT], "include": ["message.output_text.logprobs"]}, "include"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [FLAT | {"parameters": []}]}, "tools[0].parameters"),
        ({"tools": [FLAT | {"more": 1}]}, "tools[0].more"),
        ({"tools": [FLAT], "text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"not": {}}}}}, "text.format.schema"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        (
            {
                "input": [
                    {"type": "function_call_output", "call_id": "i", "output": "x"},
                    {"role": "user", "content": "Q"},
                ]
            },
            "input[0]",
        ),
        ({"input": [{"role": "user", "content": "Q"}, {"type": "item_reference", "id": "i"}]}, "input[1].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "output_text", "text": "x", "more": 1}]}]},
            "input[0].content[0].more",
        ),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "x"}]}, "input[0]"),
    ],
)
async def test_the_responses_api_names_its_own_fields(fields: dict[str, Any], name: str) -> None:
    door = writing_door("never") if "tools" in fields or "call_id" in str(fields) else Door(says("never"))
    answer = await door.post(RESPONSES, responses_body() | fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == name
    assert not door.source.requests


async def test_what_a_worker_refuses_has_the_clients_name() -> None:
    refused = invalid("response_format.json_schema.schema", "cannot be compiled")
    schema = {"type": "object", "properties": {}}
    response = responses_body(text={"format": {"type": "json_schema", "name": "n", "schema": schema}})
    answer = await Door(lambda _: [refused]).post(RESPONSES, response | {"stream": True})
    assert answer.json()["error"]["param"] == "text.format.schema"
    assert answer.json()["error"]["message"] == "text.format.schema cannot be compiled"
    late = Door(lambda _: [ids_of("x"), refused])
    assert "output_config.format.schema cannot" in (await late.post(MESSAGES, messages_body(stream=True))).text


async def test_every_failure_below_messages_has_anthropics_shape(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(json.dumps({"tenant": "red", "key_sha256": hashlib.sha256(b"red-key").hexdigest()}))
    tenants = TenantDirectory(keys, b"secret", ManualClock())
    door = Door(says("fine"), tenants=tenants)
    good = {"x-api-key": "red-key", "anthropic-version": "2023-06-01"}
    async with door.client() as client:
        wrong_method = await client.get(MESSAGES, headers=good)
        no_path = await client.get(f"{MESSAGES}/batches", headers=good)
    answers = [
        (401, "authentication_error", await door.post(MESSAGES, messages_body())),
        (401, "authentication_error", await door.post(COUNT, messages_body())),
        (405, "invalid_request_error", wrong_method),
        (404, "not_found_error", no_path),
        (404, "not_found_error", await door.post(MESSAGES, messages_body(model="x"), headers=good)),
        (400, "invalid_request_error", await door.post(MESSAGES, b"{", headers=good)),
        (415, "invalid_request_error", await door.post(MESSAGES, b"", headers=good | {"content-type": "text/plain"})),
        (413, "request_too_large", await door.post(MESSAGES, b" " * (4 * 2**20 + 1), headers=good)),
        (400, "invalid_request_error", await door.post(COUNT, {"model": "tiny-real", "messages": [{}]}, headers=good)),
    ]
    for status, kind, answer in answers:
        assert answer.status_code == status
        assert problem_of(MESSAGES, answer)
        assert answer.json()["error"]["type"] == kind
        assert answer.json()["request_id"] == answer.headers.get("request-id") == answer.headers.get("x-request-id")
    assert (await door.post(MESSAGES, messages_body(), headers=good)).status_code == 200
    overload = KvferryError(ErrorCode.OVERLOADED, "full", retry_after_ms=3000)
    full = await Door(lambda _: [overload]).post(MESSAGES, messages_body())
    assert (full.status_code, full.headers["retry-after"]) == (429, "3")
    assert full.json()["request_id"].startswith("msg_")


async def test_pings_come_only_once_a_message_has_begun() -> None:
    first, second = asyncio.Event(), asyncio.Event()
    door = Door(lambda _: [first, ids_of("x"), second], quiet_s=0.005)
    call = door.call(MESSAGES, messages_body(stream=True))
    await call.start()
    assert await call.body() == b": keep-alive\n\n"
    first.set()
    while (piece := await call.body()) == b": keep-alive\n\n":
        pass
    assert piece.startswith(b"event: message_start\n")
    while (piece := await call.body()).startswith(b"event: content_block"):
        pass
    assert piece == b'event: ping\ndata: {"type":"ping"}\n\n'
    second.set()
    await call.task


THOUGHT = "<think>\nHm.\n</think>\n\nForty-two."


@pytest.mark.parametrize(
    ("thinking", "is_shown"),
    [
        (None, True),
        ({"type": "enabled", "budget_tokens": 50}, True),
        ({"type": "adaptive", "display": "summarized"}, True),
        ({"type": "adaptive", "display": "omitted"}, False),
        ({"type": "disabled"}, False),
    ],
)
async def test_thinking_is_left_out_where_it_is_not_wanted(thinking: Any, is_shown: bool) -> None:
    door = writing_door(THOUGHT, chat=ChatFormat(reasoning=True))
    body = messages_body(thinking=thinking)
    whole = (await door.post(MESSAGES, body)).json()
    streamed = message_of(named_events((await door.post(MESSAGES, body | {"stream": True})).content))
    assert whole["content"] == streamed["content"]
    assert [block["type"] for block in whole["content"]] == ["thinking", "text"][not is_shown :]
    assert whole["content"][-1]["text"] == "Forty-two."


async def test_schemas_and_arguments_come_back_as_they_were_written() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": 1000000000000000000000000000000, "b": [[1.10]]}}</tool_call>'
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 10**31}}}
    flat = {"type": "function", "name": "f", "parameters": schema}
    response = (await writing_door(text).post(RESPONSES, responses_body(tools=[flat]))).json()
    assert response["tools"] == [flat]
    door = writing_door(text)
    answer = await door.post(MESSAGES, messages_body(tools=[TOOL | {"input_schema": schema}]))
    assert '"input":{"a": 1000000000000000000000000000000, "b": [[1.10]]}' in answer.text
    assert json.loads(response["output"][0]["arguments"])["a"] == 10**30


async def test_a_call_that_broke_off_has_no_input_in_a_whole_message() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"city": "Os'
    door = tool_door(writes(text, reason=FinishReason.LENGTH))
    answer = (await door.post(MESSAGES, messages_body(tools=[TOOL]))).json()
    assert [(block["name"], block["input"]) for block in answer["content"]] == [("f", {})]
    assert answer["stop_reason"] == "max_tokens"
    flat = {"type": "function", "name": "f"}
    response = (await door.post(RESPONSES, responses_body(tools=[flat]))).json()
    assert [(item["arguments"], item["status"]) for item in response["output"]] == [('{"city": "Os', "incomplete")]

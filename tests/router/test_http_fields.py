"""Every field of both generation endpoints meets every wrong value, over HTTP; and every optional field meets null."""

import json
from typing import Any

import msgspec
import pytest

from kvferry_rpc.common_pb2 import FinishReason
from router.http.openai_requests import ChatBody, CompletionBody
from tests.support.http_door import Door, chat_body, completion_body, ids_of
from tests.support.scripted_source import Finish

ENDPOINTS = {
    "/v1/chat/completions": (ChatBody, chat_body),
    "/v1/completions": (CompletionBody, completion_body),
}
WRONG = ["NaN", "Infinity", "-Infinity", "1e309", "-1", '"0.7"', "true", "[]", "{}", "1.5", "1" + "0" * 30, "9" * 5000]

# Values of the list above that a field takes, because they are right for it.
TAKEN: dict[str, set[str]] = {
    "temperature": {"1.5"},
    "repetition_penalty": {"1.5"},
    "presence_penalty": {"1.5", "-1"},
    "frequency_penalty": {"1.5", "-1"},
    "stop": {'"0.7"', "[]"},
    "stop_token_ids": {"[]"},
    "logit_bias": {"{}"},
    "metadata": {"{}"},
    "stream_options": set(),
    "user": {'"0.7"'},
    "safety_identifier": {'"0.7"'},
    "prompt_cache_key": {'"0.7"'},
    "prompt": {'"0.7"'},
    "stream": {"true"},
    "ignore_eos": {"true"},
    "kv_receipt": {"true"},
    "logprobs": {"true"},  # chat; for completions it is a number, see below
    "parallel_tool_calls": {"true"},
    "echo": {"true"},
    "cache_salt": {'"0.7"'},
    "priority": {"-1"},
}
UNKNOWN_MODEL = {("model", '"0.7"')}


def script(_: Any) -> list[Any]:
    return [ids_of("fine"), Finish(FinishReason.LENGTH)]


def fields_of(kind: type) -> list[msgspec.inspect.Field]:
    info = msgspec.inspect.type_info(kind)
    assert isinstance(info, msgspec.inspect.StructType)
    return list(info.fields)


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_wrong_values_are_refused_by_name_and_the_door_goes_on_serving(path: str) -> None:
    kind, base = ENDPOINTS[path]
    door = Door(script)
    for field in fields_of(kind):
        for value in WRONG:
            taken = value in TAKEN.get(field.name, set()) and not (kind is CompletionBody and field.name == "logprobs")
            rest = {key: part for key, part in base().items() if key != field.name}
            body = json.dumps(rest)[:-1] + f', "{field.name}": {value}}}'
            answer = await door.post(path, body.encode())
            where = f"{field.name} = {value[:40]}"
            if taken:
                assert answer.status_code == 200, where
                continue
            error = json.loads(answer.content, parse_constant=pytest.fail)["error"]
            assert answer.status_code == (404 if (field.name, value) in UNKNOWN_MODEL else 400), where
            assert error["param"].partition("[")[0].partition(".")[0] == field.name, where
            assert error["type"] == "invalid_request_error", where
            assert isinstance(error["message"], str), where
            assert error["code"] in ("invalid_request", "context_length_exceeded", "model_not_found"), where
    assert not door.source.running
    assert (await door.post(path, base())).status_code == 200


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_null_is_the_same_as_absent(path: str) -> None:
    kind, base = ENDPOINTS[path]
    door = Door(script)
    plain = (await door.post(path, base(seed=1))).json()
    for field in fields_of(kind):
        answer = await door.post(path, base(seed=1) | {field.name: None})
        if field.required:
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, field.name)
            continue
        assert answer.status_code == 200, field.name
        assert answer.json()["choices"] == plain["choices"], field.name
        if field.name != "seed":
            assert door.source.requests[-1].sampling == door.source.requests[0].sampling, field.name


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_an_unknown_field_is_refused_by_name(path: str) -> None:
    answer = await Door(script).post(path, ENDPOINTS[path][1](temprature=0.5))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "temprature")

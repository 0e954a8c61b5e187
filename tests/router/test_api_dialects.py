"""`/v1/messages` and `/v1/responses` say what `/v1/chat/completions` says: same requests, and streams that are the
whole answer in pieces."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry_rpc.common_pb2 import FinishReason
from router.text.chat_format import ChatFormat
from tests.support.api_dialects import (
    MESSAGES,
    RESPONSES,
    message_of,
    messages_body,
    named_events,
    response_of,
    responses_body,
    without_ids,
)
from tests.support.http_door import Door, chat_body, one_by_one
from tests.support.scripted_source import Finish
from tests.support.served_door import writing_door
from tests.support.tool_templates import WEATHER, tokenizer_of, tool_door, written

CHAT = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FUNCTION: dict[str, Any] = WEATHER["function"]  # type: ignore[assignment]
FLAT_TOOL = {"type": "function", **FUNCTION}
INPUT_TOOL = {"name": FUNCTION["name"], "description": FUNCTION["description"], "input_schema": FUNCTION["parameters"]}
ARGUMENTS = {"city": "Oslo", "days": 2}
CALL = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": json.dumps(ARGUMENTS)}}
FORCED = {"type": "function", "function": {"name": "get_weather"}}

# A chat, and the same as fields of /v1/responses and of /v1/messages.
SAME: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "a question": ({}, {}, {}),
    "a system prompt": (
        {"messages": [{"role": "system", "content": "Brief."}, {"role": "user", "content": "Hi."}]},
        {"instructions": "Brief.", "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi."}]}]},
        {
            "system": [{"type": "text", "text": "Brief.", "cache_control": {"type": "ephemeral"}}],
            "messages": [{"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i."}]}],
        },
    ),
    "sampling": (
        {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "max_tokens": 9, "cache_salt": "s", "priority": 0},
        {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "max_output_tokens": 9, "cache_salt": "s", "priority": 0},
        {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "max_tokens": 9, "cache_salt": "s", "priority": 0},
    ),
    "a schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}},
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    ),
    "tools": ({"tools": [WEATHER]}, {"tools": [FLAT_TOOL]}, {"tools": [INPUT_TOOL]}),
    "one call at most": (
        {"tools": [WEATHER], "parallel_tool_calls": False},
        {"tools": [FLAT_TOOL], "parallel_tool_calls": False},
        {"tools": [INPUT_TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
    ),
    "some call": (
        {"tools": [WEATHER], "tool_choice": "required"},
        {"tools": [FLAT_TOOL], "tool_choice": "required"},
        {"tools": [INPUT_TOOL], "tool_choice": {"type": "any"}},
    ),
    "this call": (
        {"tools": [WEATHER], "tool_choice": FORCED},
        {"tools": [FLAT_TOOL], "tool_choice": {"type": "function", "name": "get_weather"}},
        {"tools": [INPUT_TOOL], "tool_choice": {"type": "tool", "name": "get_weather"}},
    ),
    "no call": (
        {"tools": [WEATHER], "tool_choice": "none"},
        {"tools": [FLAT_TOOL], "tool_choice": "none"},
        {"tools": [INPUT_TOOL], "tool_choice": {"type": "none"}},
    ),
    "answers in a row": (
        {
            "messages": [
                {"role": "assistant", "content": "A"},
                {"role": "assistant", "content": "B", "reasoning_content": "Hm."},
                {"role": "user", "content": "Q"},
            ]
        },
        {
            "input": [
                {"role": "assistant", "content": "A"},
                {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]},
                {"role": "assistant", "content": "B"},
                {"role": "user", "content": "Q"},
            ]
        },
        {
            "messages": [
                {"role": "assistant", "content": "A"},
                {
                    "role": "assistant",
                    "content": [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "B"}],
                },
                {"role": "user", "content": "Q"},
            ]
        },
    ),
    "a round with a tool": (
        {
            "messages": [
                {"role": "user", "content": "Q"},
                {"role": "assistant", "content": "Look.", "reasoning_content": "Hm.", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c1", "content": "Rain."},
                {"role": "user", "content": "So?"},
            ]
        },
        {
            "input": [
                {"role": "user", "content": "Q"},
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Look."}]},
                {
                    "type": "function_call",
                    "call_id": "c1",
                    "name": "get_weather",
                    "arguments": CALL["function"]["arguments"],  # type: ignore[index]
                },
                {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "Rain."}]},
                {"role": "user", "content": "So?"},
            ]
        },
        {
            "messages": [
                {"role": "user", "content": "Q"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "Hm.", "signature": ""},
                        {"type": "text", "text": "Look."},
                        {"type": "tool_use", "id": "c1", "name": "get_weather", "input": ARGUMENTS},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "c1", "content": "Rain.", "is_error": False},
                        {"type": "text", "text": "So?"},
                    ],
                },
            ]
        },
    ),
}


@pytest.mark.parametrize("name", SAME)
async def test_the_same_chat_is_the_same_request_over_every_api(name: str) -> None:
    chat, response, message = SAME[name]
    door = writing_door("Fine.")
    bodies = {
        CHAT: chat_body(seed=3, max_tokens=64) | chat,
        RESPONSES: responses_body(seed=3, max_output_tokens=64) | response,
        MESSAGES: messages_body(seed=3) | message,
    }
    for path, body in bodies.items():
        answer = await door.post(path, body)
        assert answer.status_code == 200, answer.text
    first, *others = door.source.requests
    for request in others:
        assert request.prompt_token_ids == first.prompt_token_ids
        assert request.sampling == first.sampling
        assert (request.cache_salt, request.stop, request.shown_tokens) == (
            first.cache_salt,
            first.stop,
            first.shown_tokens,
        )


PIECES = [
    "<think>Hm <b>.</think>",
    "Look: ",
    written("hermes", [("get_weather", ARGUMENTS)]),
    "\nthen\n",
    written("hermes", [("clock", {}), ("get_weather", {"city": "Ål \U0001f600"})]),
    "<tool_call>{no call}",
    " ok",
]
TOOLS = [{"type": "function", "function": {"name": "clock"}}, WEATHER]


@settings(deadline=None, max_examples=12)
@given(st.lists(st.sampled_from(PIECES), max_size=5), st.randoms(use_true_random=False), st.booleans())
async def test_a_stream_is_the_whole_answer_however_it_was_cut(pieces: list[str], rng: Any, is_cut: bool) -> None:
    ids = tokenizer_of("hermes").encode("".join(pieces), add_special_tokens=False)
    reason = FinishReason.LENGTH if is_cut else FinishReason.STOP

    def script(_: Any) -> Any:
        rest = ids
        while rest:
            size = rng.randint(1, 6)
            yield rest[:size]
            rest = rest[size:]
        yield Finish(reason, cached_tokens=2)

    door = tool_door(script, chat=ChatFormat("hermes", reasoning=True))
    flat = [{"type": "function", **tool["function"]} for tool in TOOLS]  # type: ignore[dict-item]
    body = responses_body(tools=flat)
    whole = (await door.post(RESPONSES, body)).json()
    streamed = response_of(named_events((await door.post(RESPONSES, body | {"stream": True})).content))
    for response in (whole, streamed):
        # Depends on which tokens came together.
        assert response["usage"].pop("output_tokens_details")["reasoning_tokens"] <= len(ids)
    assert without_ids(streamed) == without_ids(whole)
    assert whole["output"]
    inputs = [{"name": "clock", "input_schema": {"type": "object"}}, INPUT_TOOL]
    body = messages_body(tools=inputs)
    whole = (await door.post(MESSAGES, body)).json()
    streamed = message_of(named_events((await door.post(MESSAGES, body | {"stream": True})).content))
    assert without_ids(streamed) == without_ids(whole)


async def test_an_answer_of_nothing_is_an_empty_text_or_no_block() -> None:
    door = Door(lambda _: [Finish()])
    response = response_of(named_events((await door.post(RESPONSES, responses_body(stream=True))).content))
    assert [item["content"][0]["text"] for item in response["output"]] == [""]
    message = message_of(named_events((await door.post(MESSAGES, messages_body(stream=True))).content))
    assert (message["content"], message["stop_reason"]) == ([], "end_turn")


@pytest.mark.parametrize("headers", [{"x-kvferry-receipt": "1"}, {}])
async def test_the_receipt_is_in_the_final_object_when_it_is_wanted(headers: dict[str, str]) -> None:
    door = Door(lambda _: one_by_one("Well."))
    for path, body in ((MESSAGES, messages_body()), (RESPONSES, responses_body())):
        whole = (await door.post(path, body, headers=headers)).json()
        events = named_events((await door.post(path, body | {"stream": True}, headers=headers)).content)
        last = events[-1]["response"] if path == RESPONSES else events[-2]
        for answer in (whole, last):
            assert ("kv_receipt" in answer) == bool(headers)
        if headers:
            assert whole["kv_receipt"]["request_id"] == whole["id"]
            assert last["kv_receipt"]["transport"] == "shm"
        by_field = (await door.post(path, body | {"kv_receipt": True})).json()
        assert by_field["kv_receipt"]["request_id"] == by_field["id"]

"""Tool calls and reasoning over the HTTP door, as the official client sees them."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from kvferry_rpc.common_pb2 import FinishReason, Grammar
from router.http.protocol import HttpServer
from router.text.chat_format import ChatFormat
from tests.support.http_door import MODEL, Door, chat_body, completion_body, events, says
from tests.support.scripted_source import Finish, Script
from tests.support.tool_templates import CLOCK, TOOLS, WEATHER, tokenizer_of, tool_door, written

CHAT = "/v1/chat/completions"
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("get_weather", {"city": "Ål \U0001f600"}),
    ("clock", {}),
    ("get_weather", {"city": "Oslo", "days": 2}),
]
STYLES = ["hermes", "llama3", "mistral", "mistral-args"]
QUESTION: Any = [{"role": "user", "content": "How is the weather?"}]


def assistant_call(**fields: Any) -> dict[str, Any]:
    """A message with one call, which differs from a good one in these fields."""
    call = {"id": "i", "type": "function", "function": {"name": "f", "arguments": "{}"}, **fields}
    return {"role": "assistant", "tool_calls": [call]}


def writes(text: str, style: str = "hermes", *markers: str, **finish: Any) -> Script:
    """A script that emits `text` token by token, in the vocabulary of the door's model."""
    tokenizer = tokenizer_of(style, *markers)
    return lambda _: [*([token] for token in tokenizer.encode(text, add_special_tokens=False)), Finish(**finish)]


def door_of(text: str, style: str = "hermes", **options: Any) -> Door:
    return tool_door(writes(text, style), style, **options)


@asynccontextmanager
async def client_of(door: Door) -> AsyncIterator[openai.AsyncOpenAI]:
    server = HttpServer(door.app, host="127.0.0.1", port=0)
    await server.start()
    base_url = f"http://127.0.0.1:{server.port}/v1"
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client
    await server.close(grace_s=1)


@pytest.mark.parametrize("style", STYLES)
async def test_parallel_calls_streamed_and_whole(style: str) -> None:
    answers: Any = {"model": MODEL, "messages": QUESTION, "tools": TOOLS, "n": 2, "seed": 1}
    async with client_of(door_of(written(style, CALLS), style.partition("-")[0])) as client:
        whole = await client.chat.completions.create(**answers)
        stream = await client.chat.completions.create(**answers, stream=True)
        deltas: list[dict[int, list[Any]]] = [{}, {}]
        reasons: list[list[str]] = [[], []]
        async for chunk in stream:
            for choice in chunk.choices:
                reasons[choice.index].extend([choice.finish_reason] if choice.finish_reason else [])
                assert not choice.delta.content
                for call in choice.delta.tool_calls or ():
                    deltas[choice.index].setdefault(call.index, []).append(call)
    assert reasons == [["tool_calls"]] * 2
    for choice, streamed in zip(whole.choices, deltas, strict=True):
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        assert choice.message.tool_calls is not None
        assert list(streamed) == [0, 1, 2]
        for call, (name, arguments), (first, *rest) in zip(
            choice.message.tool_calls, CALLS, streamed.values(), strict=True
        ):
            assert call.type == "function"
            assert call.function.name == first.function.name == name
            assert (first.type, first.function.arguments is not None) == ("function", True)
            assert all((delta.id, delta.type, delta.function.name) == (None, None, None) for delta in rest)
            pieces = [delta.function.arguments for delta in (first, *rest)]
            assert "".join(pieces) == call.function.arguments
            assert json.loads(call.function.arguments) == arguments
    ids = [call.id for choice in whole.choices for call in choice.message.tool_calls or ()]
    assert len(set(ids)) == 6


async def test_a_whole_round_with_the_answer_of_a_tool() -> None:
    async with client_of(door_of("Let me look.\n" + written("hermes", CALLS[:1]))) as client:
        first = await client.chat.completions.create(model=MODEL, messages=QUESTION, tools=[WEATHER])  # type: ignore[list-item]
        message = first.choices[0].message
        assert message.content == "Let me look."
        assert message.tool_calls is not None
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Rain."}
        # The message goes back as it came, nulls included.
        messages: Any = [*QUESTION, message.model_dump(), result]
        await client.chat.completions.create(model=MODEL, messages=messages)


async def test_the_prompt_holds_tools_calls_and_results() -> None:
    door = door_of("Fine.")
    call = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": ""}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "name": "clock", "content": [{"type": "text", "text": "12:00"}]},
    ]
    body = chat_body(tools=[CLOCK]) | {"messages": messages}
    assert (await door.post(CHAT, body)).status_code == 200
    prompt = tokenizer_of("hermes").decode(door.source.requests[0].prompt_token_ids, skip_special_tokens=False)
    assert json.dumps(CLOCK) in prompt
    assert "<|im_start|>system\nBe brief.<|im_end|>" in prompt
    assert '<tool_call>{"name": "clock", "arguments": {}}</tool_call>' in prompt
    assert "<tool_response>12:00</tool_response>" in prompt
    tokens = (await door.post("/tokenize", {"messages": messages, "tools": [CLOCK]})).json()["tokens"]
    assert tokens == list(door.source.requests[0].prompt_token_ids)


@pytest.mark.parametrize(
    ("style", "markers"),
    [
        ("hermes", ("<tool_call>", "</tool_call>", "<think>", "</think>")),
        ("mistral-args", ("[TOOL_CALLS]", "[ARGS]")),
        ("llama3", ("<|python_tag|>",)),
    ],
)
async def test_markers_that_are_special_tokens_are_read_and_other_special_tokens_dropped(
    style: str, markers: tuple[str, ...]
) -> None:
    text = ("<|python_tag|>" if style == "llama3" else "") + written(style, CALLS[:2]) + "<|user|>"
    style = style.partition("-")[0]
    door = tool_door(writes(text, style, *markers), style, *markers)
    choice = (await door.post(CHAT, chat_body(tools=TOOLS))).json()["choices"][0]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["get_weather", "clock"]
    assert choice["message"]["content"] is None
    plain = (await door.post(CHAT, chat_body())).json()["choices"][0]["message"]
    assert "tool_calls" not in plain
    assert not any(marker in plain["content"] for marker in markers)


async def test_logprobs_stay_those_of_the_tokens_received() -> None:
    text = "I see <b. " + written("hermes", CALLS)
    body = chat_body(tools=TOOLS, logprobs=True, stop=["zzzz"])
    door = door_of(text)
    whole = (await door.post(CHAT, body)).json()["choices"][0]
    *chunks, _ = events((await door.post(CHAT, body | {"stream": True})).content)
    choices = [chunk["choices"][0] for chunk in chunks]
    streamed = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert streamed == whole["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in streamed).decode() == text
    tokens, shown = b"", ""
    for choice in choices:
        tokens += b"".join(bytes(entry["bytes"]) for entry in (choice["logprobs"] or {"content": []})["content"])
        shown += choice["delta"].get("content") or ""
        assert tokens.decode(errors="ignore").startswith(shown)


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.STOP])
async def test_a_call_that_was_cut_off_ends_with_the_reason(reason: "FinishReason.ValueType") -> None:
    text = '<tool_call>{"name": "get_weather", "arguments": {"city": "Os'
    door = tool_door(writes(text, reason=reason))
    choice = (await door.post(CHAT, chat_body(tools=TOOLS))).json()["choices"][0]
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Os'
    assert choice["finish_reason"] == ("length" if reason == FinishReason.LENGTH else "tool_calls")


async def test_what_is_no_call_is_content_and_the_reason_is_stop() -> None:
    text = '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>'
    choice = (await door_of(text).post(CHAT, chat_body(tools=TOOLS))).json()["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": text, "refusal": None}
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [True, False])
async def test_without_parallel_calls_the_answer_ends_behind_the_first(stream: bool) -> None:
    door = door_of(written("hermes", CALLS) + " and text")
    body = chat_body(tools=TOOLS, parallel_tool_calls=False, stream=stream)
    answer = await door.post(CHAT, body)
    assert answer.text.count('"id":"call_') == 1
    assert '"finish_reason":"tool_calls"' in answer.text
    assert "and text" not in answer.text
    assert len(door.source.had_enough) == 1


@pytest.mark.parametrize("style", STYLES[:3])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
async def test_a_forced_call_has_a_grammar_and_is_read_as_a_call(style: str, choice: Any) -> None:
    door = door_of(written("forced", CALLS[:1]), style, chat=ChatFormat(style, reasoning=True))
    answer = (await door.post(CHAT, chat_body(tools=TOOLS, tool_choice=choice))).json()["choices"][0]
    grammar = door.source.requests[0].sampling.grammar
    assert (grammar.kind, grammar.field) == (Grammar.JSON_SCHEMA, "tools")
    assert ("clock" in grammar.text) == (choice == "required")
    assert answer["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
    assert answer["message"]["content"] is None
    assert answer["finish_reason"] == "tool_calls"


async def test_with_the_choice_none_the_model_knows_of_no_tools() -> None:
    text = written("hermes", CALLS)
    door = door_of(text)
    answer = (await door.post(CHAT, chat_body(tools=TOOLS, tool_choice="none"))).json()["choices"][0]
    assert answer["message"]["content"] == text
    assert answer["finish_reason"] == "stop"
    plain = await door.post(CHAT, chat_body())
    assert plain.status_code == 200
    first, second = door.source.requests
    assert first.prompt_token_ids == second.prompt_token_ids


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tools": [{"type": "wibble"}]}, "tools[0].type"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": []}, "tools"),
        ({"tools": {}}, "tools"),
        ({"tools": [CLOCK] * 129}, "tools"),
        ({"tools": [CLOCK], "tool_choice": "clock"}, "tool_choice"),
        ({"tools": [CLOCK], "tool_choice": {"type": "function"}}, "tool_choice.function"),
        (
            {"tools": [CLOCK], "tool_choice": {"type": "allowed_tools", "function": {"name": "clock"}}},
            "tool_choice.type",
        ),
        ({"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [CLOCK], "response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [CLOCK], "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"tools": [CLOCK], "tool_choice": "required", "min_tokens": 2}, "min_tokens"),
        ({"tools": [CLOCK], "tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
        ({"tools": [CLOCK], "chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ],
)
async def test_wrong_fields_are_refused_by_name_before_any_work(fields: dict[str, Any], field: str) -> None:
    door = door_of("never")
    answer = await door.post(CHAT, chat_body(**fields))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
    assert not door.source.requests
    assert door.refused == ["invalid_request"]


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "tool", "content": "x"}, "tool_call_id"),
        ({"role": "tool", "tool_call_id": "i"}, "content"),
        ({"role": "user", "content": "x", "tool_call_id": "i"}, "tool_call_id"),
        ({"role": "user", "content": "x", "name": "n"}, "name"),
        ({"role": "user", "content": "x", "tool_calls": []}, "tool_calls"),
        ({"role": "user", "content": "x", "reasoning_content": "x"}, "reasoning_content"),
        ({"role": "assistant"}, "content"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "content"),
        (assistant_call(type="custom"), "tool_calls.type"),
        (assistant_call(more=1), "tool_calls.more"),
        (assistant_call(function={"name": "f", "arguments": "x"}), "tool_calls.function.arguments"),
        (assistant_call(function={"name": "f", "arguments": {}}), "tool_calls.function.arguments"),
    ],
)
async def test_a_message_is_checked_by_its_role(message: dict[str, Any], field: str) -> None:
    answer = await door_of("never").post(CHAT, chat_body() | {"messages": [message]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].replace("[0]", "").replace("[]", "") == f"messages.{field}"


async def test_a_result_must_name_a_call_before_it() -> None:
    call = assistant_call(id="c1", function={"name": "clock", "arguments": "{}"})
    result = {"role": "tool", "content": "12:00"}
    door = door_of("never")
    for messages, index in (
        ([{**result, "tool_call_id": "c1"}, call], 0),
        ([call, {**result, "tool_call_id": "c2"}], 1),
        ([call, {**result, "tool_call_id": "c1"}, {**result, "tool_call_id": ""}], 2),
    ):
        answer = await door.post(CHAT, chat_body(messages=messages))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, f"messages[{index}].tool_call_id")
    assert not door.source.requests
    twice = [*QUESTION, call, {**result, "tool_call_id": "c1"}, *QUESTION, {**result, "tool_call_id": "c1"}]
    assert (await door.post(CHAT, chat_body(messages=twice))).status_code == 200


async def test_a_model_without_a_place_for_tools_refuses_them() -> None:
    unknown = await door_of("never", chat=ChatFormat()).post(CHAT, chat_body(tools=TOOLS))
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "tools")
    # The plain test model: its template has no tools, whatever the flag says.
    limits = tool_door(lambda _: [], "hermes").services.limits()
    plain = await Door(lambda _: [], limits=lambda: limits).post(CHAT, chat_body(tools=TOOLS))
    assert (plain.status_code, plain.json()["error"]["param"]) == (400, "tools")


THOUGHT = "<think>\nLet me <b>think</b>.\n</think>\n\nForty-two."


@pytest.mark.parametrize("opened", [False, True])
async def test_reasoning_is_split_off_in_streams_and_bodies(opened: bool) -> None:
    text = THOUGHT.removeprefix("<think>") if opened else THOUGHT
    door = door_of(text, think=opened, chat=ChatFormat(reasoning=True))
    async with client_of(door) as client:
        whole = await client.chat.completions.create(model=MODEL, messages=QUESTION)
        stream = await client.chat.completions.create(model=MODEL, messages=QUESTION, stream=True)
        chunks: list[Any] = [chunk async for chunk in stream]
    message: Any = whole.choices[0].message
    assert (message.reasoning_content, message.content) == ("Let me <b>think</b>.", "Forty-two.")
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == message.reasoning_content
    assert "".join(delta.content or "" for delta in deltas) == message.content
    assert whole.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_usage_of_a_chat_counts_the_tokens_of_its_reasoning(stream: bool) -> None:
    door = door_of(THOUGHT, chat=ChatFormat(reasoning=True))
    body = chat_body(stream=stream, n=2, seed=1, **({"stream_options": {"include_usage": True}} if stream else {}))
    answer = await door.post(CHAT, body)
    usage = events(answer.content)[-2]["usage"] if stream else answer.json()["usage"]
    reasoning_tokens = usage["completion_tokens_details"]["reasoning_tokens"]
    # What belongs to the reasoning is known once its end is: at the closing marker, which may take several tokens.
    least, most = (
        2 * len(tokenizer_of("hermes").encode(text, add_special_tokens=False))
        for text in ("<think>\nLet me <b>think</b>.", "<think>\nLet me <b>think</b>.\n</think>")
    )
    assert least <= reasoning_tokens <= most
    plain = await Door(says("Hello.")).post("/v1/completions", completion_body())
    assert "completion_tokens_details" not in plain.json()["usage"]


async def test_reasoning_goes_before_calls() -> None:
    door = door_of(
        THOUGHT.replace("Forty-two.", written("hermes", CALLS[:1])), chat=ChatFormat("hermes", reasoning=True)
    )
    message = (await door.post(CHAT, chat_body(tools=TOOLS))).json()["choices"][0]["message"]
    assert message["reasoning_content"] == "Let me <b>think</b>."
    assert message["content"] is None
    assert len(message["tool_calls"]) == 1


async def test_an_answer_with_a_format_has_no_room_for_reasoning() -> None:
    door = door_of('{"a": 1}', think=True, chat=ChatFormat(reasoning=True))
    body = chat_body(response_format={"type": "json_object"})
    message = (await door.post(CHAT, body)).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": '{"a": 1}', "refusal": None}

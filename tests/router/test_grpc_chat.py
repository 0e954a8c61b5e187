"""Conversations, tools and several choices over gRPC: the same request as over HTTP, and the same answer."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvferry_rpc.common_pb2 import ErrorCode, FinishReason, Grammar, SamplingParams
from kvferry_rpc.public_pb2 import (
    ChatMessage,
    ChatPrompt,
    GenerateRequest,
    GenerateResponse,
    TokenizeRequest,
    Tool,
    ToolCall,
    ToolChoice,
)
from router.grpc.server import SERVICE_NAME
from router.text.chat_format import ChatFormat
from runtime.grpc_life import channel
from tests.support.grpc_door import at_door, serving
from tests.support.http_door import MODEL, Door, chat_body, completion_body, says, tokenizer
from tests.support.scripted_source import Finish, Script
from tests.support.tool_templates import CLOCK, TOOLS, tokenizer_of, tool_door, written

CHAT = "/v1/chat/completions"
CALLS: list[tuple[str, dict[str, Any]]] = [("get_weather", {"city": "Ål \U0001f600"}), ("clock", {})]


def tools_of(tools: Sequence[dict[str, Any]]) -> list[Tool]:
    return [
        Tool(
            name=tool["function"]["name"],
            description=tool["function"].get("description"),
            parameters_json=json.dumps(tool["function"]["parameters"]) if "parameters" in tool["function"] else "",
        )
        for tool in tools
    ]


GRPC_TOOLS = tools_of(TOOLS)
GRPC_CLOCK = tools_of([CLOCK])
QUESTION = ChatPrompt(messages=[ChatMessage(role="user", content="Say something.")])


def writes(text: str, style: str = "hermes", **finish: Any) -> Script:
    token_ids = tokenizer_of(style).encode(text, add_special_tokens=False)
    return lambda _: [*([token] for token in token_ids), Finish(**finish)]


def door_of(text: str, style: str = "hermes", **options: Any) -> Door:
    return tool_door(writes(text, style), style, **options)


def calls_of(parts: Sequence[GenerateResponse], index: int = 0) -> list[tuple[str, str, str]]:
    """Id, name and arguments of each call of a choice."""
    calls: list[list[str]] = []
    for part in parts:
        for delta in part.tool_calls if part.index == index else ():
            if delta.index == len(calls):
                calls.append([delta.id, delta.name, delta.arguments])
            else:
                assert (delta.index, delta.id, delta.name) == (len(calls) - 1, "", "")
                calls[-1][2] += delta.arguments
    return [(call_id, name, arguments) for call_id, name, arguments in calls]


@pytest.mark.parametrize("style", ["hermes", "llama3", "mistral", "mistral-args"])
async def test_calls_and_several_choices_are_those_of_http(style: str) -> None:
    door = door_of(written(style, CALLS), style.partition("-")[0])
    whole = (await door.post(CHAT, chat_body(tools=TOOLS, n=2, seed=7))).json()
    async with at_door(door) as caller:
        sampling = SamplingParams(seed=7)
        parts = await caller.generate(chat=QUESTION, tools=GRPC_TOOLS, n=2, sampling=sampling, has_seed=True)
    http, grpc_ = door.source.requests[:2], door.source.requests[2:]
    assert [request.sampling.seed for request in grpc_] == [7, 8]
    for one, other in zip(http, grpc_, strict=True):
        same = {"request_id": "", "deadline": 0.0, "endpoint": ""}
        assert replace(one, **same) == replace(other, **same)
    ids: set[str] = set()
    for choice in whole["choices"]:
        index = choice["index"]
        found = calls_of(parts, index)
        expected = [
            (call["function"]["name"], call["function"]["arguments"]) for call in choice["message"]["tool_calls"]
        ]
        assert [call[1:] for call in found] == expected
        assert [json.loads(call[2]) for call in found] == [arguments for _, arguments in CALLS]
        ids |= {call[0] for call in found}
        finish = [part.finish for part in parts if part.index == index and part.HasField("finish")]
        assert [end.reason for end in finish] == [FinishReason.TOOL_CALLS]
        assert finish[0].prompt_tokens == whole["usage"]["prompt_tokens"]
    assert len(ids) == 4
    assert not any(part.text or part.reasoning for part in parts)
    assert len({part.request_id for part in parts}) == 1


MESSAGES: list[dict[str, Any]] = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": "What time is it?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "clock", "arguments": '{"a": 1}'}}],
    },
    {"role": "tool", "tool_call_id": "c1", "name": "clock", "content": "12:00"},
    {"role": "assistant", "content": "Noon.", "reasoning_content": "It says 12."},
]
GRPC_MESSAGES = [
    ChatMessage(role="developer", content="Be brief."),
    ChatMessage(role="user", content="What time is it?"),
    ChatMessage(role="assistant", tool_calls=[ToolCall(id="c1", name="clock", arguments='{"a": 1}')]),
    ChatMessage(role="tool", tool_call_id="c1", name="clock", content="12:00"),
    ChatMessage(role="assistant", content="Noon.", reasoning_content="It says 12."),
]


async def test_a_conversation_with_tools_has_the_same_tokens_over_both_doors() -> None:
    # H017
    door = door_of("Fine.")
    body = chat_body(tools=[CLOCK]) | {"messages": MESSAGES}
    prompt_tokens = (await door.post(CHAT, body)).json()["usage"]["prompt_tokens"]
    tokens = (await door.post("/tokenize", {"messages": MESSAGES, "tools": [CLOCK]})).json()["tokens"]
    async with at_door(door) as caller:
        chat = ChatPrompt(messages=GRPC_MESSAGES)
        parts = await caller.generate(chat=chat, tools=GRPC_CLOCK)
        answer = await caller.stub.Tokenize(TokenizeRequest(model=MODEL, chat=chat, tools=GRPC_CLOCK))
    first, second = door.source.requests
    assert list(first.prompt_token_ids) == list(second.prompt_token_ids) == list(answer.token_ids) == tokens
    assert parts[-1].finish.prompt_tokens == prompt_tokens == len(tokens)
    assert "".join(part.text for part in parts) == "Fine."


async def test_a_text_becomes_the_same_request_over_both_doors() -> None:
    door = Door(says("Hello."))
    fields = {"max_tokens": 9, "min_tokens": 1, "temperature": 0.5, "top_p": 0.5, "top_k": 3, "seed": 5}
    more = {"stop": ["x"], "stop_token_ids": [7], "cache_salt": "s", "priority": 2, "slo": "batch"}
    body = completion_body(**fields, **more, logprobs=2, n=2, kv_receipt=True)
    assert (await door.post("/v1/completions", body)).status_code == 200
    async with at_door(door) as caller:
        sampling = SamplingParams(**fields, stop_token_ids=more.pop("stop_token_ids"), num_logprobs=2)
        parts = await caller.generate(text="Once upon", sampling=sampling, n=2, with_receipt=True, **more)
    http, grpc_ = door.source.requests[:2], door.source.requests[2:]
    for one, other in zip(http, grpc_, strict=True):
        same = {"request_id": "", "deadline": 0.0, "endpoint": ""}
        assert replace(one, **same) == replace(other, **same)
    receipts = [part.finish.receipt.request_id for part in parts if part.HasField("finish")]
    assert sorted(receipts) == [request.request_id for request in grpc_]
    assert sorted(receipts) == [parts[0].request_id, f"{parts[0].request_id}-1"]


async def test_reasoning_is_apart_from_the_text() -> None:
    door = door_of("<think>\nLet me see.\n</think>\n\nForty-two.", chat=ChatFormat(reasoning=True))
    async with at_door(door) as caller:
        parts = await caller.generate(chat=QUESTION)
        plain = await caller.generate(text="What?")
    assert "".join(part.reasoning for part in parts) == "Let me see."
    assert "".join(part.text for part in parts) == "Forty-two."
    finish = parts[-1].finish
    assert 0 < finish.reasoning_tokens < finish.completion_tokens
    assert "".join(part.text for part in plain).startswith("<think>")


async def test_a_stop_string_is_named() -> None:
    async with serving(says("One two three.")) as caller:
        parts = await caller.generate(text="Count.", stop=["four", " three"])
        assert "".join(part.text for part in parts) == "One two"
        assert parts[-1].finish.stop_string == " three"
        assert not (await caller.generate(text="Count."))[-1].finish.HasField("stop_string")


async def test_without_parallel_calls_the_answer_ends_behind_the_first() -> None:
    door = door_of(written("hermes", CALLS) + " and text")
    async with at_door(door) as caller:
        parts = await caller.generate(chat=QUESTION, tools=GRPC_TOOLS, parallel_tool_calls=False)
    assert [name for _, name, _ in calls_of(parts)] == ["get_weather"]
    assert parts[-1].finish.reason == FinishReason.TOOL_CALLS
    assert len(door.source.had_enough) == 1


@pytest.mark.parametrize("choice", [ToolChoice(mode=ToolChoice.REQUIRED), ToolChoice(function="get_weather")])
async def test_a_forced_call_has_a_grammar(choice: ToolChoice) -> None:
    door = door_of(written("forced", CALLS[:1]))
    async with at_door(door) as caller:
        parts = await caller.generate(chat=QUESTION, tools=GRPC_TOOLS, tool_choice=choice)
    grammar = door.source.requests[0].sampling.grammar
    assert (grammar.kind, grammar.field) == (Grammar.JSON_SCHEMA, "tools")
    assert ("clock" in grammar.text) == (choice.function == "")
    assert [name for _, name, _ in calls_of(parts)] == ["get_weather"]


async def test_with_the_choice_none_the_model_knows_of_no_tools() -> None:
    text = written("hermes", CALLS)
    door = door_of(text)
    async with at_door(door) as caller:
        none = ToolChoice(mode=ToolChoice.NONE)
        parts = await caller.generate(chat=QUESTION, tools=GRPC_TOOLS, tool_choice=none)
        await caller.generate(chat=QUESTION)
    assert "".join(part.text for part in parts) == text
    assert parts[-1].finish.reason == FinishReason.STOP
    first, second = door.source.requests
    assert first.prompt_token_ids == second.prompt_token_ids


async def test_a_prompt_can_be_scored_without_an_answer() -> None:
    async with serving(says("unseen")) as caller:
        sampling = SamplingParams(prompt_logprobs=1, max_tokens=40)
        parts = await caller.generate(text="One two three.", sampling=sampling, prompt_only=True)
        (request,) = caller.door.source.requests
    assert request.prompt_only
    assert request.sampling.max_tokens == 1
    assert not any(part.text or part.tokens for part in parts)
    entries = [entry for part in parts for entry in part.prompt_logprobs]
    assert len(entries) == len(tokenizer().encode("One two three.")) - 1
    assert (parts[-1].finish.reason, parts[-1].finish.completion_tokens) == (FinishReason.LENGTH, 0)


def message(**fields: Any) -> dict[str, Any]:
    return {"chat": ChatPrompt(messages=[ChatMessage(**fields)])}


def tool(**fields: Any) -> dict[str, Any]:
    return {"tools": [Tool(**{"name": "f", **fields})]}


REQUIRED = ToolChoice(mode=ToolChoice.REQUIRED)
JSON = SamplingParams(grammar=Grammar(kind=Grammar.JSON_OBJECT))
CALL = {"id": "i", "name": "f", "arguments": "{}"}
AT = "chat.messages[0]"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"n": 17}, "n"),
        ({"chat": None, "text": "x", "tools": GRPC_CLOCK}, "tools"),
        ({"tools": GRPC_CLOCK * 2}, "tools[1].name"),
        ({"tools": GRPC_CLOCK * 129}, "tools"),
        (tool(name="no good"), "tools[0].name"),
        (tool(parameters_json="{"), "tools[0].parameters_json"),
        (tool(parameters_json="[]"), "tools[0].parameters_json"),
        (tool(parameters_json='{"type": "object", "title": "%s"}' % ("x" * 300_000)), "tools"),
        (
            {**tool(parameters_json='{"type": "object", "not": {}}'), "tool_choice": REQUIRED},
            "tools[0].parameters_json",
        ),
        ({"tool_choice": REQUIRED}, "tool_choice"),
        ({"tools": GRPC_CLOCK, "tool_choice": ToolChoice(function="f")}, "tool_choice"),
        ({"tools": GRPC_CLOCK, "tool_choice": ToolChoice(mode=9)}, "tool_choice"),  # type: ignore[arg-type]
        ({"tools": GRPC_CLOCK, "sampling": JSON}, "grammar"),
        (message(role="tool", content="x"), AT + ".tool_call_id"),
        (message(role="user", content="x", tool_call_id="i"), AT + ".tool_call_id"),
        (message(role="user", content="x", name="n"), AT + ".name"),
        (message(role="user", content="x", reasoning_content=""), AT + ".reasoning_content"),
        (message(role="user", content="x", tool_calls=[ToolCall(**CALL)]), AT + ".tool_calls"),
        (message(role="assistant", tool_calls=[ToolCall(**CALL | {"id": ""})]), AT + ".tool_calls[0].id"),
        (
            message(role="assistant", tool_calls=[ToolCall(**CALL | {"arguments": "x"})]),
            AT + ".tool_calls[0].arguments",
        ),
        (message(role="assistant", tool_calls=[ToolCall(**CALL)] * 129), AT + ".tool_calls"),
    ],
)
async def test_what_is_wrong_is_named_as_in_the_proto_file(fields: dict[str, Any], field: str) -> None:
    door = door_of("never")
    async with at_door(door) as caller:
        status, error = await caller.refusal(**{"chat": QUESTION} | fields)
    assert (status, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)
    assert error.message.startswith(field)
    assert door.source.requests == []
    assert door.refused == ["invalid_request"]


async def test_a_caller_that_cancels_cancels_every_choice() -> None:
    async with serving(lambda _: [[5], asyncio.Event()]) as caller:
        call = caller.stub.Generate(GenerateRequest(model=MODEL, text="x", n=3))
        await call.read()
        await caller.door.source.wait_until(lambda source: len(source.running) == 3)
        call.cancel()
        await caller.door.source.wait_until(lambda source: len(source.cancelled) == 3)
        assert caller.door.source.running == set()


async def test_one_request_too_many_is_refused_at_once_as_overload() -> None:
    async with serving(lambda _: [[5], asyncio.Event()], max_requests=1) as caller:
        call = caller.stub.Generate(GenerateRequest(model=MODEL, text="x"))
        await call.read()
        status, error = await caller.refusal(text="y")
        assert (status, error.code) == (grpc.StatusCode.RESOURCE_EXHAUSTED, ErrorCode.OVERLOADED)
        assert error.retry_after_ms > 0
        assert caller.door.refused == ["overloaded"]
        call.cancel()
        await caller.door.source.wait_until(lambda source: not source.running)


async def test_both_doors_together_have_one_bound() -> None:
    release = asyncio.Event()
    door = Door(lambda _: [release, [5]], max_requests=2)
    async with at_door(door) as caller:
        answer = asyncio.create_task(door.post(CHAT, chat_body()))
        call = asyncio.create_task(caller.generate(text="x"))
        await door.source.wait_until(lambda source: len(source.running) == 2)
        assert (await door.post(CHAT, chat_body())).status_code == 429
        assert (await caller.refusal(text="y"))[1].code == ErrorCode.OVERLOADED
        release.set()
        assert (await answer).status_code == 200
        assert await call
        assert door.services.cap.in_flight == 0


async def test_reflection_tells_all_that_a_caller_needs_to_know() -> None:
    async def ask() -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
        yield reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE_NAME)

    async with serving(says("x")) as caller, channel(caller.address) as link:
        stub = reflection_pb2_grpc.ServerReflectionStub(link)
        answers = [answer async for answer in stub.ServerReflectionInfo(ask())]
    files = [FileDescriptorProto.FromString(data) for data in answers[0].file_descriptor_response.file_descriptor_proto]
    (file,) = [file for file in files if file.service]
    assert "Generate" in [method.name for method in file.service[0].method]
    (request,) = [kind for kind in file.message_type if kind.name == "GenerateRequest"]
    assert {"chat", "tools", "n"} <= {field.name for field in request.field}

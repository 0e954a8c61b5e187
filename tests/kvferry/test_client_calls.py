"""What the Python client asks and what it makes of the answers, against the router's own front door."""

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import fields
from pathlib import Path
from typing import Any

import grpc
import pytest

import kvferry
from kvferry import (
    AsyncClient,
    ChatAnswer,
    Client,
    Ebnf,
    ErrorCode,
    Finished,
    JsonObject,
    JsonSchema,
    KvferryError,
    Message,
    ReasoningDelta,
    Regex,
    TextDelta,
    Tool,
    ToolCallArguments,
    ToolCallStart,
)
from kvferry.client.types import ClusterState, Completion, WorkerState
from kvferry_rpc import public_pb2, public_pb2_grpc
from kvferry_rpc.common_pb2 import Grammar, KVReceipt
from router.grpc.server import SERVICE_NAME, PublicService
from router.text.chat_format import ChatFormat
from runtime.grpc_life import GrpcServer, channel
from tests.support.grpc_door import at_door, serving
from tests.support.http_door import CONTEXT, MODEL, Door, ids_of, says, tokenizer
from tests.support.scripted_source import Finish
from tests.support.tool_templates import tokenizer_of, tool_door, written

ROOT = Path(__file__).parents[2]
QUESTION = [("user", "How is the weather?")]
WEATHER = Tool("get_weather", "The weather.", {"type": "object", "properties": {"city": {"type": "string"}}})
CLOCK = Tool("clock")
CALLS = [("get_weather", {"city": "Oslo"}), ("clock", {})]


def door_of(text: str, **options: Any) -> Door:
    token_ids = tokenizer_of("hermes").encode(text, add_special_tokens=False)
    return tool_door(lambda _: [*([token] for token in token_ids), Finish(cached_tokens=2)], **options)


async def _sync(address: str, ask: Callable[[Client], Any]) -> Any:
    """What the synchronous client gives, from a thread: its router runs in this event loop."""

    def run() -> Any:
        with Client(address) as client:
            return ask(client)

    return await asyncio.to_thread(run)


async def test_a_chat_with_tools_is_typed_and_the_same_in_both_clients() -> None:
    door = door_of(
        "<think>Hm.</think>Let me look. " + written("hermes", CALLS), chat=ChatFormat("hermes", reasoning=True)
    )
    options: dict[str, Any] = {"tools": [WEATHER, CLOCK], "seed": 0, "with_receipt": True, "logprobs": 1}
    async with at_door(door) as caller, AsyncClient(caller.address) as client:
        answer = await client.chat(QUESTION, **options)
        events = [event async for event in client.stream_chat(QUESTION, **options)]
        same = await _sync(caller.address, lambda client: client.chat(QUESTION, **options))
        same_events = await _sync(caller.address, lambda client: list(client.stream_chat(QUESTION, **options)))
    assert (answer.reasoning, answer.text, answer.finish_reason) == ("Hm.", "Let me look.", "tool_calls")
    assert [(call.name, json.loads(call.arguments)) for call in answer.tool_calls] == CALLS
    assert answer.usage.cached_tokens == 2
    assert 0 < answer.usage.reasoning_tokens < answer.usage.completion_tokens == len(answer.token_ids)
    assert [entry.token_id for entry in answer.logprobs] == list(answer.token_ids)
    assert all(len(entry.alternatives) == 1 for entry in answer.logprobs)
    assert answer.receipt is not None
    assert answer.receipt.request_id == answer.request_id
    assert (same.text, same.token_ids, same.usage) == (answer.text, answer.token_ids, answer.usage)
    for found in (events, same_events):
        assert "".join(event.text for event in found if isinstance(event, ReasoningDelta)) == "Hm."
        assert "".join(event.text for event in found if isinstance(event, TextDelta)) == "Let me look."
        starts = [event for event in found if isinstance(event, ToolCallStart)]
        assert [(start.index, start.name) for start in starts] == [(0, "get_weather"), (1, "clock")]
        pieces = [event.fragment for event in found if isinstance(event, ToolCallArguments) and event.index == 0]
        last = found[-1]
        assert isinstance(last, Finished)
        assert isinstance(last.answer, ChatAnswer)
        assert last.answer.text == answer.text
        assert last.answer.tool_calls[0].arguments == "".join(pieces)
        assert sum(isinstance(event, Finished) for event in found) == 1


async def test_an_answer_and_a_result_go_back_as_messages() -> None:
    door = door_of(written("hermes", CALLS[1:]))
    async with at_door(door) as caller, AsyncClient(caller.address) as client:
        answer = await client.chat(QUESTION, tools=[CLOCK])
        call = answer.tool_calls[0]
        messages = [*QUESTION, answer.message, Message("tool", "12:00", tool_call_id=call.id)]
        await client.chat(messages, tools=[CLOCK])
        tokens = await client.tokenize(messages, tools=[CLOCK])
    prompt = tokenizer_of("hermes").decode(door.source.requests[1].prompt_token_ids, skip_special_tokens=False)
    assert '<tool_call>{"name": "clock", "arguments": {}}</tool_call>' in prompt
    assert "<tool_response>12:00</tool_response>" in prompt
    assert tokens.token_ids == door.source.requests[1].prompt_token_ids


async def test_a_completion_is_typed_and_the_same_in_both_clients() -> None:
    options: dict[str, Any] = {"stop": " three", "prompt_logprobs": 1, "max_tokens": 50}
    async with serving(says("One two three.")) as caller, AsyncClient(caller.address) as client:
        answer = await client.complete("Count to", **options)
        of_ids = await client.complete(tokenizer().encode("Count to"), **options)
        events = [event async for event in client.stream_complete("Count to", **options)]
        same = await _sync(caller.address, lambda client: client.complete("Count to", **options))
        same_events = await _sync(caller.address, lambda client: list(client.stream_complete("Count to", **options)))
        choices = await client.complete_choices("Count to", 3, seed=5)
        more = await _sync(caller.address, lambda client: client.chat_choices(QUESTION, 2, seed=5))
    assert (answer.text, answer.finish_reason, answer.stop_string) == ("One two", "stop", " three")
    assert [entry.token_id for entry in answer.prompt_logprobs] == tokenizer().encode("Count to")[1:]
    assert answer.receipt is None
    assert answer.logprobs == ()
    assert {one.text for one in (of_ids, same)} == {"One two"}
    for found in (events, same_events):
        assert "".join(event.text for event in found if isinstance(event, TextDelta)) == "One two"
        assert isinstance(found[-1], Finished)
        assert type(found[-1].answer) is Completion
    assert [choice.text for choice in choices] == ["One two three."] * 3
    seeds = [request.sampling.seed for request in caller.door.source.requests]
    assert (seeds[-5:-2], seeds[-2:]) == ([5, 6, 7], [5, 6])
    assert len(more) == 2


async def test_every_option_reaches_the_router() -> None:
    async with serving(says("x")) as caller, AsyncClient(caller.address) as client:
        await client.complete(
            "x", model=MODEL, max_tokens=9, min_tokens=1, temperature=0.5, top_p=0.25, top_k=3, min_p=0.125,
            presence_penalty=0.5, frequency_penalty=-0.5, repetition_penalty=1.5, logit_bias={7: -1.5}, seed=0,
            stop=["a", "b"], stop_token_ids=[9], ignore_eos=True, logprobs=2, prompt_logprobs=3, cache_salt="s",
            priority=2, slo="batch", timeout_s=30.0,
        )  # fmt: skip
        (request,) = caller.door.source.requests
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.min_tokens, sampling.temperature, sampling.top_p) == (9, 1, 0.5, 0.25)
    assert (sampling.top_k, sampling.min_p, sampling.presence_penalty) == (3, 0.125, 0.5)
    assert (sampling.frequency_penalty, sampling.repetition_penalty, sampling.seed) == (-0.5, 1.5, 0)
    assert [(entry.token_id, entry.bias) for entry in sampling.logit_bias] == [(7, -1.5)]
    assert (list(sampling.stop_token_ids), sampling.ignore_eos) == ([9], True)
    assert (sampling.num_logprobs, sampling.prompt_logprobs) == (2, 3)
    assert (request.stop, request.priority, request.slo) == (("a", "b"), 2, "batch")
    assert request.cache_salt
    assert request.deadline - caller.door.services.clock.now() <= 30.01


@pytest.mark.parametrize(
    ("asked", "kind", "text"),
    [
        (JsonObject(), Grammar.JSON_OBJECT, ""),
        (JsonSchema({"type": "object"}), Grammar.JSON_SCHEMA, '{"type": "object"}'),
        (Regex("a+"), Grammar.REGEX, "a+"),
        (Ebnf('root ::= "a"'), Grammar.EBNF, 'root ::= "a"'),
    ],
)
async def test_a_response_format_is_a_grammar(asked: Any, kind: int, text: str) -> None:
    async with serving(says("x")) as caller, AsyncClient(caller.address) as client:
        await client.chat(QUESTION, response_format=asked)
        grammar = caller.door.source.requests[0].sampling.grammar
        assert (grammar.kind, grammar.text) == (kind, text)
        with pytest.raises(KvferryError) as caught:
            await client.chat(QUESTION, response_format=Regex(""))
        assert caught.value.field == "response_format"


@pytest.mark.parametrize(
    ("choice", "names"), [("required", ["get_weather", "clock"]), (CLOCK, ["clock"]), ("none", []), ("auto", [])]
)
async def test_a_tool_choice_is_a_word_or_a_tool(choice: Any, names: list[str]) -> None:
    door = door_of("[]")
    async with at_door(door) as caller, AsyncClient(caller.address) as client:
        await client.chat(QUESTION, tools=[WEATHER, CLOCK], tool_choice=choice)
    schema = door.source.requests[0].sampling.grammar.text
    assert [name for name in ("get_weather", "clock") if f'"{name}"' in schema] == names


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"top_k": -1}, "top_k"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 9.0}, "temperature"),
        ({"logit_bias": {-1: 0.0}}, "logit_bias"),
        ({"seed": 2**64}, "seed"),
        ({"tool_choice": "clock", "tools": [CLOCK]}, "tool_choice"),
        ({"tools": [Tool("f", parameters={"type": float("nan")})]}, "tools[0].parameters"),
        ({"response_format": JsonSchema({"a": object()})}, "response_format"),
        ({"slo": "gold"}, "slo"),
        # Half of a surrogate pair is no text that protobuf could carry.
        ({"stop": ["\ud800"]}, "stop"),
        ({"stop": [5]}, "stop"),
        ({"model": "\ud800"}, "model"),
        ({"tools": [CLOCK, Tool("\ud800")]}, "tools[1]"),
        ({"response_format": Regex("\ud800")}, "response_format"),
    ],
)
async def test_what_is_wrong_is_a_kvferry_error_that_names_the_option(options: dict[str, Any], field: str) -> None:
    async with at_door(door_of("never")) as caller, AsyncClient(caller.address) as client:
        with pytest.raises(KvferryError) as caught:
            await client.chat(QUESTION, **options)
        assert (caught.value.code, caught.value.field) == (ErrorCode.INVALID_REQUEST, field)
        assert caller.door.source.requests == []


async def test_text_that_is_none_is_refused_before_it_is_sent() -> None:
    async with serving(says("x")) as caller, AsyncClient(caller.address) as client:
        for prompt, field in (("\ud800", "prompt"), ([("user", "\ud800")], "messages[0]")):
            with pytest.raises(KvferryError) as caught:
                await client.tokenize(prompt)
            assert (caught.value.code, caught.value.field) == (ErrorCode.INVALID_REQUEST, field)


async def test_what_grpc_itself_refuses_is_a_kvferry_error_too() -> None:
    # It does so before the service hears of a call, so it sends no Error of ours along.
    door = Door(says("x"))
    server = GrpcServer("127.0.0.1", max_received_bytes=1000)
    service = PublicService(door.services, public_pb2.ClusterStateResponse)
    server.add_service(public_pb2_grpc.add_KvferryServicer_to_server, service, SERVICE_NAME, internal=False)
    await server.start()
    try:
        async with AsyncClient(server.address) as client:
            with pytest.raises(KvferryError, match="message larger than max") as caught:
                await client.complete("x" * 2000)
            assert caught.value.code == ErrorCode.INVALID_REQUEST
        async with channel(server.address) as link:
            raw = link.unary_stream(f"/{SERVICE_NAME}/Generate")
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                # Field 1, the model, with two bytes that are no UTF-8.
                [part async for part in raw(b"\x0a\x02\xff\xff")]
        assert KvferryError.from_rpc(refused.value, "the router").code == ErrorCode.INTERNAL
    finally:
        await server.stop(0)
    assert door.source.requests == []


async def test_leaving_a_stream_cancels_the_generation() -> None:
    # H055
    async with serving(lambda _: [ids_of("One two"), asyncio.Event()]) as caller, AsyncClient(caller.address) as client:
        async with aclosing(client.stream_chat(QUESTION)) as events:
            async for _ in events:
                break
        await caller.door.source.wait_until(lambda source: len(source.cancelled) == 1)
        await _sync(caller.address, lambda client: next(iter(client.stream_complete("x"))))
        await caller.door.source.wait_until(lambda source: len(source.cancelled) == 2)
        whole = asyncio.create_task(client.chat(QUESTION))
        await caller.door.source.wait_until(lambda source: len(source.running) == 1)
        whole.cancel()
        await caller.door.source.wait_until(lambda source: len(source.cancelled) == 3)
        assert caller.door.source.running == set()


async def test_the_time_of_a_call_is_the_requests_deadline() -> None:
    async with serving(lambda _: [asyncio.Event()]) as caller, AsyncClient(caller.address) as client:
        await client.default_model()
        with pytest.raises(KvferryError) as caught:
            await client.chat(QUESTION, timeout_s=0.5)
        assert caught.value.code == ErrorCode.DEADLINE_EXCEEDED
        await caller.door.source.wait_until(lambda source: not source.running)


async def test_an_answer_that_never_says_why_it_ended_is_a_failure() -> None:
    async def silent(*_: Any, **__: Any) -> AsyncIterator[public_pb2.GenerateResponse]:
        yield public_pb2.GenerateResponse(request_id="r", text="one")

    async with serving(says("x")) as caller, AsyncClient(caller.address) as client:
        client.generate = silent  # type: ignore[assignment,method-assign]
        with pytest.raises(KvferryError, match="without saying why"):
            await client.chat(QUESTION)


async def test_queries_give_plain_values() -> None:
    proto = public_pb2.WorkerState(worker_id="decode-0", blocks_total=7)
    state = public_pb2.ClusterStateResponse(model=MODEL, router_id="r", requests_in_flight=2, workers=[proto])
    kept = {"r": KVReceipt(request_id="r", transport="tcp")}
    find = {"find_receipt": lambda request_id, _: kept.get(request_id)}
    async with serving(says("x"), lambda: state, **find) as caller, AsyncClient(caller.address) as client:
        assert [(model.id, model.max_context_tokens) for model in await client.models()] == [(MODEL, CONTEXT)]
        assert await client.receipt("r") == kept["r"]
        tokens = await client.tokenize("Once upon")
        assert (list(tokens.token_ids), tokens.max_context_tokens) == (tokenizer().encode("Once upon"), CONTEXT)
        found = await client.cluster_state()
        assert found == await _sync(caller.address, lambda client: client.cluster_state())
        assert await _sync(caller.address, lambda client: client.tokenize("Once upon")) == tokens
    assert isinstance(found, ClusterState)
    assert (found.model, found.router_id, found.requests_in_flight, found.workers[0].blocks_total) == (MODEL, "r", 2, 7)


def test_a_workers_state_has_every_field_of_the_proto() -> None:
    assert [field.name for field in fields(WorkerState)] == [
        field.name for field in public_pb2.WorkerState.DESCRIPTOR.fields
    ]


def test_importing_kvferry_is_light_and_its_client_needs_neither_torch_nor_the_router() -> None:
    program = (
        "import sys, kvferry\n"
        "assert not {'grpc', 'google.protobuf', 'kvferry.client'} & set(sys.modules)\n"
        "kvferry.Client, kvferry.AsyncClient\n"
        "print(*(name for name in ('torch', 'numpy', 'starlette', 'tokenizers', 'router') if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


def test_every_name_that_kvferry_offers_is_there() -> None:
    assert all(getattr(kvferry, name) is not None for name in kvferry.__all__)
    with pytest.raises(AttributeError, match="nothing"):
        kvferry.nothing  # noqa: B018


@pytest.mark.parametrize("page", ["README.md", "docs/api.md"])
async def test_the_documented_examples_run(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    examples = [block for block in blocks if "from kvferry import" in block]
    assert examples
    text = "Because of Rayleigh scattering. " + written("hermes", CALLS)
    async with at_door(door_of(text)) as caller:
        for example in examples:
            program = example.replace("127.0.0.1:8001", caller.address)
            await asyncio.to_thread(exec, compile(program, page, "exec"), {"__name__": "__main__"})
    assert "Because of Rayleigh scattering." in capsys.readouterr().out

"""The gRPC front door: the same checks and the same text as over HTTP."""

import asyncio
import math
from typing import Any

import grpc
import pytest

from kvferry_rpc import public_pb2
from kvferry_rpc.common_pb2 import ErrorCode, FinishReason, Grammar, KVReceipt, LogitBias, SamplingParams
from router.grpc.server import REQUEST_ID_METADATA_KEY
from router.workers.cluster_state import cluster_state
from runtime.errors import KvferryError
from tests.support.grpc_door import serving
from tests.support.http_door import CONTEXT, MODEL, ids_of, one_by_one, tokenizer
from tests.support.router_cluster import router_cluster
from tests.support.scripted_source import Finish, Script

TEXT = "Once upon a time \N{GRINNING FACE} there was a \u4e2d\u6587 word."


def spoken(text: str = TEXT, reason: "FinishReason.ValueType" = FinishReason.STOP) -> Script:
    return lambda request: [*one_by_one(text), Finish(reason)]


async def test_text_streams_and_ends_with_one_finish() -> None:
    async with serving(spoken()) as client:
        responses = await client.generate(text="Tell me.")
        assert "".join(response.text for response in responses) == TEXT
        assert [token.token_id for response in responses for token in response.tokens] == ids_of(TEXT)
        assert [response.HasField("finish") for response in responses] == [False] * (len(responses) - 1) + [True]
        assert len({response.request_id for response in responses}) == 1
        finish = responses[-1].finish
        assert finish.reason == FinishReason.STOP
        assert finish.prompt_tokens == len(tokenizer().encode("Tell me."))
        assert finish.completion_tokens == len(ids_of(TEXT))
        assert not finish.HasField("receipt")


async def test_a_receipt_comes_when_it_is_asked_for() -> None:
    async with serving(spoken()) as client:
        responses = await client.generate(text="Tell me.", with_receipt=True)
        receipt = responses[-1].finish.receipt
        assert receipt.request_id == responses[0].request_id
        assert receipt.transport == "shm"


async def test_log_probabilities_of_the_prompt_come_first_in_messages_of_bounded_size() -> None:
    async with serving(spoken()) as client:
        ids = public_pb2.TokenIds(ids=[300 + i % 90 for i in range(400)])
        responses = await client.generate(tokens=ids, sampling=SamplingParams(max_tokens=50, prompt_logprobs=2))
        counts = [len(response.prompt_logprobs) for response in responses]
        assert counts[:2] == [256, 143]
        assert not any(counts[2:])
        assert not any(response.tokens for response in responses[:2])
        entries = [entry for response in responses for entry in response.prompt_logprobs]
        assert [(entry.position, entry.token_id) for entry in entries] == list(enumerate(ids.ids))[1:]


async def test_only_the_last_message_has_the_receipt() -> None:
    async with serving(spoken()) as client:
        responses = await client.generate(text="Tell me.", with_receipt=True)
        assert len(responses) > 2
        assert [message.finish.HasField("receipt") for message in responses] == [False] * (len(responses) - 1) + [True]


async def test_a_failed_generation_is_told_the_id_of_its_receipt() -> None:
    async with serving(lambda _: [KvferryError(ErrorCode.HANDOFF_FAILED, "no proof", field="transport")]) as client:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.generate(text="Tell me.")
        metadata = dict(caught.value.trailing_metadata() or ())
        assert metadata[REQUEST_ID_METADATA_KEY] == client.door.source.requests[0].request_id
        assert (await client.refusal(text="x"))[1].field == "transport"


async def test_a_prompt_is_the_same_in_all_three_forms_and_in_tokenize() -> None:
    # H017: one place owns special tokens.
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": TEXT}]
    chat = public_pb2.ChatPrompt(messages=[public_pb2.ChatMessage(**message) for message in messages])
    expected = {"chat": tokenizer().encode_chat(messages), "text": tokenizer().encode(TEXT)}
    async with serving(spoken()) as client:
        for field, value in {"chat": chat, "text": TEXT}.items():
            await client.generate(**{field: value})
            assert list(client.door.source.requests[-1].prompt_token_ids) == expected[field]
            answer = await client.stub.Tokenize(public_pb2.TokenizeRequest(**{"model": MODEL, field: value}))
            assert list(answer.token_ids) == expected[field]
            assert answer.max_context_tokens == CONTEXT
        await client.generate(tokens=public_pb2.TokenIds(ids=expected["text"]))
        assert list(client.door.source.requests[-1].prompt_token_ids) == expected["text"]


async def test_stop_strings_and_sampling_reach_the_cluster() -> None:
    async with serving(spoken()) as client:
        sampling = SamplingParams(max_tokens=300, temperature=0.5, top_k=3, seed=9)
        responses = await client.generate(text="x", sampling=sampling, has_seed=True, stop=["there"])
        assert "".join(response.text for response in responses) == TEXT.partition("there")[0]
        sent = client.door.source.requests[0]
        assert sent.sampling == sampling
        assert sent.stop == ("there",)


async def test_without_a_seed_each_request_draws_its_own_and_zero_can_be_chosen() -> None:
    # H064
    async with serving(spoken()) as client:
        for _ in range(4):
            await client.generate(text="x")
        await client.generate(text="x", sampling=SamplingParams(seed=0), has_seed=True)
        seeds = [request.sampling.seed for request in client.door.source.requests]
        assert len(set(seeds[:4])) == 4
        assert seeds[4] == 0


async def test_max_tokens_fill_the_context_unless_told_otherwise() -> None:
    # H008
    async with serving(spoken()) as client:
        ids = ids_of("word " * 50)[:40]
        await client.generate(tokens=public_pb2.TokenIds(ids=ids))
        assert client.door.source.requests[0].sampling.max_tokens == CONTEXT - 40
        room = CONTEXT - 40
        await client.generate(tokens=public_pb2.TokenIds(ids=ids), sampling=SamplingParams(max_tokens=room))
        for fields in (
            {"tokens": public_pb2.TokenIds(ids=ids), "sampling": SamplingParams(max_tokens=room + 1)},
            {"tokens": public_pb2.TokenIds(ids=[5] * CONTEXT)},
            {"tokens": public_pb2.TokenIds(ids=[5] * 100_000)},
        ):
            status, error = await client.refusal(**fields)
            assert status is grpc.StatusCode.INVALID_ARGUMENT
            assert error.code == ErrorCode.CONTEXT_LENGTH_EXCEEDED
            assert str(CONTEXT) in error.message


FLOATS = ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -3.0, 1e30])
@pytest.mark.parametrize("field", FLOATS)
async def test_floats_that_are_no_sensible_number_are_refused_by_name(field: str, value: float) -> None:
    # H007: a protobuf float can be NaN.
    async with serving(spoken()) as client:
        status, error = await client.refusal(text="x", sampling=SamplingParams(**{field: value}))
        assert status is grpc.StatusCode.INVALID_ARGUMENT
        assert (error.code, error.field) == (ErrorCode.INVALID_REQUEST, field)
        assert client.door.source.requests == []


def chat(*messages: tuple[str, str]) -> public_pb2.ChatPrompt:
    return public_pb2.ChatPrompt(messages=[public_pb2.ChatMessage(role=r, content=c) for r, c in messages])


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "prompt"),
        ({"tokens": public_pb2.TokenIds()}, "tokens"),
        ({"tokens": public_pb2.TokenIds(ids=[2**32 - 1])}, "tokens"),
        ({"chat": chat()}, "chat"),
        ({"chat": chat(("tool", "x"))}, "chat.messages[0].tool_call_id"),
        ({"chat": chat(("robot", "x"))}, "chat.messages[0].role"),
        ({"chat": chat(*[("user", "x")] * 3000)}, "chat"),
        ({"text": "x", "stop": [""]}, "stop"),
        ({"text": "x", "stop": ["y" * 300]}, "stop"),
        ({"text": "x", "stop": ["y"] * 17}, "stop"),
        ({"text": "x", "sampling": SamplingParams(min_tokens=20, max_tokens=10)}, "min_tokens"),
        ({"text": "x", "sampling": SamplingParams(num_logprobs=21)}, "top_logprobs"),
        ({"text": "x", "sampling": SamplingParams(prompt_logprobs=21)}, "prompt_logprobs"),
        ({"text": "x", "sampling": SamplingParams(stop_token_ids=[10**6])}, "stop_token_ids"),
        ({"text": "x", "sampling": SamplingParams(logit_bias=[LogitBias(token_id=1, bias=math.nan)])}, "logit_bias"),
        ({"text": "x", "sampling": SamplingParams(logit_bias=[LogitBias(token_id=10**9, bias=1)])}, "logit_bias"),
        ({"text": "x", "sampling": SamplingParams(logit_bias=[LogitBias(token_id=1)] * 2)}, "logit_bias"),
        ({"text": "x", "sampling": SamplingParams(grammar=Grammar(text="x"))}, "grammar"),
        ({"text": "x", "sampling": SamplingParams(grammar=Grammar(kind=Grammar.REGEX, text="a" * 5000))}, "grammar"),
        ({"text": "x", "sampling": SamplingParams(grammar=Grammar(kind=Grammar.EBNF, text="[" * 99))}, "grammar"),
        ({"text": "x", "slo": "gold"}, "slo"),
        ({"text": "x" * (4 * 1024 * 1024 + 1)}, "text"),
    ],
)
async def test_what_is_wrong_with_a_request_is_named_before_any_work(fields: dict[str, Any], field: str) -> None:
    async with serving(spoken()) as client:
        status, error = await client.refusal(**fields)
        assert status is grpc.StatusCode.INVALID_ARGUMENT
        assert error.field == field
        assert client.door.source.requests == []
        assert client.door.refused == ["invalid_request"]
        assert (await client.generate(text="still there?"))[-1].HasField("finish")


async def test_an_unknown_model_is_not_found() -> None:
    async with serving(spoken()) as client:
        status, error = await client.refusal(model="nobody", text="x")
        assert (status, error.code) == (grpc.StatusCode.NOT_FOUND, ErrorCode.UNKNOWN_MODEL)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.stub.Tokenize(public_pb2.TokenizeRequest(model="nobody", text="x"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("code", [code for code in ErrorCode.values() if code])
async def test_each_failure_of_the_cluster_has_its_status_and_travels_whole(code: "ErrorCode.ValueType") -> None:
    # H022
    failure = KvferryError(code, "why it failed", field="f", retry_after_ms=7)
    async with serving(lambda request: [[5], failure]) as client:
        status, error = await client.refusal(text="x")
        assert status is failure.grpc_status
        assert error == failure.to_proto()
        assert client.door.refused == []


async def test_a_defect_shows_nothing_of_its_inside() -> None:
    async with serving(lambda request: [[5], RuntimeError("the secret thing")]) as client:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.generate(text="x")
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert "secret" not in str(caught.value.details())


async def test_a_caller_that_cancels_cancels_the_generation() -> None:
    # H055, H099
    async with serving(lambda request: [[5], asyncio.Event()]) as client:
        call = client.stub.Generate(public_pb2.GenerateRequest(model=MODEL, text="x"))
        await call.read()
        call.cancel()
        await client.door.source.wait_until(lambda source: len(source.cancelled) == 1)
        assert client.door.source.running == set()


async def test_a_caller_that_cancels_while_its_prompt_is_tokenised_is_counted() -> None:
    async with serving(lambda request: [[5]]) as client:
        asked, counted = asyncio.Event(), asyncio.Event()

        async def endless_encode(text: str, **_: object) -> list[int]:
            asked.set()
            try:
                await asyncio.Event().wait()
            finally:
                asyncio.get_running_loop().call_soon(counted.set)
            return []

        client.door.services.tokenizer.encode = endless_encode  # type: ignore[method-assign]
        call = client.stub.Generate(public_pb2.GenerateRequest(model=MODEL, text="x"))
        await asyncio.wait_for(asked.wait(), 5)
        call.cancel()
        await asyncio.wait_for(counted.wait(), 5)
        assert client.door.refused == ["cancelled"]
        assert client.door.source.requests == []


async def test_the_callers_deadline_is_the_requests_deadline_and_ends_it() -> None:
    async with serving(lambda request: [asyncio.Event()]) as client:
        await client.stub.ListModels(public_pb2.ListModelsRequest())  # the time is for the request alone
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.generate(timeout_s=2.0, text="x")
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await client.door.source.wait_until(lambda source: not source.running)
        now = client.door.services.clock.now()
        assert now < client.door.source.requests[0].deadline <= now + 2.01  # grpc rounds it up


async def test_class_and_priority_reach_the_cluster() -> None:
    async with serving(spoken()) as client:
        await client.generate(text="x", slo="batch", priority=3)
        (request,) = client.door.source.requests
        assert (request.slo, request.priority) == ("batch", 3)


async def test_a_call_without_a_deadline_gets_the_routers() -> None:
    async with serving(spoken(), request_timeout_s=33.0) as client:
        call = client.stub.Generate(public_pb2.GenerateRequest(model=MODEL, text="x"))
        async for _ in call:
            pass
        now = client.door.services.clock.now()
        assert client.door.source.requests[0].deadline == pytest.approx(now + 33.0)


async def test_a_router_that_shuts_down_refuses_new_generations_and_counts_them() -> None:
    async with serving(spoken(), draining=lambda: True) as client:
        status, error = await client.refusal(text="x")
        assert status is grpc.StatusCode.UNAVAILABLE
        assert error.retry_after_ms > 0
        assert client.door.refused == ["unavailable"]


async def test_models_and_receipts_can_be_asked_for() -> None:
    kept = {"r": KVReceipt(request_id="r", transport="tcp")}
    async with serving(spoken(), find_receipt=lambda request_id, tenant: kept.get(request_id)) as client:
        models = await client.stub.ListModels(public_pb2.ListModelsRequest())
        assert [(model.id, model.max_context_tokens) for model in models.models] == [(MODEL, CONTEXT)]
        assert await client.stub.GetReceipt(public_pb2.GetReceiptRequest(request_id="r")) == kept["r"]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.stub.GetReceipt(public_pb2.GetReceiptRequest(request_id="other"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_the_cluster_state_shows_workers_and_requests() -> None:
    async with router_cluster() as cluster:
        decode = await cluster.decode()
        await cluster.prefill()
        decode.pause_after = 0
        cluster.report("decode-0", blocks_used=5, steps=9, sequences_running=1)
        reading = asyncio.create_task(cluster.run(cluster.request()))
        await decode.until(lambda: decode.live)
        state = lambda: cluster_state(MODEL, "router-test", cluster.registry, cluster.dispatcher)  # noqa: E731
        async with serving(spoken(), state) as client:
            answer = await client.stub.ClusterState(public_pb2.ClusterStateRequest())
        assert (answer.model, answer.router_id) == (MODEL, "router-test")
        assert (answer.requests_in_flight, answer.requests_queued) == (1, 0)
        first, second = answer.workers
        assert (first.worker_id, first.role, first.state) == ("decode-0", "decode", "ready")
        assert (first.blocks_total, first.blocks_used, first.steps, first.block_size) == (64, 5, 9, 16)
        assert (second.worker_id, second.role) == ("prefill-0", "prefill")
        decode.resume.set()
        await reading

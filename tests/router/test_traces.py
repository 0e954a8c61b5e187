"""The spans of a request: under one id, each below the right one, with times that fit into each other."""

import asyncio
import json
from collections.abc import AsyncGenerator

import pytest

from kvferry_rpc.common_pb2 import ErrorCode
from kvferry_rpc.public_pb2 import GenerateRequest
from router.generation import TokenBatch, TokenEnd
from router.observation.traces import Traces, request_spans, untraced
from runtime.telemetry import JsonFormatter
from runtime.tracing import Span, TraceContext, inner_context
from tests.support.fake_workers import error
from tests.support.grpc_door import at_door
from tests.support.http_door import MODEL, Door, ids_of, says
from tests.support.router_cluster import RouterCluster, failure_of, first_tokens, router_cluster

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADER = f"00-{TRACE}-{SPAN}-01"


def followed(cluster: RouterCluster) -> list[Span]:
    """The spans of all requests that end from now on."""
    spans: list[Span] = []
    cluster.dispatcher.live.subscribe(lambda view: spans.extend(request_spans(view)))
    return spans


def tree(spans: list[Span]) -> list[tuple[str, str]]:
    """Each span's name, with that of the one above it; a client's span has none."""
    names = {span.context.span_id: span.name for span in spans}
    assert len(names) == len(spans), "two spans have one id"
    return sorted((names.get(span.parent_id, ""), span.name) for span in spans)


async def read_to_the_end(stream: AsyncGenerator[TokenBatch | TokenEnd, None]) -> None:
    while not isinstance(await anext(stream), TokenEnd):
        pass
    await stream.aclose()


def test_a_trace_goes_on_where_the_client_was_or_begins_here() -> None:
    traces = Traces(lambda: "ab" * 16)
    assert traces.begin(HEADER) == HEADER
    assert inner_context(traces.begin(None)) == TraceContext("ab" * 16)
    assert inner_context(traces.begin("nonsense")) == TraceContext("ab" * 16)
    assert traces.begin(f"00-{TRACE}-{SPAN}-00") == ""
    assert untraced(HEADER) == ""


async def test_a_request_has_its_wait_and_its_attempt_below_it_and_the_workers_know_the_attempt() -> None:
    async with router_cluster() as cluster:
        spans = followed(cluster)
        decode, prefill = await cluster.decode(), await cluster.prefill()
        await cluster.run(cluster.request(traceparent=HEADER, endpoint="chat", tenant="red"))
        assert tree(spans) == [("", "request"), ("attempt 1", "admit"), ("request", "attempt 1"), ("request", "queue")]
        assert {span.context.trace_id for span in spans} == {TRACE}
        by_name = {span.name: span for span in spans}
        request, attempt = by_name["request"], by_name["attempt 1"]
        assert request.parent_id == SPAN
        assert decode.admitted[0].traceparent == prefill.requests[0].traceparent == str(attempt.context)
        for span in spans:
            assert request.started_at <= span.started_at <= span.ended_at <= request.ended_at
        facts = request.attributes
        assert (facts["kvferry.outcome"], facts["kvferry.tenant"], facts["kvferry.transport"]) == (
            "finished", "red", "tcp",
        )  # fmt: skip
        assert facts["kvferry.checksum_verified"] is True
        assert attempt.attributes["kvferry.prefill_worker"] == "prefill-0"


async def test_each_attempt_has_its_own_span_and_workers_are_told_which() -> None:
    async with router_cluster() as cluster:
        spans = followed(cluster)
        decode = await cluster.decode()
        decode.fail_after = (2, error(ErrorCode.HANDOFF_FAILED))
        stream = cluster.stream(cluster.request(traceparent=HEADER))
        await first_tokens(stream, 2)
        decode.fail_after = None
        await read_to_the_end(stream)
        assert tree(spans) == [
            ("", "request"),
            ("attempt 1", "admit"),
            ("attempt 2", "admit"),
            ("request", "attempt 1"),
            ("request", "attempt 2"),
            ("request", "queue"),
            ("request", "queue"),
        ]
        attempts = [span for span in spans if span.name.startswith("attempt")]
        assert [admit.traceparent for admit in decode.admitted] == [str(span.context) for span in attempts]
        assert attempts[0].ended_at <= attempts[1].started_at


async def test_a_moved_answer_is_two_attempts_that_share_its_trace() -> None:
    async with router_cluster() as cluster:
        spans = followed(cluster)
        first = await cluster.decode("decode-0")
        first.pause_after = 3
        stream = cluster.stream(cluster.request(traceparent=HEADER))
        await first_tokens(stream, 3)
        second = await cluster.decode("decode-1")
        cluster.drain("decode-0")
        rest = asyncio.create_task(read_to_the_end(stream))
        await first.until(lambda: first.pauses)
        first.resume.set()
        await rest
        attempts = {span.name: span for span in spans if span.name.startswith("attempt")}
        assert second.admitted[0].traceparent == str(attempts["attempt 2"].context)
        assert attempts["attempt 2"].attributes["kvferry.moves"] is True
        assert attempts["attempt 1"].ended_at <= attempts["attempt 2"].ended_at


async def test_a_request_that_failed_says_so_and_one_that_was_left_does_not() -> None:
    async with router_cluster() as cluster:
        spans = followed(cluster)
        await failure_of(cluster.run(cluster.request(traceparent=HEADER)))
        assert [(span.name, span.error) for span in spans] == [("request", "unavailable"), ("queue", "")]
        spans.clear()
        decode = await cluster.decode()
        decode.ticket_gate = decode.resume
        decode.pause_after = 0
        task = asyncio.create_task(cluster.run(cluster.request(traceparent=HEADER)))
        await decode.until(lambda: decode.admitted)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [(span.name, span.error) for span in spans][:1] == [("request", "")]
        assert spans[0].attributes["kvferry.outcome"] == "cancelled"


async def test_without_a_trace_workers_are_told_nothing_and_no_span_is_made() -> None:
    async with router_cluster() as cluster:
        spans = followed(cluster)
        decode, prefill = await cluster.decode(), await cluster.prefill()
        await cluster.run(cluster.request())
        assert decode.admitted[0].traceparent == prefill.requests[0].traceparent == ""
        assert spans == []


async def test_a_call_over_grpc_goes_on_in_its_callers_trace_and_leaves_a_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "router.observation.access_log")
    traces = Traces(lambda: "ab" * 16)
    async with at_door(Door(says("An answer."), begin_trace=traces.begin), log_calls=True) as client:
        call = client.stub.Generate(GenerateRequest(model=MODEL, text="x"), metadata=(("traceparent", HEADER),))
        assert [response async for response in call]
        await client.generate(text="x")
        requests = client.door.source.requests
    assert [request.traceparent for request in requests] == [HEADER, str(TraceContext("ab" * 16))]
    assert {request.endpoint for request in requests} == {"grpc"}
    lines = [json.loads(JsonFormatter("router").format(record)) for record in caplog.records]
    assert [line["trace_id"] for line in lines] == [TRACE, "ab" * 16]
    assert [line["request_id"] for line in lines] == [request.request_id for request in requests]
    assert {line["output_tokens"] for line in lines} == {len(ids_of("An answer."))}

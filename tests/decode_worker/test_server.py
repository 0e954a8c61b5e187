"""The decode worker's gRPC service over a real server, with a script in the place of the engine."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from decode_worker.export import ExportRequest
from decode_worker.job import AdmitRequest
from decode_worker.worker import CancelRequest, SessionClosed
from kvferry_rpc.common_pb2 import Error, Grammar, KVCacheLayout, LogitBias, SamplingParams
from kvferry_rpc.internal_pb2 import (
    Cancel,
    DecodeCommand,
    DecodeEvent,
    Export,
    Hello,
    PromptLogprobs,
    Ticket,
)
from kvferry_rpc.internal_pb2_grpc import DecodeWorkerStub
from runtime.errors import ErrorCode, KvferryError, invalid
from runtime.grpc_life import channel
from runtime.protocol_version import CONTROL_VERSION
from tests.support.decode_door import INCARNATION, Bench, admit, decode_door, done, read, status, token
from tests.support.scripted_grammars import FreeText
from tests.support.scripted_loop import WAIT_S


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with decode_door() as door:
        yield door


async def test_an_admission_reaches_the_engine_and_its_events_come_back(bench: Bench) -> None:
    call = await bench.session()
    request = await bench.admitted(call, cache_salt=b"salt")
    assert (request.request_id, request.attempt, request.local_prefill) == ("r", 1, False)
    assert request.deadline == 105.0
    assert request.sequence.cache_salt == b"salt"
    assert bench.service.in_flight.count == 1
    await asyncio.to_thread(request.emit, [token("r", 0), token("r", 1)])
    assert [event.WhichOneof("kind") for event in await read(call)] == ["tokens", "tokens"]
    await asyncio.to_thread(request.emit, [done("r")])
    assert [event.WhichOneof("kind") for event in await read(call)] == ["done"]
    assert bench.service.in_flight.count == 0
    call.cancel()


async def test_a_session_begins_with_hello(bench: Bench) -> None:
    call = bench.stub.Session()
    await call.write(admit())
    assert await status(call) == grpc.StatusCode.INVALID_ARGUMENT
    silent = bench.stub.Session()
    await silent.done_writing()
    assert await status(silent) == grpc.StatusCode.INVALID_ARGUMENT
    assert bench.loop.commands == []


async def test_a_session_with_another_life_of_the_worker_is_refused(bench: Bench) -> None:
    call = bench.stub.Session()
    await call.write(DecodeCommand(hello=Hello(router_id="r", incarnation=b"o" * 16)))
    assert await status(call) == grpc.StatusCode.FAILED_PRECONDITION
    assert bench.loop.commands == []


@pytest.mark.parametrize("distance", [1, 2])
async def test_a_session_with_a_router_of_a_later_release_than_the_next_is_refused(bench: Bench, distance: int) -> None:
    theirs = {"protocol_version": CONTROL_VERSION.major, "protocol_minor": CONTROL_VERSION.minor + distance}
    call = bench.stub.Session()
    await call.write(DecodeCommand(hello=Hello(router_id="r", incarnation=INCARNATION, **theirs)))
    if distance == 1:
        # A command that this worker has not heard of, and then one that it has.
        await call.write(DecodeCommand.FromString(b"\x9a\x06\x02\x08\x01"))
        await bench.admitted(call)
        call.cancel()
    else:
        assert await status(call) == grpc.StatusCode.FAILED_PRECONDITION
        assert f"and {CONTROL_VERSION} here" in (await call.details() or "")
        assert bench.loop.commands == []


async def test_without_the_secret_there_is_no_session(bench: Bench) -> None:
    async with channel(bench.server.address) as connection:
        call = DecodeWorkerStub(connection).Session()
        assert await status(call) == grpc.StatusCode.UNAUTHENTICATED
    assert bench.loop.commands == []


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("logit_bias", {"sampling": SamplingParams(max_tokens=4, logit_bias=[LogitBias(token_id=999_999_999)])}),
        ("logit_bias", {"sampling": SamplingParams(max_tokens=4, logit_bias=[LogitBias(bias=float("nan"))])}),
        ("temperature", {"sampling": SamplingParams(max_tokens=4, temperature=float("nan"))}),
        ("prompt", {"prompt_token_ids": [50]}),
        ("request_id", {"request_id": ""}),
    ],
)
async def test_bad_fields_are_refused_at_this_door_too_and_others_go_on(
    bench: Bench, field: str, changes: dict[str, Any]
) -> None:
    call = await bench.session()
    good = await bench.admitted(call, "good")
    await call.write(admit(**{"name": "bad", **changes}))
    (refusal,) = await read(call)
    assert refusal.failed.code == ErrorCode.INVALID_REQUEST
    assert refusal.failed.field == field
    good.emit([done("good")])
    assert [event.request_id for event in await read(call)] == ["good"]
    assert len(bench.loop.of(AdmitRequest)) == 1
    call.cancel()


async def test_a_full_inbox_refuses_one_request_and_holds_nothing_for_it(bench: Bench) -> None:
    call = await bench.session()
    bench.loop.refusal = KvferryError(ErrorCode.OVERLOADED, "full", retry_after_ms=1000)
    await call.write(admit())
    (refusal,) = await read(call)
    assert (refusal.failed.code, refusal.failed.retry_after_ms) == (ErrorCode.OVERLOADED, 1000)
    assert bench.service.in_flight.count == 0
    bench.loop.refusal = None
    request = await bench.admitted(call)  # the same name again: the first one is over
    request.emit([done("r")])
    assert [event.WhichOneof("kind") for event in await read(call)] == ["done"]
    call.cancel()


async def test_a_draining_worker_takes_nothing_new_and_finishes_what_it_has(bench: Bench) -> None:
    call = await bench.session()
    request = await bench.admitted(call, "early")
    bench.service.draining = True
    await call.write(admit("late"))
    (refusal,) = await read(call)
    assert (refusal.request_id, refusal.failed.code) == ("late", ErrorCode.UNAVAILABLE)
    assert bench.service.in_flight.count == 1
    request.emit([done("early")])
    assert [event.request_id for event in await read(call)] == ["early"]
    async with asyncio.timeout(WAIT_S):
        assert await bench.service.in_flight.wait_zero(WAIT_S)
    call.cancel()


async def test_an_admission_repeated_while_it_is_open_is_ignored(bench: Bench) -> None:
    call = await bench.session()
    request = await bench.admitted(call, "r")
    await call.write(admit("r"))
    await bench.admitted(call, "other")
    assert [seen.request_id for seen in bench.loop.of(AdmitRequest)] == ["r", "other"]
    assert bench.service.in_flight.count == 2
    request.emit([done("r"), done("other")])
    assert len(await read(call)) == 2
    call.cancel()


async def test_a_cancel_reaches_the_engine_and_ends_the_request_here(bench: Bench) -> None:
    call = await bench.session()
    request = await bench.admitted(call)
    await call.write(DecodeCommand(cancel=Cancel(request_id="r", attempt=1)))
    (cancel,) = await bench.loop.wait(CancelRequest)
    assert cancel == CancelRequest(request.session_id, "r", 1)
    assert bench.service.in_flight.count == 0
    await call.write(DecodeCommand(cancel=Cancel(request_id="never admitted", attempt=9)))
    await bench.loop.wait(CancelRequest, 2)
    request.emit([done("r")])  # it was on its way already
    assert len(await read(call)) == 1
    call.cancel()


@pytest.mark.parametrize("how", ["cancelled", "half closed"])
async def test_a_session_that_ends_takes_its_requests_with_it(bench: Bench, how: str) -> None:
    call = await bench.session()
    request = await bench.admitted(call)
    if how == "cancelled":
        call.cancel()
    else:
        await call.done_writing()
    (closed,) = await bench.loop.wait(SessionClosed)
    assert closed.session_id == request.session_id
    assert bench.service.in_flight.count == 0
    await asyncio.to_thread(request.emit, [done("r")])  # nobody listens: no harm


async def test_a_router_that_hangs_up_right_after_an_admission_is_noticed_after_it(bench: Bench) -> None:
    for turns in range(20):
        call = await bench.session()
        await call.write(admit())
        for _ in range(turns):
            await asyncio.sleep(0)
        call.cancel()
    last = await bench.session()
    await bench.admitted(last, "last")
    last.cancel()
    admitted = {request.session_id for request in bench.loop.of(AdmitRequest)}
    await bench.loop.wait_until(lambda: admitted <= {closed.session_id for closed in bench.loop.of(SessionClosed)})
    ended: set[int] = set()
    for command in bench.loop.commands:
        assert command.session_id not in ended, "something came after the end of its session"
        if isinstance(command, SessionClosed):
            ended.add(command.session_id)


async def test_a_router_that_stops_reading_and_then_goes_is_noticed(bench: Bench) -> None:
    call = await bench.session()
    request = await bench.admitted(call)
    big = DecodeEvent(request_id="r", attempt=1, failed=Error(message="x" * 100_000))
    for _ in range(200):  # far more than the connection takes without a reader
        request.emit([big])
        await asyncio.sleep(0)
    call.cancel()
    await bench.loop.wait(SessionClosed)


async def test_what_piled_up_leaves_in_order_in_messages_of_bounded_size(bench: Bench) -> None:
    call = await bench.session()
    request = await bench.admitted(call)
    scored = DecodeEvent(request_id="r", attempt=1, prompt_logprobs=PromptLogprobs())
    request.emit([scored] * 40 + [token("r", index) for index in range(10_000)])
    request.emit([done("r")])
    messages = []
    while not messages or messages[-1][-1].WhichOneof("kind") != "done":
        messages.append(await read(call))
    assert max(map(len, messages)) <= 4096
    # Log probabilities of a prompt, of up to 256 positions each, count for so many.
    assert max(sum(event.HasField("prompt_logprobs") for event in message) for message in messages) == 16
    tokens = [event.tokens.tokens[0].index for message in messages for event in message if event.HasField("tokens")]
    assert tokens == list(range(10_000))
    call.cancel()


async def test_the_same_request_id_on_two_sessions_is_two_requests(bench: Bench) -> None:
    first, second = await bench.session(), await bench.session()
    one, other = await bench.admitted(first), await bench.admitted(second)
    assert one.sequence.seq_id != other.sequence.seq_id
    other.emit([done("r")])
    assert len(await read(second)) == 1
    assert bench.service.in_flight.count == 1
    first.cancel()
    await bench.loop.wait(SessionClosed)
    second.cancel()


async def test_a_server_that_stops_closes_its_sessions(bench: Bench) -> None:
    call = await bench.session()
    await bench.admitted(call)
    await bench.server.stop(0)
    await bench.loop.wait(SessionClosed)
    assert bench.service.in_flight.count == 0


async def test_streams_that_are_ended_end_behind_what_is_still_to_be_told(bench: Bench) -> None:
    call = await bench.session()
    request = await bench.admitted(call)
    request.emit([token("r", 0), done("r")])
    # Behind what was emitted, in the order of the loop.
    asyncio.get_running_loop().call_soon(bench.service.end_sessions)
    kinds = []
    async with asyncio.timeout(WAIT_S):
        async for events in call:
            kinds += [event.WhichOneof("kind") for event in events.events]
    assert kinds == ["tokens", "done"]
    await bench.loop.wait(SessionClosed)
    assert bench.service.in_flight.count == 0


async def test_an_export_reaches_the_engine_and_a_bad_or_refused_one_breaks_nothing(bench: Bench) -> None:
    call = await bench.session()
    ticket = Ticket(handoff_id="x", block_ids=[1, 2], layout=KVCacheLayout(block_size=4))
    good = Export(request_id="r", attempt=1, prompt_token_ids=range(8), ticket=ticket, deadline_ms=500)
    bad = Export(request_id="r", attempt=1, prompt_token_ids=range(7), ticket=ticket, deadline_ms=500)
    await call.write(DecodeCommand(export=bad))
    await call.write(DecodeCommand(export=good))
    assert await bench.loop.wait(ExportRequest) == [ExportRequest(tuple(range(8)), b"", ticket, 100.5, "r")]
    bench.loop.refusal = KvferryError(ErrorCode.OVERLOADED, "full")
    await call.write(DecodeCommand(export=good))
    await call.write(admit())
    (refused,) = await read(call)
    assert refused.failed.code == ErrorCode.OVERLOADED
    assert len(bench.loop.of(ExportRequest)) == 1
    assert bench.service.in_flight.count == 0
    call.cancel()


WITH_GRAMMAR = {"sampling": SamplingParams(max_tokens=4, grammar=Grammar(kind=Grammar.REGEX, text="a"))}


async def test_a_request_with_a_grammar_reaches_the_engine_when_that_is_ready_and_others_do_not_wait(
    bench: Bench,
) -> None:
    call = await bench.session()
    await call.write(admit("later", num_output_tokens=2, **WITH_GRAMMAR))
    ready = await bench.grammars.called()
    assert bench.grammars.seen == [(Grammar(kind=Grammar.REGEX, text="a"), [4, 5])]
    await bench.admitted(call, "at once")
    constraint = FreeText()
    ready.set_result(constraint)
    first, second = await bench.loop.wait(AdmitRequest, 2)
    assert (first.request_id, first.sequence.constraint) == ("at once", None)
    assert (second.request_id, second.sequence.constraint) == ("later", constraint)
    assert second.deadline == 105.0
    assert bench.service.in_flight.count == 2
    call.cancel()


@pytest.mark.parametrize(
    ("problem", "code"),
    [(invalid("grammar", "is wrong"), ErrorCode.INVALID_REQUEST), (ZeroDivisionError("ours"), ErrorCode.INTERNAL)],
)
async def test_a_grammar_that_cannot_be_used_is_refused_before_the_engine_hears_of_it(
    bench: Bench, problem: Exception, code: "ErrorCode.ValueType"
) -> None:
    call = await bench.session()
    await call.write(admit(**WITH_GRAMMAR))
    (await bench.grammars.called()).set_exception(problem)
    (refusal,) = await read(call)
    assert refusal.failed.code == code
    assert "ours" not in refusal.failed.message
    assert bench.loop.of(AdmitRequest) == []
    assert bench.service.in_flight.count == 0
    call.cancel()


async def test_a_full_inbox_refuses_a_request_whose_grammar_is_ready(bench: Bench) -> None:
    call = await bench.session()
    await call.write(admit(**WITH_GRAMMAR))
    bench.loop.refusal = KvferryError(ErrorCode.OVERLOADED, "full")
    (await bench.grammars.called()).set_result(FreeText())
    (refusal,) = await read(call)
    assert refusal.failed.code == ErrorCode.OVERLOADED
    call.cancel()


@pytest.mark.parametrize("how", ["cancelled", "session over"])
async def test_nothing_is_admitted_for_a_request_that_ended_before_its_grammar_was_ready(
    bench: Bench, how: str
) -> None:
    call = await bench.session()
    await call.write(admit(**WITH_GRAMMAR))
    ready = await bench.grammars.called()
    if how == "cancelled":
        await call.write(DecodeCommand(cancel=Cancel(request_id="r", attempt=1)))
        await bench.loop.wait(CancelRequest)
    else:
        call.cancel()
        await bench.loop.wait(SessionClosed)
    async with asyncio.timeout(WAIT_S):
        await asyncio.wait([ready])
    assert ready.cancelled()
    assert bench.loop.of(AdmitRequest) == []
    assert bench.service.in_flight.count == 0
    call.cancel()

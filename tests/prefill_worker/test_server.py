"""The prefill worker's gRPC service over a real server, with a script in the place of the engine."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from kvferry_rpc.common_pb2 import Grammar, LogitBias, SamplingParams, TokenOutput
from kvferry_rpc.internal_pb2 import KVSource, PrefillDone, PrefillEvent, PrefillRequest, Ticket
from kvferry_rpc.internal_pb2_grpc import PrefillWorkerStub, add_PrefillWorkerServicer_to_server
from prefill_worker.job import Submit
from prefill_worker.server import PrefillService
from prefill_worker.worker import Cancel, Constrain
from runtime.clock import ManualClock
from runtime.errors import ErrorCode, KvferryError, invalid
from runtime.grpc_life import GrpcServer, channel
from tests.support.scripted_grammars import FreeText, ScriptedGrammars
from tests.support.scripted_loop import LIMITS, SECRET, WAIT_S, ScriptedLoop

FIRST = PrefillEvent(first_token=TokenOutput(token_id=7))
PULL = PrefillEvent(pull=Ticket(handoff_id="wanted"))
DONE = PrefillEvent(done=PrefillDone(transport="tcp"))
FAILED = PrefillEvent(error=KvferryError(ErrorCode.HANDOFF_FAILED, "scripted").to_proto())
Call = Any  # grpc.aio.UnaryStreamCall; generic in the stubs only


@dataclass
class Bench:
    """A service that serves."""

    loop: ScriptedLoop
    service: PrefillService
    server: GrpcServer
    stub: PrefillWorkerStub
    grammars: ScriptedGrammars

    async def submitted(self, **changes: Any) -> tuple[Call, Submit]:
        """A call that the engine has taken."""
        count = len(self.loop.of(Submit)) + 1
        call = self.stub.Prefill(prefill(**changes))
        return call, (await self.loop.wait(Submit, count))[-1]


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    loop = ScriptedLoop()
    grammars = ScriptedGrammars()
    service = PrefillService(loop, LIMITS, grammars, ManualClock(100.0))  # type: ignore[arg-type]
    server = GrpcServer("127.0.0.1", secret=SECRET)
    server.add_service(add_PrefillWorkerServicer_to_server, service, "kvferry.internal.v1.PrefillWorker", internal=True)
    await server.start()
    async with channel(server.address, SECRET) as connection:
        yield Bench(loop, service, server, PrefillWorkerStub(connection), grammars)
    await server.stop(0)
    async with asyncio.timeout(WAIT_S):
        assert await service.in_flight.wait_zero(WAIT_S)


def prefill(**changes: Any) -> PrefillRequest:
    fields: dict[str, Any] = {
        "request_id": "r",
        "attempt": 1,
        "prompt_token_ids": [3, 4, 5],
        "sampling": SamplingParams(max_tokens=4),
        "ticket": Ticket(handoff_id="r/1/abc"),
        "deadline_ms": 5000,
    }
    return PrefillRequest(**{**fields, **changes})


async def read_all(call: Call) -> list[PrefillEvent]:
    async with asyncio.timeout(WAIT_S):
        return [event async for event in call]


@pytest.mark.parametrize("end", [[FIRST, DONE], [FIRST, FAILED], [FAILED], [PULL, FIRST, DONE], [PULL, FAILED]])
async def test_a_call_ends_with_its_last_word_and_is_not_cancelled_then(bench: Bench, end: list[PrefillEvent]) -> None:
    call, submit = await bench.submitted()
    assert submit.ticket.handoff_id == submit.sequence.seq_id == "r/1/abc"
    assert (submit.arrived_at, submit.deadline) == (100.0, 105.0)
    assert bench.service.in_flight.count == 1
    for event in end:
        await asyncio.to_thread(submit.reply, event)
    assert await read_all(call) == end
    assert bench.service.in_flight.count == 0
    assert bench.loop.of(Cancel) == []


async def test_a_source_reaches_the_engine_if_there_is_one(bench: Bench) -> None:
    source = KVSource(decode_worker="decode-0", num_tokens=16)
    for given in (source, None):
        call, submit = await bench.submitted(source=given)
        assert submit.source == given
        submit.reply(DONE)
        assert await read_all(call) == [DONE]


async def test_a_worker_that_pulls_nothing_leaves_the_source_out(bench: Bench) -> None:
    bench.service.pulls = False
    call, submit = await bench.submitted(source=KVSource(decode_worker="d0", num_tokens=32))
    assert submit.source is None
    call.cancel()


@pytest.mark.parametrize("after", [[], [FIRST], [PULL]])
async def test_a_caller_that_hangs_up_cancels_its_own_call(bench: Bench, after: list[PrefillEvent]) -> None:
    call, submit = await bench.submitted()
    other, other_submit = await bench.submitted()  # with the same ticket
    for event in after:
        submit.reply(event)
        assert await call.read() == event
    call.cancel()
    (cancel,) = await bench.loop.wait(Cancel)
    assert cancel.submit is submit
    assert bench.service.in_flight.count == 1
    other_submit.reply(DONE)
    assert await read_all(other) == [DONE]
    submit.reply(DONE)  # it was on its way: no harm


async def test_bad_fields_are_refused_by_name_at_this_door_too(bench: Bench) -> None:
    sampling = SamplingParams(max_tokens=4, logit_bias=[LogitBias(token_id=999_999_999)])
    (refusal,) = await read_all(bench.stub.Prefill(prefill(sampling=sampling)))
    assert (refusal.error.code, refusal.error.field) == (ErrorCode.INVALID_REQUEST, "logit_bias")
    assert bench.loop.commands == []
    assert bench.service.in_flight.count == 0


async def test_a_full_inbox_is_said_at_once(bench: Bench) -> None:
    bench.loop.refusal = KvferryError(ErrorCode.OVERLOADED, "full", retry_after_ms=1000)
    (refusal,) = await read_all(bench.stub.Prefill(prefill()))
    assert (refusal.error.code, refusal.error.retry_after_ms) == (ErrorCode.OVERLOADED, 1000)
    assert bench.loop.commands == []


async def test_a_draining_worker_takes_nothing_new_and_finishes_what_it_has(bench: Bench) -> None:
    call, submit = await bench.submitted()
    bench.service.draining = True
    (refusal,) = await read_all(bench.stub.Prefill(prefill()))
    assert refusal.error.code == ErrorCode.UNAVAILABLE
    submit.reply(DONE)
    assert await read_all(call) == [DONE]


async def test_without_the_secret_nothing_is_computed(bench: Bench) -> None:
    async with channel(bench.server.address) as connection:
        call = PrefillWorkerStub(connection).Prefill(prefill())
        assert await call.code() == grpc.StatusCode.UNAUTHENTICATED
    assert bench.loop.commands == []


async def test_a_server_that_stops_cancels_what_still_runs(bench: Bench) -> None:
    _, submit = await bench.submitted()
    await bench.server.stop(0)
    (cancel,) = await bench.loop.wait(Cancel)
    assert cancel.submit is submit


WITH_GRAMMAR = {"sampling": SamplingParams(max_tokens=4, grammar=Grammar(kind=Grammar.REGEX, text="a"))}


async def test_the_engine_has_a_request_at_once_and_its_constraint_when_that_is_ready(bench: Bench) -> None:
    call, submit = await bench.submitted(num_output_tokens=1, **WITH_GRAMMAR)
    assert submit.awaits_constraint
    ready = await bench.grammars.called()
    assert bench.grammars.seen == [(Grammar(kind=Grammar.REGEX, text="a"), [5])]
    constraint = FreeText()
    ready.set_result(constraint)
    assert await bench.loop.wait(Constrain) == [Constrain(submit, constraint)]
    submit.reply(DONE)
    assert await read_all(call) == [DONE]


async def test_the_engine_is_told_that_there_will_be_no_constraint(bench: Bench) -> None:
    call, submit = await bench.submitted(**WITH_GRAMMAR)
    problem = invalid("grammar", "is wrong")
    (await bench.grammars.called()).set_exception(problem)
    assert await bench.loop.wait(Constrain) == [Constrain(submit, problem)]
    submit.reply(FAILED)
    assert await read_all(call) == [FAILED]


async def test_a_caller_that_hangs_up_needs_no_grammar_any_more(bench: Bench) -> None:
    call, submit = await bench.submitted(**WITH_GRAMMAR)
    ready = await bench.grammars.called()
    call.cancel()
    (cancel,) = await bench.loop.wait(Cancel)
    assert cancel.submit is submit
    async with asyncio.timeout(WAIT_S):
        await asyncio.wait([ready])
    assert ready.cancelled()
    assert bench.loop.of(Constrain) == []

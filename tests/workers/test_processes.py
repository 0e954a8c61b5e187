"""Whole workers in this process, with their host around them: draining with an open session, and a dead engine."""

import asyncio
import threading
from typing import Any

import grpc
import pytest

from engine.model_runner import ModelRunner
from kvferry_rpc.common_pb2 import ErrorCode
from kvferry_rpc.internal_pb2 import Admit, DecodeCommand, PrefillRequest, Ticket
from kvferry_rpc.internal_pb2_grpc import PrefillWorkerStub
from tests.support.hosted_worker import (
    ROLES,
    SAMPLING,
    WAIT_S,
    admission,
    events_until,
    hosted,
    open_session,
    worker_settings,
)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return worker_settings(tmp_path_factory.mktemp("worker"))


async def test_a_worker_told_to_stop_finishes_what_runs_and_exits_well(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, runs, may_run = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    run = ModelRunner.run

    def held(self: ModelRunner, *args: Any) -> Any:
        loop.call_soon_threadsafe(runs.set)
        assert may_run.wait(WAIT_S)
        return run(self, *args)

    async with hosted("decode", settings) as (worker, connection):
        monkeypatch.setattr(ModelRunner, "run", held)
        call = await open_session(worker, connection)
        await call.write(admission("early"))
        async with asyncio.timeout(WAIT_S):
            await runs.wait()
            worker.shutdown.set()
            await worker.drains.wait()
        await call.write(admission("late"))
        (refusal,) = await events_until(call, "late")
        assert refusal.failed.code == ErrorCode.UNAVAILABLE
        may_run.set()
        events = await events_until(call, "early")
        assert sum(len(event.tokens.tokens) for event in events) == 30
        assert events[-1].WhichOneof("kind") == "done"
        assert await worker.ended() == 0


async def test_a_worker_closes_in_time_with_a_request_that_outlives_the_drain_timeout(
    settings: dict[str, Any],
) -> None:
    ticket_only = DecodeCommand(
        admit=Admit(request_id="r", attempt=1, prompt_token_ids=[5] * 20, sampling=SAMPLING, deadline_ms=600_000)
    )
    async with hosted("decode", {**settings, "drain_timeout_s": 0.2}) as (worker, connection):
        call = await open_session(worker, connection)
        await call.write(ticket_only)
        async with asyncio.timeout(WAIT_S):
            (event,) = (await call.read()).events
        assert event.WhichOneof("kind") == "ticket"
        worker.shutdown.set()
        assert await worker.ended() == 0
        assert not worker.worker._receiver.snapshot().handoffs.reserved


@pytest.mark.parametrize("role", ROLES)
async def test_a_worker_whose_engine_dies_ends_its_calls_and_exits_with_an_error(
    settings: dict[str, Any], role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(self: ModelRunner, *args: Any) -> Any:
        raise RuntimeError("scripted")

    async with hosted(role, settings) as (worker, connection):
        monkeypatch.setattr(ModelRunner, "run", die)
        if role == "decode":
            call = await open_session(worker, connection)
            await call.write(admission("r"))
        else:
            ticket = Ticket(
                handoff_id="r/1/x",
                lease_ms=1000,
                block_ids=[0],
                data_address="127.0.0.1:1",
                layout=worker.registered.result().layout,
            )
            fields: dict[str, Any] = {"prompt_token_ids": [5, 6, 7], "sampling": SAMPLING, "deadline_ms": 60_000}
            call = PrefillWorkerStub(connection).Prefill(
                PrefillRequest(request_id="r", attempt=1, ticket=ticket, **fields)
            )
        assert await worker.ended() == 1
        assert not worker.worker._engine_loop.is_alive
        async with asyncio.timeout(WAIT_S):
            assert await call.code() != grpc.StatusCode.DEADLINE_EXCEEDED

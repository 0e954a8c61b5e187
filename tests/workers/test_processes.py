"""Whole workers in this process, with their host around them: draining with an open session, and a dead engine."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from decode_worker.config import DecodeConfig
from decode_worker.process import DecodeProcess
from engine.model_runner import ModelRunner
from kvferry_rpc.common_pb2 import ErrorCode, SamplingParams
from kvferry_rpc.internal_pb2 import Admit, DecodeCommand, DecodeEvent, Hello, PrefillRequest, Register, Ticket
from kvferry_rpc.internal_pb2_grpc import DecodeWorkerStub, PrefillWorkerStub
from prefill_worker.config import PrefillConfig
from prefill_worker.process import PrefillProcess
from runtime.grpc_life import channel
from runtime.worker_host import host_worker
from tests.support.tiny_checkpoints import make_model, save_checkpoint

WAIT_S = 30.0  # only ever reached by a test that fails
SECRET = b"0123456789abcdef0123456789abcdef"
ROLES: dict[str, tuple[Any, Any]] = {
    "decode": (DecodeConfig, DecodeProcess),
    "prefill": (PrefillConfig, PrefillProcess),
}
SAMPLING = SamplingParams(max_tokens=30, ignore_eos=True)


class Hosted:
    """A worker that its host runs. There is no router: membership goes on knocking, and nobody answers."""

    def __init__(self, role: str, settings: dict[str, Any]) -> None:
        self.shutdown = asyncio.Event()
        self.drains = asyncio.Event()
        self.registered: asyncio.Future[Register] = asyncio.get_running_loop().create_future()
        self.process: Any = None
        config_class, self._process_class = ROLES[role]
        self._config = config_class(**settings)
        self.life = asyncio.create_task(host_worker(self._config, role, self._build, self.shutdown))

    def _build(self, secret: bytes) -> Any:
        self.process = process = self._process_class(self._config, secret)
        describe, begin_drain = process.describe, process.begin_drain

        def described(address: str) -> Register:
            register: Register = describe(address)
            self.registered.set_result(register)
            return register

        def began() -> None:
            begin_drain()
            self.drains.set()

        process.describe, process.begin_drain = described, began
        return process

    async def ended(self) -> int:
        """The exit status."""
        async with asyncio.timeout(WAIT_S):
            return await asyncio.shield(self.life)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory: Path = tmp_path_factory.mktemp("worker")
    (directory / "secret").write_bytes(SECRET)
    model = save_checkpoint(directory / "model", make_model("llama_gqa"))
    return {
        "worker_id": "w",
        "routers": ("127.0.0.1:1",),
        "cluster_secret_file": directory / "secret",
        "model": str(model),
        "cache_dir": directory / "cache",
        "num_blocks": 32,
        "block_size": 8,
        "token_budget": 16,
        "max_num_seqs": 4,
    }


@asynccontextmanager
async def hosted(role: str, settings: dict[str, Any]) -> AsyncIterator[tuple[Hosted, grpc.aio.Channel]]:
    worker = Hosted(role, settings)
    try:
        async with asyncio.timeout(WAIT_S):
            await asyncio.wait({worker.registered, worker.life}, return_when=asyncio.FIRST_COMPLETED)
        assert not worker.life.done(), worker.life.result()
        async with channel(worker.registered.result().address, SECRET) as connection:
            yield worker, connection
    finally:
        worker.shutdown.set()
        await worker.ended()


async def open_session(worker: Hosted, connection: grpc.aio.Channel) -> Any:
    call: Any = DecodeWorkerStub(connection).Session()
    await call.write(DecodeCommand(hello=Hello(router_id="r", incarnation=worker.registered.result().incarnation)))
    return call


def admission(name: str) -> DecodeCommand:
    prompt = [5, 6, 7]
    fields: dict[str, Any] = {"prompt_token_ids": prompt, "sampling": SAMPLING, "deadline_ms": 60_000}
    return DecodeCommand(admit=Admit(request_id=name, attempt=1, local_prefill=True, **fields))


async def events_until(call: Any, name: str) -> list[DecodeEvent]:
    """What a session says, up to the last word about one request."""
    events: list[DecodeEvent] = []
    async with asyncio.timeout(WAIT_S):
        while not any(e.request_id == name and e.WhichOneof("kind") in ("done", "failed") for e in events):
            events.extend((await call.read()).events)
    return events


async def test_a_worker_told_to_stop_finishes_what_runs_and_exits_well(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, runs, may_run = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    run = ModelRunner.run

    def held(self: ModelRunner, *args: Any) -> Any:
        loop.call_soon_threadsafe(runs.set)
        assert may_run.wait(WAIT_S)
        return run(self, *args)

    monkeypatch.setattr(ModelRunner, "run", held)
    async with hosted("decode", settings) as (worker, connection):
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
        assert not worker.process._receiver.snapshot().handoffs.reserved


@pytest.mark.parametrize("role", ROLES)
async def test_a_worker_whose_engine_dies_ends_its_calls_and_exits_with_an_error(
    settings: dict[str, Any], role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(self: ModelRunner, *args: Any) -> Any:
        raise RuntimeError("scripted")

    monkeypatch.setattr(ModelRunner, "run", die)
    async with hosted(role, settings) as (worker, connection):
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
        assert not worker.process._engine_loop.is_alive
        async with asyncio.timeout(WAIT_S):
            assert await call.code() != grpc.StatusCode.DEADLINE_EXCEEDED

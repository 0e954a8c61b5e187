"""One life of a worker in one role: what ends it, and what cannot."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvferry_rpc.internal_pb2 import PREFILL, Drain, LoadReport, Register, Role, RouterMessage, SetRole
from runtime import worker_life
from runtime.grpc_life import GrpcServer
from runtime.in_flight import InFlight
from runtime.kv_event_log import KVEventLog
from runtime.worker_host import HostOptions, host_worker
from runtime.worker_life import Access, LifeEnd, WorkerLife

WAIT_S = 20.0  # only ever reached by a test that fails
DECODE_ROLE, PREFILL_ROLE = (RouterMessage(set_role=SetRole(role=role)) for role in (Role.DECODE, Role.PREFILL))
DRAIN, WORK_AGAIN = (RouterMessage(drain=Drain(over=over)) for over in (False, True))


class FakeWorker:
    """Has requests when it is told so, and nothing else."""

    def __init__(self, *, is_at_rest: bool = True, closes_clean: bool = True) -> None:
        self.in_flight = InFlight()
        self.kv_events = KVEventLog()
        self.transports = ("tcp",)
        self.num_blocks = 8
        self.is_at_rest = is_at_rest
        self.closed = 0
        self.drains: list[bool] = []
        self.changed = asyncio.Event()
        self.on_fatal: Callable[[], None] = lambda: None
        self._closes_clean = closes_clean

    def add_services(self, server: GrpcServer) -> None: ...

    def start(self, on_fatal: Callable[[], None]) -> None:
        self.on_fatal = on_fatal

    def describe(self, address: str) -> Register:
        return Register(worker_id="w", incarnation=b"i" * 16, role=PREFILL, address=address)

    def load_report(self) -> LoadReport:
        return LoadReport()

    def set_draining(self, draining: bool) -> None:
        self.drains.append(draining)
        self.changed.set()

    def end_drain(self) -> None: ...

    def close(self, timeout_s: float) -> bool:
        self.closed += 1
        return self._closes_clean

    async def until_drains(self, drains: list[bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while self.drains != drains:
                self.changed.clear()
                await self.changed.wait()


class Life:
    """A life that goes on in a task."""

    def __init__(self, worker: FakeWorker) -> None:
        self.worker = worker
        self.shutdown = asyncio.Event()
        options = HostOptions(worker_id="w", routers=("127.0.0.1:1",), cluster_secret_file=Path("/nowhere"))
        self.life = WorkerLife(options, "prefill", worker, Access(b"s" * 32, None, None), self.shutdown)
        self.task = asyncio.create_task(self.life.run(first=False))

    def order(self, message: RouterMessage) -> None:
        """As a router would."""
        self.life._take_order(message)

    async def end(self) -> LifeEnd:
        async with asyncio.timeout(WAIT_S):
            return await asyncio.shield(self.task)


@asynccontextmanager
async def life(worker: FakeWorker) -> AsyncIterator[Life]:
    running = Life(worker)
    try:
        yield running
    finally:
        running.shutdown.set()
        for _ in range(worker.in_flight.count):
            worker.in_flight.leave()
        await running.end()


@pytest.fixture(autouse=True)
def looks_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_life, "_SNAPSHOT_S", 0.01)
    monkeypatch.setattr(worker_life, "_LOOKS_FOR_REST", 3)


async def test_a_life_ends_for_the_other_role_only_when_nothing_runs_any_more() -> None:
    worker = FakeWorker()
    async with life(worker) as running:
        worker.in_flight.enter()
        running.order(DECODE_ROLE)
        await worker.until_drains([True])
        await asyncio.sleep(0.1)
        assert not running.task.done()
        worker.in_flight.leave()
        assert await running.end() is LifeEnd.OTHER_ROLE
        assert worker.closed == 1


async def test_blocks_that_stay_held_keep_the_worker_in_its_role_and_it_works_again() -> None:
    worker = FakeWorker(is_at_rest=False)
    async with life(worker) as running:
        running.order(DECODE_ROLE)
        await worker.until_drains([True, False])
        assert not running.task.done()
        worker.is_at_rest = True
        running.order(DECODE_ROLE)
        assert await running.end() is LifeEnd.OTHER_ROLE


@pytest.mark.parametrize("call_off", [WORK_AGAIN, PREFILL_ROLE])
async def test_a_change_of_role_can_be_called_off_until_it_is_done(call_off: RouterMessage) -> None:
    worker = FakeWorker()
    async with life(worker) as running:
        worker.in_flight.enter()
        running.order(DECODE_ROLE)
        await worker.until_drains([True])
        running.order(call_off)
        await worker.until_drains([True, False])
        worker.in_flight.leave()
        await asyncio.sleep(0.1)
        assert not running.task.done()
    assert running.task.result() is LifeEnd.STOPPED


async def test_a_drain_ends_nothing_and_is_lifted_again() -> None:
    worker = FakeWorker()
    async with life(worker) as running:
        running.order(DRAIN)
        running.order(DRAIN)
        await worker.until_drains([True])
        running.order(WORK_AGAIN)
        await worker.until_drains([True, False])
        assert not running.task.done()


async def test_a_worker_that_has_the_role_already_is_left_alone() -> None:
    worker = FakeWorker()
    async with life(worker) as running:
        running.order(PREFILL_ROLE)
        running.order(DRAIN)
        await worker.until_drains([True])
        assert not running.task.done()


async def test_a_shutdown_while_the_role_is_to_change_stops_the_worker() -> None:
    worker = FakeWorker()
    async with life(worker) as running:
        worker.in_flight.enter()
        running.order(DECODE_ROLE)
        await worker.until_drains([True])
        running.shutdown.set()
        await worker.until_drains([True, True])
        worker.in_flight.leave()
        assert await running.end() is LifeEnd.STOPPED


async def test_an_engine_that_dies_while_the_role_is_to_change_ends_the_worker() -> None:
    worker = FakeWorker()
    async with life(worker) as running:
        worker.in_flight.enter()
        running.order(DECODE_ROLE)
        await worker.until_drains([True])
        worker.on_fatal()
        assert await running.end() is LifeEnd.FAILED


async def test_no_other_life_begins_on_a_pool_that_somebody_may_still_write_to() -> None:
    worker = FakeWorker(closes_clean=False)
    async with life(worker) as running:
        running.order(DECODE_ROLE)
        assert await running.end() is LifeEnd.FAILED


async def test_a_process_goes_from_role_to_role_and_its_last_life_says_how_it_ends(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"s" * 32)
    options = HostOptions(worker_id="w", routers=("127.0.0.1:1",), cluster_secret_file=tmp_path / "secret")
    roles: list[str] = []
    shutdown = asyncio.Event()

    class Process:
        closed = 0

        def take_role(self, role: str) -> FakeWorker:
            roles.append(role)
            return FakeWorker()

        def close(self, timeout_s: float) -> None:
            self.closed += 1

    process = Process()
    run = WorkerLife.run

    async def switching(self: WorkerLife, *, first: bool) -> LifeEnd:
        assert first is (len(roles) == 1)
        if len(roles) < 3:
            self._take_order(DECODE_ROLE if self._role == "prefill" else PREFILL_ROLE)
        else:
            shutdown.set()
        return await run(self, first=False)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WorkerLife, "run", switching)
        async with asyncio.timeout(WAIT_S):
            assert await host_worker(options, "prefill", lambda secret: process, shutdown) == 0
    assert roles == ["prefill", "decode", "prefill"]
    assert process.closed == 1

"""What the health service of a worker says, to probes of liveness and of readiness."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvferry_rpc.internal_pb2 import PREFILL, LoadReport, Register
from runtime.grpc_life import LIVE, GrpcServer, channel
from runtime.in_flight import InFlight
from runtime.kv_event_log import KVEventLog
from runtime.worker_host import HostOptions
from runtime.worker_life import Access, WorkerLife
from tests.support.membership_router import SECRET, FakeRouter

WAIT_S = 20.0  # only ever reached by a test that fails


class IdleWorker:
    """A worker that has nothing to do."""

    transports = ("tcp",)
    num_blocks = 8
    is_at_rest = True

    def __init__(self) -> None:
        self.in_flight = InFlight()
        self.kv_events = KVEventLog()
        self.address: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def add_services(self, server: GrpcServer) -> None: ...

    def start(self, on_fatal: Callable[[], None]) -> None: ...

    def describe(self, address: str) -> Register:
        self.address.set_result(address)
        return Register(worker_id="w", incarnation=b"i" * 16, role=PREFILL, address=address)

    def load_report(self) -> LoadReport:
        return LoadReport()

    def set_draining(self, draining: bool) -> None: ...

    def end_drain(self) -> None: ...

    def close(self, timeout_s: float) -> bool:
        return True


@asynccontextmanager
async def worker_life(router: str) -> AsyncIterator[health_pb2_grpc.HealthStub]:
    """A worker that looks for that router; its health."""
    worker, shutdown = IdleWorker(), asyncio.Event()
    options = HostOptions(worker_id="w", routers=(router,), cluster_secret_file=Path("/nowhere"))
    living = asyncio.create_task(
        WorkerLife(options, "prefill", worker, Access(SECRET, None, None), shutdown).run(first=False)
    )
    try:
        async with channel(await worker.address) as link:
            yield health_pb2_grpc.HealthStub(link)
    finally:
        shutdown.set()
        await asyncio.wait_for(living, WAIT_S)


async def test_a_worker_is_alive_at_once_and_ready_when_its_router_knows_it() -> None:
    # H095: liveness asks for the one, readiness and with it a rolling update for the other.
    states = health_pb2.HealthCheckResponse
    router = FakeRouter()
    address = await router.start()
    await router.stop()
    async with worker_life(address) as health:
        alive = await health.Check(health_pb2.HealthCheckRequest(service=LIVE))
        assert alive.status == states.SERVING
        ready = health.Watch(health_pb2.HealthCheckRequest())
        assert (await ready.read()).status == states.NOT_SERVING
        await router.start(int(address.rpartition(":")[2]))
        async with asyncio.timeout(WAIT_S):
            assert (await ready.read()).status == states.SERVING
        assert router.attached == 1
        ready.cancel()
    await router.stop()

"""A registry behind a real server, and workers' streams to it, by hand."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from kvferry_rpc import internal_pb2_grpc
from kvferry_rpc.internal_pb2 import FleetState, Register, RouterMessage, WorkerMessage
from router.workers.fleet_service import SERVICE_NAME as FLEET_SERVICE_NAME
from router.workers.fleet_service import FleetService
from router.workers.membership_service import SERVICE_NAME, MembershipService
from router.workers.worker_registry import WorkerRegistry
from runtime.clock import SystemClock
from runtime.grpc_life import GrpcServer, channel
from tests.support.fake_workers import SECRET


@dataclass
class Membership:
    """A registry behind a real server."""

    registry: WorkerRegistry
    address: str
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.registry.subscribe(self)

    def worker_attached(self, register: Register) -> None:
        self.changed.set()

    def worker_detached(self, register: Register) -> None:
        self.changed.set()

    def room_changed(self) -> None:
        self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until it holds; looked at whenever a worker comes, goes or reports its load."""
        async with asyncio.timeout(10):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


@asynccontextmanager
async def membership(silence_limit_s: float = 10.0) -> AsyncIterator[Membership]:
    registry = WorkerRegistry(SystemClock())
    server = GrpcServer("127.0.0.1", secret=SECRET)
    service = MembershipService(registry, "router-test", silence_limit_s=silence_limit_s)
    server.add_service(internal_pb2_grpc.add_MembershipServicer_to_server, service, SERVICE_NAME, internal=True)
    fleet = FleetService(registry, FleetState)
    server.add_service(internal_pb2_grpc.add_FleetServicer_to_server, fleet, FLEET_SERVICE_NAME, internal=True)
    await server.start()
    try:
        yield Membership(registry, server.address)
    finally:
        await server.stop(0)


@asynccontextmanager
async def stream(address: str, secret: bytes = SECRET) -> AsyncIterator[Any]:
    async with channel(address, secret) as link, asyncio.timeout(10):
        call = internal_pb2_grpc.MembershipStub(link).Attach()
        try:
            yield call
        finally:
            call.cancel()


async def registered(call: Any, register: Register) -> RouterMessage:
    await call.write(WorkerMessage(register=register))
    answer = await call.read()
    assert isinstance(answer, RouterMessage), await call.details()
    return answer

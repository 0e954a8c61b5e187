"""A router that takes workers in by a script, and a worker's side of membership with short waits."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from kvferry_rpc.internal_pb2 import DECODE, KVEvents, LoadReport, Register, Registered, RouterMessage, WorkerMessage
from kvferry_rpc.internal_pb2_grpc import MembershipServicer, add_MembershipServicer_to_server
from runtime.grpc_life import GrpcServer
from runtime.kv_event_log import KVEventLog
from runtime.membership import MembershipClient, RetryTimes

SECRET = b"0123456789abcdef"
QUICK = RetryTimes(first_s=0.02, longest_s=0.1, after_refusal_s=0.02)


class FakeRouter(MembershipServicer):
    """Answers Attach by a script and keeps what it was told; checks the rules of the event stream as it reads."""

    def __init__(self) -> None:
        self.changed = asyncio.Condition()
        self.registers: list[Register] = []
        self.loads = 0
        self.drainings = 0
        self.snapshots = 0
        self.content: set[bytes] = set()
        self.expected: int | None = None
        self.largest_message = 0
        self.attached = 0
        self.outgoing: asyncio.Queue[RouterMessage | None] = asyncio.Queue()
        self.registered = Registered(router_id="r")
        self.refusal: tuple[grpc.StatusCode, str] | None = None
        self.server: GrpcServer | None = None

    async def Attach(  # type: ignore[override]
        self, requests: AsyncIterator[WorkerMessage], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[RouterMessage]:
        first = await anext(requests)
        assert first.WhichOneof("kind") == "register"
        async with self.changed:
            self.registers.append(first.register)
            self.changed.notify_all()
        if self.refusal:
            await context.abort(*self.refusal)
        self.expected = None
        self.attached += 1
        reader = asyncio.create_task(self._read(requests))
        try:
            yield RouterMessage(registered=self.registered)
            while (message := await self.outgoing.get()) is not None:
                yield message
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            self.attached -= 1
            async with self.changed:
                self.changed.notify_all()

    async def _read(self, requests: AsyncIterator[WorkerMessage]) -> None:
        async for message in requests:
            async with self.changed:
                kind = message.WhichOneof("kind")
                self.loads += kind == "load"
                self.drainings += kind == "draining"
                if kind == "kv_events":
                    self._take(message.kv_events)
                self.changed.notify_all()

    def _take(self, events: KVEvents) -> None:
        self.largest_message = max(self.largest_message, len(events.events))
        if events.snapshot:
            self.content.clear()
            self.snapshots += 1
        else:
            assert events.first_sequence == self.expected, "a gap"
        for event in events.events:
            (self.content.discard if event.removed else self.content.add)(event.block_hash)
        self.expected = events.first_sequence + len(events.events)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20), self.changed:
            await self.changed.wait_for(condition)

    async def start(self, port: int = 0) -> str:
        self.server = GrpcServer("127.0.0.1", port, secret=SECRET)
        self.server.add_service(add_MembershipServicer_to_server, self, "kvferry.internal.v1.Membership", internal=True)
        await self.server.start()
        return self.server.address

    async def stop(self) -> None:
        assert self.server is not None
        await self.server.stop(0)


class Harness:
    def __init__(self) -> None:
        self.log = KVEventLog()
        self.orders: list[RouterMessage] = []
        self.load = LoadReport(blocks_free=5)

    def on_order(self, order: RouterMessage) -> None:
        self.orders.append(order)

    def client(self, *addresses: str, secret: bytes = SECRET, interval_s: float = 0.02) -> MembershipClient:
        register = Register(worker_id="decode-0", incarnation=b"i" * 16, role=DECODE, address="127.0.0.1:1")
        return MembershipClient(
            addresses, secret, register, lambda: self.load, self.log, self.on_order,
            report_interval_s=interval_s, retry=QUICK,
        )  # fmt: skip

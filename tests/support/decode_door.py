"""The decode worker's gRPC service on a real server, with a script in the place of the engine."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from decode_worker.job import AdmitRequest
from decode_worker.server import DecodeService
from kvferry_rpc.common_pb2 import SamplingParams, TokenOutput
from kvferry_rpc.internal_pb2 import Admit, DecodeCommand, DecodeDone, DecodeEvent, DecodeEvents, Hello, Tokens
from kvferry_rpc.internal_pb2_grpc import DecodeWorkerStub, add_DecodeWorkerServicer_to_server
from runtime.clock import ManualClock
from runtime.grpc_life import GrpcServer, channel
from tests.support.scripted_grammars import ScriptedGrammars
from tests.support.scripted_loop import LIMITS, SECRET, WAIT_S, ScriptedLoop

INCARNATION = b"i" * 16
Call = Any  # grpc.aio.StreamStreamCall; generic in the stubs only


@dataclass
class Bench:
    """A service that serves."""

    loop: ScriptedLoop
    service: DecodeService
    server: GrpcServer
    stub: DecodeWorkerStub
    grammars: ScriptedGrammars

    async def session(self) -> Call:
        """A session that has said hello."""
        call = self.stub.Session()
        await call.write(DecodeCommand(hello=Hello(router_id="r", incarnation=INCARNATION)))
        return call

    async def admitted(self, call: Call, name: str = "r", **changes: Any) -> AdmitRequest:
        """Admit, and wait until the engine has it."""
        count = len(self.loop.of(AdmitRequest)) + 1
        await call.write(admit(name, **changes))
        return (await self.loop.wait(AdmitRequest, count))[-1]


@asynccontextmanager
async def decode_door() -> AsyncIterator[Bench]:
    loop = ScriptedLoop()
    grammars = ScriptedGrammars()
    service = DecodeService(loop, LIMITS, grammars, INCARNATION, ManualClock(100.0))  # type: ignore[arg-type]
    server = GrpcServer("127.0.0.1", secret=SECRET)
    server.add_service(add_DecodeWorkerServicer_to_server, service, "kvferry.internal.v1.DecodeWorker", internal=True)
    await server.start()
    async with channel(server.address, SECRET) as connection:
        yield Bench(loop, service, server, DecodeWorkerStub(connection), grammars)
    await server.stop(0)
    assert service.in_flight.count == 0


def admit(name: str = "r", **changes: Any) -> DecodeCommand:
    fields: dict[str, Any] = {
        "request_id": name,
        "attempt": 1,
        "prompt_token_ids": [3, 4, 5],
        "sampling": SamplingParams(max_tokens=4),
        "deadline_ms": 5000,
    }
    return DecodeCommand(admit=Admit(**{**fields, **changes}))


def token(name: str, index: int) -> DecodeEvent:
    return DecodeEvent(request_id=name, attempt=1, tokens=Tokens(tokens=[TokenOutput(index=index, token_id=7)]))


def done(name: str) -> DecodeEvent:
    return DecodeEvent(request_id=name, attempt=1, done=DecodeDone())


async def read(call: Call) -> list[DecodeEvent]:
    """The events of the next message."""
    async with asyncio.timeout(WAIT_S):
        message = await call.read()
    assert isinstance(message, DecodeEvents), message
    return list(message.events)


async def status(call: Call) -> grpc.StatusCode:
    async with asyncio.timeout(WAIT_S):
        code: grpc.StatusCode = await call.code()
        return code

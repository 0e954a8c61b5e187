"""The gRPC front door with a scripted cluster behind it, and a caller that knows its errors."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from kvferry_rpc import public_pb2, public_pb2_grpc
from kvferry_rpc.common_pb2 import Error
from router.grpc.server import SERVICE_NAME, PublicService
from runtime.errors import ERROR_METADATA_KEY
from runtime.grpc_life import GrpcServer, channel
from tests.support.http_door import MODEL, Door
from tests.support.scripted_source import Script


class Caller:
    """A stub, and the door behind it."""

    def __init__(self, stub: Any, door: Door, address: str) -> None:
        self.stub = stub
        self.door = door
        self.address = address

    async def generate(self, timeout_s: float = 10.0, **fields: Any) -> list[public_pb2.GenerateResponse]:
        request = public_pb2.GenerateRequest(**{"model": MODEL, **fields})
        return [response async for response in self.stub.Generate(request, timeout=timeout_s)]

    async def refusal(self, **fields: Any) -> tuple[grpc.StatusCode, Error]:
        """Status and error of a Generate that fails."""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.generate(**fields)
        metadata = dict(caught.value.trailing_metadata() or ())
        return caught.value.code(), Error.FromString(metadata.get(ERROR_METADATA_KEY, b""))


@asynccontextmanager
async def serving(
    script: Script, state: Any = public_pb2.ClusterStateResponse, **changes: Any
) -> AsyncIterator[Caller]:
    """A door to the plain test model, with these services changed."""
    async with at_door(Door(script, **changes), state) as caller:
        yield caller


@asynccontextmanager
async def at_door(
    door: Door, state: Any = public_pb2.ClusterStateResponse, *, log_calls: bool = False
) -> AsyncIterator[Caller]:
    """The service at a free port, with what is behind this door."""
    server = GrpcServer("127.0.0.1")
    service = PublicService(door.services, state, log_calls=log_calls)
    server.add_service(public_pb2_grpc.add_KvferryServicer_to_server, service, SERVICE_NAME, internal=False)
    await server.start()
    try:
        async with channel(server.address) as link:
            yield Caller(public_pb2_grpc.KvferryStub(link), door, server.address)
    finally:
        await server.stop(0)

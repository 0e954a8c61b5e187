"""A gRPC caller that stops reading: its generation is cancelled in time, and others go on."""

from typing import Any

import grpc
import pytest

from kvferry_rpc import public_pb2, public_pb2_grpc
from router.grpc.server import SERVICE_NAME, PublicService
from runtime.grpc_life import GrpcServer
from tests.support.http_door import MODEL, Door, ids_of

# So that little fits between the two ends.
NARROW = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))


class Hasty(PublicService):
    """The same service with a bound that a test reaches quickly."""

    stalled_write_s = 0.3


async def test_a_caller_that_stops_reading_is_cut_off() -> None:
    word = ids_of(" word")

    def flood(_: Any) -> Any:
        return (word * 200 for _ in range(5000))

    door = Door(flood)
    server = GrpcServer("127.0.0.1")
    service = Hasty(door.services, public_pb2.ClusterStateResponse)
    server.add_service(public_pb2_grpc.add_KvferryServicer_to_server, service, SERVICE_NAME, internal=False)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(server.address, options=NARROW) as link:
            stub = public_pb2_grpc.KvferryStub(link)
            call = stub.Generate(public_pb2.GenerateRequest(model=MODEL, text="x"))
            assert (await call.read()).text
            await door.source.wait_until(lambda source: bool(source.cancelled), timeout_s=20)
            assert not door.source.running
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await _read_on(call)
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    finally:
        await server.stop(0)


async def _read_on(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass

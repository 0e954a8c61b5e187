import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from runtime.errors import ErrorCode, KvferryError
from runtime.grpc_life import LIVE, MAX_MESSAGE_BYTES, GrpcServer, channel, join_host_port

SECRET = b"0123456789abcdef"
INTERNAL = "kvferry.test.Internal"
PUBLIC = "kvferry.test.Public"
SILENCE = b"a stream of requests that says nothing"
SHAPES = ("UnaryUnary", "UnaryStream", "StreamUnary", "StreamStream")


class Echo:
    """Four methods, one of each shape, that answer with what they got; and one that is silent until released."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.entered = asyncio.Semaphore(0)
        self.calls = 0
        self.silent_calls = 0

    async def unary(self, request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        self.calls += 1
        return request

    async def unary_stream(self, request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[bytes]:
        self.calls += 1
        yield request

    async def stream_unary(self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        self.calls += 1
        return b"".join([request async for request in requests])

    async def stream_stream(
        self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[bytes]:
        self.calls += 1
        async for request in requests:
            yield request

    async def silent(self, request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        self.silent_calls += 1
        self.entered.release()
        try:
            await self.release.wait()
        finally:
            for _ in range(10):  # Cleaning up takes a while.
                await asyncio.sleep(0)
            self.silent_calls -= 1
        return request


def register_as(full_name: str) -> Any:
    def register(echo: Echo, server: grpc.aio.Server) -> None:
        handlers = {
            "UnaryUnary": grpc.unary_unary_rpc_method_handler(echo.unary),
            "UnaryStream": grpc.unary_stream_rpc_method_handler(echo.unary_stream),
            "StreamUnary": grpc.stream_unary_rpc_method_handler(echo.stream_unary),
            "StreamStream": grpc.stream_stream_rpc_method_handler(echo.stream_stream),
            "Silent": grpc.unary_unary_rpc_method_handler(echo.silent),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(full_name, handlers),))

    return register


@asynccontextmanager
async def serving(port: int = 0, **options: Any) -> AsyncIterator[tuple[GrpcServer, Echo]]:
    server, echo = GrpcServer("127.0.0.1", port, secret=SECRET, **options), Echo()
    server.add_service(register_as(INTERNAL), echo, INTERNAL, internal=True)
    server.add_service(register_as(PUBLIC), echo, PUBLIC, internal=False)
    await server.start()
    try:
        yield server, echo
    finally:
        echo.release.set()
        await server.stop(0)


async def _requests(payload: bytes) -> AsyncIterator[bytes]:
    if payload == SILENCE:
        await asyncio.Event().wait()
    yield payload


async def call(link: grpc.aio.Channel, service: str, shape: str, payload: bytes = b"x", **kwargs: Any) -> bytes:
    path = f"/{service}/{shape}"
    if shape == "UnaryUnary":
        return bytes(await link.unary_unary(path)(payload, **kwargs))
    if shape == "UnaryStream":
        return b"".join([part async for part in link.unary_stream(path)(payload, **kwargs)])
    if shape == "StreamUnary":
        return bytes(await link.stream_unary(path)(_requests(payload), **kwargs))
    return b"".join([part async for part in link.stream_stream(path)(_requests(payload), **kwargs)])


async def call_until_refused(link: grpc.aio.Channel) -> None:
    """Call until a call is refused. One that meets the very moment of stopping is cut (CANCELLED): call again."""
    while True:
        try:
            await call(link, PUBLIC, "UnaryUnary")
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.CANCELLED:
                raise


@pytest.mark.parametrize("shape", SHAPES)
async def test_an_internal_method_of_any_shape_needs_the_right_secret(shape: str) -> None:
    async with serving() as (server, echo):
        for wrong in (None, b"", b"0123456789abcdeX", SECRET + b"0"):
            async with channel(server.address, wrong) as link:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    # grpc's asyncio client reports a write that meets a refusal as INTERNAL, now and then.
                    await call(link, INTERNAL, shape, SILENCE)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert echo.calls == 0
        async with channel(server.address, SECRET) as link:
            assert await call(link, INTERNAL, shape) == b"x"


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_public_method_of_any_shape_needs_no_secret(shape: str) -> None:
    async with serving() as (server, _), channel(server.address) as link:
        assert await call(link, PUBLIC, shape) == b"x"


async def test_an_unknown_method_of_an_internal_service_is_unimplemented() -> None:
    async with serving() as (server, _), channel(server.address) as link:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await link.unary_unary(f"/{INTERNAL}/Nothing")(b"")
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_the_secret_is_added_to_the_callers_own_metadata() -> None:
    async with serving() as (server, _), channel(server.address, SECRET) as link:
        assert await call(link, INTERNAL, "UnaryUnary", metadata=(("request-id", "1"),)) == b"x"
        assert await call(link, INTERNAL, "UnaryUnary", metadata=grpc.aio.Metadata(("request-id", "1"))) == b"x"


def test_an_internal_service_without_a_secret_is_refused_at_once() -> None:
    async def build() -> None:
        server = GrpcServer("127.0.0.1")
        with pytest.raises(ValueError, match="secret"):
            server.add_service(register_as(INTERNAL), Echo(), INTERNAL, internal=True)

    asyncio.run(build())


@asynccontextmanager
async def default_server() -> AsyncIterator[str]:
    """A server as grpc makes it when nobody sets its options: it closes connections that ping `too often`."""
    server, echo = grpc.aio.server(), Echo()
    register_as(PUBLIC)(echo, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def test_fast_pings_never_cut_long_quiet_calls() -> None:
    # The default server is the control: it cuts the same client, pinging the same way, after some seconds. Only
    # a silence longer than that proves anything about ours.
    async with (
        default_server() as control_address,
        serving() as (server, echo),
        channel(server.address, SECRET, ping_interval_s=0.02) as link,
        channel(control_address, ping_interval_s=0.02) as control_link,
    ):
        silent = link.unary_unary(f"/{INTERNAL}/Silent")
        calls = [asyncio.ensure_future(silent(b"%d" % index)) for index in range(3)]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await control_link.unary_unary(f"/{PUBLIC}/Silent")(b"", timeout=60)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        done, _ = await asyncio.wait(calls, timeout=1.5)
        assert not done
        echo.release.set()
        assert await asyncio.gather(*calls) == [b"0", b"1", b"2"]


async def test_messages_up_to_the_bound_pass_both_ways_and_larger_ones_do_not() -> None:
    async with serving() as (server, _), channel(server.address) as link:
        large = bytes(MAX_MESSAGE_BYTES - 1024)
        assert len(await call(link, PUBLIC, "UnaryUnary", large)) == len(large)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(link, PUBLIC, "UnaryUnary", bytes(MAX_MESSAGE_BYTES + 1))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_server_can_have_a_bound_of_its_own_on_what_it_receives() -> None:
    async with serving(max_received_bytes=1000) as (server, echo), channel(server.address) as link:
        assert len(await call(link, PUBLIC, "UnaryUnary", bytes(1000))) == 1000
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(link, PUBLIC, "UnaryUnary", bytes(1001))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        # The same status as an overload, but not the same thing: a retry cannot help.
        assert KvferryError.from_rpc(caught.value, "the server").code == ErrorCode.INVALID_REQUEST
        assert echo.calls == 1


async def test_calls_over_the_bound_are_refused_at_once_and_those_within_it_go_on() -> None:
    async with serving(max_calls=3) as (server, echo), channel(server.address) as link, channel(server.address) as more:
        running = [asyncio.ensure_future(link.unary_unary(f"/{PUBLIC}/Silent")(b"kept")) for _ in range(3)]
        for _ in running:
            await echo.entered.acquire()
        for asked in (link, more):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(asked, PUBLIC, "UnaryUnary")
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert KvferryError.from_rpc(caught.value, "the server").code == ErrorCode.OVERLOADED
        echo.release.set()
        assert await asyncio.gather(*running) == [b"kept"] * 3
        assert await call(more, PUBLIC, "UnaryUnary") == b"x"


async def test_health_follows_set_serving_and_needs_no_secret() -> None:
    states = health_pb2.HealthCheckResponse
    async with serving() as (server, _), channel(server.address) as link:
        stub = health_pb2_grpc.HealthStub(link)

        async def status(service: str) -> int:
            return int((await stub.Check(health_pb2.HealthCheckRequest(service=service))).status)

        assert (await status(""), await status(LIVE)) == (states.NOT_SERVING, states.SERVING)
        await server.set_serving(True)
        assert [await status(name) for name in ("", INTERNAL, PUBLIC)] == [states.SERVING] * 3
        await server.set_serving(False)
        assert (await status(INTERNAL), await status(LIVE)) == (states.NOT_SERVING, states.SERVING)


async def test_reflection_lists_the_services_and_needs_no_secret() -> None:
    async with serving() as (server, _), channel(server.address) as link:
        request = reflection_pb2.ServerReflectionRequest(list_services="")

        async def ask() -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
            yield request

        stub = reflection_pb2_grpc.ServerReflectionStub(link)
        names: set[str] = set()
        async for answer in stub.ServerReflectionInfo(ask()):
            names |= {service.name for service in answer.list_services_response.service}
    assert {INTERNAL, PUBLIC, "grpc.health.v1.Health"} <= names


async def test_stop_lets_running_calls_finish_and_refuses_new_ones() -> None:
    async with serving() as (server, echo), channel(server.address) as link:
        running = asyncio.ensure_future(link.unary_unary(f"/{PUBLIC}/Silent")(b"kept"))
        await call(link, PUBLIC, "UnaryUnary")
        stopping = asyncio.create_task(server.stop(10))
        async with channel(server.address) as late:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call_until_refused(late)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert not running.done()
        echo.release.set()
        assert await running == b"kept"
        await stopping
        await server.stop(0)


async def test_after_stop_no_handler_runs_any_more() -> None:
    # H099: an event loop that ends under a handler makes gRPC log the handler's cancellation as a defect.
    async with serving() as (server, echo), channel(server.address) as link:
        cut = [asyncio.ensure_future(link.unary_unary(f"/{PUBLIC}/Silent")(b"")) for _ in range(3)]
        while echo.silent_calls < len(cut):
            await call(link, PUBLIC, "UnaryUnary")
        await server.stop(0)
        assert echo.silent_calls == 0
        await asyncio.gather(*cut, return_exceptions=True)


async def test_a_call_cut_by_a_restart_is_unavailable_and_the_channel_recovers() -> None:
    async with serving() as (server, _), channel(server.address) as link:
        running = asyncio.ensure_future(link.unary_unary(f"/{PUBLIC}/Silent")(b""))
        await call(link, PUBLIC, "UnaryUnary")
        await server.stop(0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        async with serving(server.port) as (_, _):
            assert await call(link, PUBLIC, "UnaryUnary", wait_for_ready=True, timeout=10) == b"x"


async def test_a_port_in_use_is_an_error_and_never_shared() -> None:
    async with serving() as (server, _):
        second = GrpcServer("127.0.0.1", server.port)
        with pytest.raises(OSError, match=str(server.port)):
            await second.start()
        await second.stop(0)


def test_an_ipv6_host_gets_brackets() -> None:
    assert join_host_port("::1", 5) == "[::1]:5"
    assert join_host_port("127.0.0.1", 5) == "127.0.0.1:5"

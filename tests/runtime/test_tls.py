"""TLS of both kinds of port: who is let in, and new files for new connections without a restart."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from grpc_health.v1 import health_pb2, health_pb2_grpc

from runtime.clock import ManualClock
from runtime.grpc_life import GrpcServer, channel
from runtime.tls import ChannelTls, InternalTlsOptions, TlsFiles, https_context, server_credentials
from tests.support.certificates import Authority, key_pem, replace, serial_in, serial_of

TIMEOUT_S = 10.0


class Shop:
    """Files of one authority, of a server and a client that it has signed, and a clock moved by hand."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.clock = ManualClock(5.0)
        self.authority = Authority.create()
        self.ca = self.authority.write_own(directory)
        self.cert, self.key = self.authority.write(directory, "server")
        self.server = TlsFiles(self.cert, self.key)
        self.mutual = TlsFiles(self.cert, self.key, self.ca)
        self.trusting = TlsFiles(ca_file=self.ca)
        self.client = TlsFiles(*self.authority.write(directory, "client", ()), self.ca)

    def channel_tls(self, files: TlsFiles, server_name: str = "") -> ChannelTls:
        return ChannelTls(files, self.clock, server_name=server_name)


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path)


@asynccontextmanager
async def grpc_server(shop: Shop, files: TlsFiles) -> AsyncIterator[str]:
    server = GrpcServer("127.0.0.1", credentials=server_credentials(files, shop.clock))
    await server.start()
    await server.set_serving(True)
    try:
        yield server.address
    finally:
        await server.stop(0)


async def check(address: str, tls: ChannelTls | None) -> grpc.StatusCode:
    """The status of a call over a connection of its own."""
    async with channel(address, tls=tls) as link:
        stub = health_pb2_grpc.HealthStub(link)
        try:
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK


@asynccontextmanager
async def https_server(context: ssl.SSLContext) -> AsyncIterator[int]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(100):
                writer.write(data)
                await writer.drain()
        except (ConnectionError, ssl.SSLError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


class Visit:
    """A client of `https_server`, on a plain socket in a thread."""

    def __init__(self, port: int, ca: Path, **limits: Any) -> None:
        context = ssl.create_default_context(cafile=str(ca))
        for name, value in limits.items():
            setattr(context, name, value)
        plain = socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S)
        self.socket = context.wrap_socket(plain, server_hostname="127.0.0.1")
        self.serial = serial_of(self.socket.getpeercert(binary_form=True))

    def echo(self, data: bytes) -> bytes:
        self.socket.sendall(data)
        return self.socket.recv(100)


async def visit(port: int, ca: Path, **limits: Any) -> Visit:
    return await asyncio.to_thread(lambda: Visit(port, ca, **limits))


async def test_a_grpc_server_with_tls_speaks_to_those_who_trust_it_and_to_no_plain_client(shop: Shop) -> None:
    async with grpc_server(shop, shop.server) as address:
        assert await check(address, shop.channel_tls(shop.trusting)) is grpc.StatusCode.OK
        assert await check(address, None) is grpc.StatusCode.UNAVAILABLE
        stranger = Authority.create("another").write_own(shop.directory, "other")
        assert await check(address, shop.channel_tls(TlsFiles(ca_file=stranger))) is grpc.StatusCode.UNAVAILABLE


async def test_with_a_client_authority_only_its_certificates_are_let_in(shop: Shop) -> None:
    other = Authority.create("another")
    forged = TlsFiles(*other.write(shop.directory, "forged", ()), shop.ca)
    async with grpc_server(shop, shop.mutual) as address:
        assert await check(address, shop.channel_tls(shop.client)) is grpc.StatusCode.OK
        assert await check(address, shop.channel_tls(shop.trusting)) is grpc.StatusCode.UNAVAILABLE
        assert await check(address, shop.channel_tls(forged)) is grpc.StatusCode.UNAVAILABLE
        assert await check(address, None) is grpc.StatusCode.UNAVAILABLE


async def test_a_server_must_be_named_by_its_certificate_unless_another_name_is_agreed(shop: Shop) -> None:
    named = TlsFiles(*shop.authority.write(shop.directory, "named", ("cluster.internal",)))
    async with grpc_server(shop, named) as address:
        assert await check(address, shop.channel_tls(shop.trusting)) is grpc.StatusCode.UNAVAILABLE
        assert await check(address, shop.channel_tls(shop.trusting, "cluster.internal")) is grpc.StatusCode.OK


async def test_new_files_are_used_by_new_grpc_connections_on_both_sides(shop: Shop) -> None:
    trusting = shop.channel_tls(shop.client)
    async with grpc_server(shop, shop.mutual) as address:
        assert await check(address, trusting) is grpc.StatusCode.OK
        new = Authority.create("the next one")
        new.write(shop.directory, "server")
        new.write(shop.directory, "client", ())
        new.write_own(shop.directory)
        assert await check(address, trusting) is grpc.StatusCode.OK
        shop.clock.advance(1.0)
        assert await check(address, trusting) is grpc.StatusCode.OK
        assert await check(address, shop.channel_tls(shop.trusting)) is grpc.StatusCode.UNAVAILABLE
        old = shop.authority.write_own(shop.directory, "old")
        assert await check(address, shop.channel_tls(TlsFiles(shop.client.cert_file, shop.client.key_file, old))) is (
            grpc.StatusCode.UNAVAILABLE
        )


async def test_new_files_are_used_by_new_https_connections_while_old_ones_go_on(shop: Shop) -> None:
    async with https_server(https_context(shop.server, shop.clock)) as port:
        first = await visit(port, shop.ca)
        assert first.serial == serial_in(shop.cert)
        shop.authority.write(shop.directory, "server")
        shop.clock.advance(1.0)
        second = await visit(port, shop.ca)
        assert second.serial == serial_in(shop.cert) != first.serial
        assert await asyncio.to_thread(first.echo, b"still here") == b"still here"
        for each in (first, second):
            each.socket.close()


async def test_a_certificate_beside_the_old_key_waits_for_its_own(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    async with https_server(https_context(shop.server, shop.clock)) as port:
        old_serial, old_key = serial_in(shop.cert), shop.key.read_bytes()
        shop.authority.write(shop.directory, "server")
        new_key = shop.key.read_bytes()
        replace(shop.key, old_key)
        for _ in range(3):
            shop.clock.advance(1.0)
            seen = await visit(port, shop.ca)
            seen.socket.close()
            assert seen.serial == old_serial
        assert [record.levelname for record in caplog.records].count("ERROR") == 1
        replace(shop.key, new_key)
        shop.clock.advance(1.0)
        seen = await visit(port, shop.ca)
        seen.socket.close()
        assert seen.serial == serial_in(shop.cert) != old_serial


async def test_nothing_older_than_tls_1_2_is_spoken(shop: Shop) -> None:
    context = https_context(shop.server, shop.clock)
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2
    async with https_server(context) as port:
        seen = await visit(port, shop.ca, maximum_version=ssl.TLSVersion.TLSv1_2)
        assert seen.socket.version() == "TLSv1.2"
        seen.socket.close()


def test_files_that_are_no_good_are_an_error_at_the_start_that_names_them(shop: Shop) -> None:
    other_key = shop.authority.write(shop.directory, "other")[1]
    locked = shop.directory / "locked.key"
    locked.write_bytes(key_pem(ec.generate_private_key(ec.SECP256R1()), b"password"))
    empty = shop.directory / "empty"
    empty.write_bytes(b"")
    bad = [
        TlsFiles(shop.cert, other_key),
        TlsFiles(shop.cert, locked),
        TlsFiles(empty, shop.key),
        TlsFiles(shop.cert, shop.key, empty),
    ]
    for files in bad:
        for make in (server_credentials, https_context, ChannelTls):
            with pytest.raises(ValueError, match=str(shop.directory)):
                make(files, shop.clock)
    with pytest.raises(OSError):
        https_context(TlsFiles(shop.directory / "nothing", shop.key), shop.clock)
    with pytest.raises(ValueError, match="go together"):
        TlsFiles(shop.cert)


def test_internal_flags_go_together() -> None:
    path = Path("x")
    InternalTlsOptions().validate()
    assert InternalTlsOptions().internal_tls is None
    whole = InternalTlsOptions(internal_tls_cert_file=path, internal_tls_key_file=path, internal_tls_ca_file=path)
    whole.validate()
    assert whole.internal_tls == TlsFiles(path, path, path)
    for partial in ({"internal_tls_cert_file": path}, {"internal_tls_ca_file": path}, {"internal_tls_name": "x"}):
        with pytest.raises(ValueError, match="--internal-tls"):
            InternalTlsOptions(**partial).validate()  # type: ignore[arg-type]

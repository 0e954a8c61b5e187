"""The HTTP door over TLS, on both kinds of event loop: answers, streams, rotation, and clients that stall."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop

from router.http.protocol import BoundedHttpProtocol, HttpServer
from runtime.clock import ManualClock
from runtime.tls import TlsFiles, https_context
from tests.support.certificates import Authority, serial_in, serial_of
from tests.support.http_door import Door, chat_body, events, ids_of

CHAT = "/v1/chat/completions"
Runner = Callable[[Coroutine[Any, Any, None]], None]


class Narrow(BoundedHttpProtocol):
    """The same protocol with bounds that a test reaches quickly."""

    head_timeout_s = 0.3
    stalled_write_s = 0.2

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        # So that a client that reads nothing is noticed after kilobytes, not after megabytes.
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)
        transport.set_write_buffer_limits(high=16384)
        super().connection_made(transport)


class Site:
    """A door behind TLS, and a client's trust in it."""

    def __init__(self, directory: Path, door: Door) -> None:
        self.directory = directory
        self.door = door
        self.clock = ManualClock(5.0)
        self.authority = Authority.create()
        self.cert, key = self.authority.write(directory, "server")
        self.tls = https_context(TlsFiles(self.cert, key), self.clock)
        self.trust = ssl.create_default_context(cafile=str(self.authority.write_own(directory)))

    @asynccontextmanager
    async def serving(self, protocol: type[BoundedHttpProtocol] = BoundedHttpProtocol) -> AsyncIterator[int]:
        server = HttpServer(self.door.app, host="127.0.0.1", port=0, tls=self.tls, protocol=protocol)
        await server.start()
        try:
            yield server.port
        finally:
            await server.close(grace_s=0)

    async def connect(self, port: int, **limits: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", port, ssl=self.trust, **limits)


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Runner:
    runner: Runner = request.param
    return lambda scenario: runner(asyncio.wait_for(scenario, 30))


def words(_: Any) -> Any:
    return [[token] for token in ids_of("some words")]


def test_answers_and_streams_come_over_tls_and_plain_http_gets_nothing(run: Runner, tmp_path: Path) -> None:
    async def scenario() -> None:
        site = Site(tmp_path, Door(words))
        async with site.serving() as port:
            url = f"https://127.0.0.1:{port}"
            async with httpx.AsyncClient(verify=site.trust, base_url=url) as client:
                assert (await client.get("/health")).json() == {"status": "ok"}
                answer = await client.post(CHAT, json=chat_body(stream=True))
                assert events(answer.content)[-1] == "[DONE]"
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
                with pytest.raises(httpx.HTTPError):
                    await client.get("/health")

    run(scenario())


def test_a_new_certificate_is_shown_to_new_connections(run: Runner, tmp_path: Path) -> None:
    async def scenario() -> None:
        site = Site(tmp_path, Door(words))
        async with site.serving() as port:
            seen = []
            writers = []
            for _ in range(2):
                _, writer = await site.connect(port)
                writers.append(writer)
                shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
                seen.append((serial_of(shown), serial_in(site.cert)))
                site.authority.write(site.directory, "server")
                site.clock.advance(1.0)
            for writer in writers:
                writer.transport.abort()
            assert seen[0][0] != seen[1][0]
            assert all(shown == written for shown, written in seen)

    run(scenario())


def test_a_client_that_never_finishes_its_greeting_is_shown_out(run: Runner, tmp_path: Path) -> None:
    async def scenario() -> None:
        site = Site(tmp_path, Door(words))
        async with site.serving(Narrow) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"\x16\x03\x01")
            assert await reader.read() == b""
            writer.transport.abort()

    run(scenario())


def test_a_client_that_stops_reading_is_cut_off_over_tls_too(run: Runner, tmp_path: Path) -> None:
    async def scenario() -> None:
        many = ids_of(" word") * 200

        def flood(_: Any) -> Any:
            return (many for _ in range(20_000))

        door = Door(flood)
        site = Site(tmp_path, door)
        async with site.serving(Narrow) as port:
            plain = socket.create_connection(("127.0.0.1", port))
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            plain.setblocking(False)
            _, writer = await asyncio.open_connection(
                sock=plain, ssl=site.trust, server_hostname="127.0.0.1", limit=1024
            )
            writer.transport.pause_reading()
            data = b'{"model": "tiny-real", "prompt": "x", "stream": true}'
            head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
            await door.source.wait_until(lambda source: bool(source.cancelled), timeout_s=20)
            assert len(door.source.cancelled) == 1
            writer.transport.abort()

    run(scenario())

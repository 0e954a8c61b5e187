"""Clients that trickle: a head or a body that does not come in time is refused with 408, and holds nothing."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest

from router.http import server
from router.http.json_body import BodyReader
from router.http.protocol import BoundedHttpProtocol, HttpServer
from tests.support.http_door import Door, says

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


class Hasty(BoundedHttpProtocol):
    """The same protocol with a bound that a test reaches quickly."""

    head_timeout_s = 0.2


@asynccontextmanager
async def serving(door: Door) -> AsyncIterator[int]:
    listening = HttpServer(door.app, host="127.0.0.1", port=0, protocol=Hasty)
    await listening.start()
    try:
        yield listening.port
    finally:
        await listening.close(grace_s=0)


async def trickle(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Send it byte by byte for ever, as long as anybody takes it."""
    try:
        while True:
            for value in data:
                writer.write(bytes([value]))
                await writer.drain()
                await asyncio.sleep(0.02)
    except ConnectionError:
        pass


async def answer_to(port: int, opening: bytes, rest: bytes) -> bytes:
    """Everything that comes until the connection ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(opening)
    sending = asyncio.create_task(trickle(writer, rest))
    received = b""
    try:
        while data := await reader.read(4096):
            received += data
    except ConnectionError:
        pass
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        writer.transport.abort()
    return received


async def test_a_head_that_trickles_is_refused_in_time() -> None:
    async with serving(Door(says("x"))) as port:
        received = await answer_to(port, b"POST /v1/completions HTTP/1.1\r\n", b"x-slow: 1\r\n")
        assert received.startswith(b"HTTP/1.1 408 ")
        assert b'"request_timeout"' in received


async def test_a_connection_on_which_nothing_comes_is_closed_without_a_word() -> None:
    async with serving(Door(says("x"))) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await reader.read() == b""
        writer.transport.abort()


@pytest.mark.parametrize("framing", [b"content-length: 4000000\r\n\r\n", b"transfer-encoding: chunked\r\n\r\n"])
async def test_a_body_that_trickles_is_refused_in_time_and_its_connection_ends(
    framing: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "BodyReader", partial(BodyReader, timeout_s=0.2))
    door = Door(says("x"))
    async with serving(door) as port:
        rest = b"1\r\n \r\n" if b"chunked" in framing else b" "
        received = await answer_to(port, HEAD + framing, rest)
        assert received.startswith(b"HTTP/1.1 408 ")
        assert received.count(b"HTTP/1.1") == 1
    assert door.source.requests == []
    assert door.refused == ["invalid_request"]


async def test_a_compressed_body_that_trickles_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "BodyReader", partial(BodyReader, timeout_s=0.2))
    async with serving(Door(says("x"))) as port:
        received = await answer_to(port, HEAD + b"content-encoding: gzip\r\ncontent-length: 4000\r\n\r\n\x1f", b"\x8b")
        assert received.startswith((b"HTTP/1.1 408 ", b"HTTP/1.1 400 "))

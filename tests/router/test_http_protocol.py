"""The door on a real socket, on asyncio's and on uvloop's event loop: hostile heads, pipelining, disconnects, drain."""

import asyncio
import json
import socket
import struct
from collections.abc import Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import pytest
import uvloop

from router.http.protocol import BoundedHttpProtocol, HttpServer
from tests.support.http_door import Door, chat_body, events, ids_of

CHAT = "/v1/chat/completions"
Scenario = Callable[[], Coroutine[Any, Any, None]]


class Narrow(BoundedHttpProtocol):
    """The same protocol with bounds that a test reaches quickly."""

    head_timeout_s = 0.2
    stalled_write_s = 0.2


class Few(BoundedHttpProtocol):
    """The same protocol with fewer connections. Apart: a connection that only stands there must not time out."""

    max_connections = 4


def on_both_loops(scenario: Scenario) -> Callable[..., None]:
    """Run a scenario on each kind of event loop."""

    @pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
    def test(run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
        run(asyncio.wait_for(_tidy(scenario), 30))

    test.__name__, test.__doc__ = scenario.__name__, scenario.__doc__
    decorated: Callable[..., None] = test
    return decorated


async def _tidy(scenario: Scenario) -> None:
    try:
        await scenario()
    finally:
        for wire in Wire.opened:
            wire.writer.transport.abort()
        closings = [wire.writer.wait_closed() for wire in Wire.opened]
        await asyncio.gather(*closings, return_exceptions=True)
        Wire.opened.clear()


@asynccontextmanager
async def serving(door: Door, protocol: type[BoundedHttpProtocol] = BoundedHttpProtocol) -> Any:
    server = HttpServer(door.app, host="127.0.0.1", port=0, protocol=protocol)
    await server.start()
    try:
        yield server
    finally:
        await server.close(grace_s=0)
        assert not door.source.running


class Wire:
    """A raw client connection; all are closed behind a scenario."""

    opened: ClassVar[list["Wire"]] = []

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.opened.append(self)

    @classmethod
    async def open(cls, server: HttpServer) -> "Wire":
        return cls(*await asyncio.open_connection("127.0.0.1", server.port))

    def post(self, body: dict[str, Any], path: str = CHAT, *head: str) -> None:
        data = json.dumps(body).encode()
        lines = [f"POST {path} HTTP/1.1", "host: door", "content-type: application/json", *head]
        self.writer.write("\r\n".join([*lines, f"content-length: {len(data)}", "", ""]).encode() + data)

    def get(self, path: str = "/health", *head: str) -> None:
        self.writer.write("\r\n".join([f"GET {path} HTTP/1.1", "host: door", *head, "", ""]).encode())

    async def answer(self) -> tuple[int, bytes]:
        """The status and body of the next answer."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        status = int(head.split()[1])
        if b"chunked" in head:
            body = b""
            while size := int(await self.reader.readline(), 16):
                body += (await self.reader.readexactly(size + 2))[:-2]
            await self.reader.readline()
            return status, body
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        return status, await self.reader.readexactly(length)

    async def ended(self) -> bool:
        """Wait for the end of the connection; whatever still comes is dropped."""
        try:
            while await self.reader.read(65536):
                pass
        except ConnectionError:
            pass
        return True

    def reset(self) -> None:
        """Close with RST instead of FIN."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


def endless(_: Any) -> Any:
    return [ids_of("x"), asyncio.Event()]


def words(_: Any) -> Any:
    return [[token] for token in ids_of("some words")]


@on_both_loops
async def test_answers_come_over_one_kept_connection() -> None:
    async with serving(Door(words)) as server:
        wire = await Wire.open(server)
        for _ in range(3):
            wire.post(chat_body(stream=True))
            status, body = await wire.answer()
            assert (status, events(body)[-1]) == (200, "[DONE]")
            wire.get()
            assert (await wire.answer())[0] == 200


@on_both_loops
async def test_a_client_that_closes_or_resets_cancels_its_choices_in_any_state() -> None:
    gate = asyncio.Event()
    scripts = {"waiting": lambda _: [gate], "streaming": endless}
    for state, script in scripts.items():
        for stream in (True, False):
            for reset in (True, False):
                door = Door(script)
                async with serving(door) as server:
                    wire = await Wire.open(server)
                    wire.post(chat_body(n=2, stream=stream))
                    await door.source.wait_until(lambda source: len(source.running) == 2)
                    if stream and state == "streaming":
                        await wire.reader.readuntil(b"\n\n")
                    if reset:
                        wire.reset()
                    else:
                        wire.writer.close()
                    await door.source.wait_until(lambda source: not source.running)
                    assert len(door.source.cancelled) == 2


@on_both_loops
async def test_a_pipelined_request_does_not_hide_that_the_client_left() -> None:
    door = Door(endless)
    async with serving(door) as server:
        wire = await Wire.open(server)
        wire.post(chat_body())
        await door.source.wait_until(lambda source: bool(source.running))
        for _ in range(100):
            wire.post(chat_body(n=2))
        wire.writer.close()
        await door.source.wait_until(lambda source: not source.running)
        assert len(door.source.requests) == 1


@on_both_loops
async def test_a_pipelined_request_is_dropped_and_the_connection_closed_behind_the_answer() -> None:
    gate = asyncio.Event()
    door = Door(lambda _: [gate, *words(_)])
    async with serving(door) as server:
        wire = await Wire.open(server)
        wire.post(chat_body())
        wire.get()
        await door.source.wait_until(lambda source: bool(source.running))
        gate.set()
        assert (await wire.answer())[0] == 200
        assert await wire.reader.read() == b""


@on_both_loops
async def test_garbage_behind_a_request_does_not_get_into_its_answer() -> None:
    door = Door(endless)
    async with serving(door) as server:
        wire = await Wire.open(server)
        wire.post(chat_body(stream=True))
        await wire.reader.readuntil(b"\n\n")
        wire.writer.write(b"\x00\x01 garbage\r\n\r\n" * 10)
        rest = await asyncio.gather(wire.reader.read(), return_exceptions=True)
        assert b"HTTP/1.1" not in (rest[0] if isinstance(rest[0], bytes) else b"")
        await door.source.wait_until(lambda source: not source.running)


@on_both_loops
async def test_gigantic_heads_are_refused_and_others_are_served() -> None:
    door = Door(words)
    filler = b"x" * 65536
    async with serving(door) as server:
        for opening, piece in [
            (b"GET /health HTTP/1.1\r\nx: ", filler),
            (b"GET /", filler),
            (b"GET /health HTTP/1.1\r\n", b"a: b\r\n" * 10_000),
            (b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 100_000 + b"\r\n", b""),
            (b"POST /tokenize HTTP/1.1\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx: ",
             filler),
            (b"POST /tokenize HTTP/1.1\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n1;",
             filler),
        ]:  # fmt: skip
            wire = await Wire.open(server)
            sent = 0
            try:
                wire.writer.write(opening)
                while piece and sent < 200 * 1024 * 1024:
                    wire.writer.write(piece)
                    await wire.writer.drain()
                    sent += len(piece)
            except ConnectionError:
                pass
            assert await wire.ended()
            assert sent < 16 * 1024 * 1024
            wire.writer.close()
        other = await Wire.open(server)
        other.get()
        assert (await other.answer())[0] == 200


@on_both_loops
async def test_a_large_head_gets_an_answer_in_the_usual_shape() -> None:
    async with serving(Door(words)) as server:
        wire = await Wire.open(server)
        wire.get("/health", "x: " + "y" * 70_000)
        status, body = await wire.answer()
        assert (status, json.loads(body)["error"]["code"]) == (431, "headers_too_large")
        wire.writer.close()
        wire = await Wire.open(server)
        wire.get("/health", "x: " + "y" * 30_000)
        assert (await wire.answer())[0] == 200


@on_both_loops
async def test_what_is_not_http_gets_an_answer_in_the_usual_shape() -> None:
    async with serving(Door(words)) as server:
        for garbage in (b"\x16\x03\x01 hello\r\n\r\n", b"GET /\xff HTTP/1.1\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"):
            wire = await Wire.open(server)
            wire.writer.write(garbage)
            status, body = await wire.answer()
            assert (status, json.loads(body)["error"]["code"]) == (400, "malformed_http")
            assert await wire.ended()


@on_both_loops
async def test_a_body_too_large_is_answered_while_it_is_still_being_sent() -> None:
    async with serving(Door(words)) as server:
        wire = await Wire.open(server)
        size = 50 * 1024 * 1024
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {size}\r\n\r\n"
        wire.writer.write(head.encode() + b"[" * 1000)
        status, body = await wire.answer()
        assert (status, json.loads(body)["error"]["code"]) == (413, "body_too_large")
        # The rest is read and dropped, so that a client which sends first and reads later gets the answer too.
        left = size - 1000
        while left:
            part = min(left, 1024 * 1024)
            wire.writer.write(b" " * part)
            await wire.writer.drain()
            left -= part
        wire.get()
        assert (await wire.answer())[0] == 200


@on_both_loops
async def test_a_body_too_large_is_answered_also_to_a_client_that_reads_only_when_it_has_sent_all() -> None:
    """One that wants the connection closed: its answer must not be lost to what it still sends."""
    size = 16 * 1024 * 1024
    async with serving(Door(words)) as server:
        for _ in range(3):
            wire = await Wire.open(server)
            lines = (f"POST {CHAT} HTTP/1.1", "host: door", "content-type: application/json", "connection: close")
            wire.writer.write("\r\n".join([*lines, f"content-length: {size}", "", ""]).encode())
            for _ in range(16):
                wire.writer.write(b" " * (size // 16))
                await wire.writer.drain()
            status, _ = await wire.answer()
            assert status == 413
            assert await wire.reader.read() == b""
    # A good request on such a connection has its end at once.
    async with serving(Door(words)) as server:
        wire = await Wire.open(server)
        wire.post(chat_body(), CHAT, "connection: close")
        assert (await wire.answer())[0] == 200
        assert await wire.reader.read() == b""


@on_both_loops
async def test_a_client_that_sends_no_request_is_closed_but_a_waiting_answer_is_not() -> None:
    gate = asyncio.Event()
    door = Door(lambda _: [gate, *words(_)])
    async with serving(door, Narrow) as server:
        busy = await Wire.open(server)
        busy.post(chat_body())
        await door.source.wait_until(lambda source: bool(source.running))
        silent, slow = await Wire.open(server), await Wire.open(server)
        slow.writer.write(b"GET /health HT")
        assert await silent.ended()
        assert await slow.ended()
        gate.set()
        assert (await busy.answer())[0] == 200


@on_both_loops
async def test_connections_beyond_the_bound_are_refused() -> None:
    async with serving(Door(words), Few) as server:
        wires = [await Wire.open(server) for _ in range(5)]
        status, body = await wires[-1].answer()
        assert (status, json.loads(body)["error"]["code"]) == (503, "overloaded")
        wires[0].get()
        assert (await wires[0].answer())[0] == 200


@on_both_loops
async def test_a_client_that_stops_reading_is_cut_off() -> None:
    def flood(_: Any) -> Any:
        for token in ids_of(" word") * 100_000:
            yield [token]
            yield asyncio.Event() if door.source.running == set() else [token]

    door = Door(flood)
    async with serving(door, Narrow) as server:
        sock = socket.create_connection(("127.0.0.1", server.port))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        wire = Wire(*await asyncio.open_connection(sock=sock, limit=1024))
        wire.post(chat_body(stream=True))
        await wire.reader.readuntil(b"\n\n")
        await door.source.wait_until(lambda source: not source.running, timeout_s=20)
        assert len(door.source.cancelled) == 1


@on_both_loops
async def test_closing_lets_running_answers_end_and_cuts_them_after_the_grace() -> None:
    gate = asyncio.Event()
    door = Door(lambda _: [ids_of("x"), gate, *words(_)])
    server = HttpServer(door.app, host="127.0.0.1", port=0)
    await server.start()
    idle, wire = await Wire.open(server), await Wire.open(server)
    idle.get()
    assert (await idle.answer())[0] == 200
    wire.post(chat_body(stream=True))
    await wire.reader.readuntil(b"\n\n")
    closing = asyncio.create_task(server.close(grace_s=30))
    assert await idle.ended()
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", server.port)
    gate.set()
    assert b"[DONE]" in await wire.reader.read()
    await closing

    door = Door(endless)
    server = HttpServer(door.app, host="127.0.0.1", port=0)
    await server.start()
    wire2 = await Wire.open(server)
    wire2.post(chat_body(stream=True))
    await wire2.reader.readuntil(b"\n\n")
    await server.close(grace_s=0)
    assert await wire2.ended()
    assert len(door.source.cancelled) == 1


@on_both_loops
async def test_a_taken_port_is_an_error_at_start() -> None:
    door = Door(words)
    async with serving(door) as server:
        with pytest.raises(OSError):
            await HttpServer(door.app, host="127.0.0.1", port=server.port).start()

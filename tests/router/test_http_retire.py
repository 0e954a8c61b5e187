"""A door that leaves its port to another process: nobody who is connected is cut, nobody new comes in."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop

from router.http.asgi import Receive, Scope, Send
from router.http.protocol import HttpServer

REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


class Streams:
    """An application whose answers come in two pieces, the second when the test says so."""

    def __init__(self) -> None:
        self.begun = 0
        self.go_on = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.begun += 1
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        await self.go_on.wait()
        await send({"type": "http.response.body", "body": b"b"})


class Client:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def ask(self) -> None:
        self.writer.write(REQUEST)
        await self.writer.drain()

    async def head(self) -> str:
        return (await self.reader.readuntil(b"\r\n\r\n")).decode().lower()

    async def body(self) -> bytes:
        return await self.reader.readexactly(2)


@asynccontextmanager
async def door() -> AsyncIterator[tuple[HttpServer, Streams, Callable[[], Coroutine[Any, Any, Client]]]]:
    app, clients = Streams(), list[Client]()
    server = HttpServer(app, host="127.0.0.1", port=0)
    await server.start()

    async def connect() -> Client:
        clients.append(Client(*await asyncio.open_connection("127.0.0.1", server.port)))
        return clients[-1]

    try:
        async with asyncio.timeout(30):
            yield server, app, connect
    finally:
        for client in clients:
            client.writer.transport.abort()
        await asyncio.gather(*(client.writer.wait_closed() for client in clients), return_exceptions=True)
        await server.close(0)


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_each_connection_ends_with_its_next_answer(run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
    async def scenario() -> None:
        async with door() as (server, app, connect):
            app.go_on.set()
            idle = await connect()
            await idle.ask()
            assert "connection: close" not in await idle.head()
            assert await idle.body() == b"ab"
            app.go_on.clear()
            reading = await connect()
            await reading.ask()
            await reading.head()

            retiring = asyncio.create_task(server.retire(20.0))
            await asyncio.sleep(0)
            with pytest.raises(OSError):
                await connect()
            # What was under way ends whole, although its head had not said that the connection will.
            app.go_on.set()
            assert await reading.body() == b"ab"
            assert await reading.reader.read() == b""
            # Whoever comes again on a connection that was there is served, and told to come elsewhere.
            assert not retiring.done()
            await idle.ask()
            assert "connection: close" in await idle.head()
            assert await idle.body() == b"ab"
            assert await idle.reader.read() == b""
            await retiring

    run(scenario())


async def test_who_says_nothing_is_sent_away_after_a_while_and_an_answer_under_way_goes_on() -> None:
    async with door() as (server, app, connect):
        silent, reading = await connect(), await connect()
        await reading.ask()
        await reading.head()
        await server.retire(0.05)
        assert await silent.reader.read() == b""
        app.go_on.set()
        assert await reading.body() == b"ab"
        assert await reading.reader.read() == b""
        assert app.begun == 1

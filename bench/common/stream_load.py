"""A load of streamed chats over raw sockets, as cheap as Python can make it: it must not be what is measured.

Two shapes: so many requests at the same time, each begun when the one before it ends, and so many begun a second,
however long they take. Event-loop thread only.
"""

import asyncio
import json
import time
from collections import deque
from dataclasses import dataclass, field
from typing import cast

from bench.common.harness import BenchmarkError

_TIMEOUT_S = 60.0
_END = b"\r\n0\r\n\r\n"
_ID = b'"id":"'


@dataclass(slots=True)
class Streamed:
    """What came of one request. Times are of `time.perf_counter`. `chunks`: events that bring text."""

    sent_at: float
    first_at: float = 0.0
    last_at: float = 0.0
    chunks: int = 0
    request_id: str = ""

    @property
    def first_s(self) -> float:
        return self.first_at - self.sent_at

    @property
    def whole_s(self) -> float:
        return self.last_at - self.sent_at


@dataclass(frozen=True, slots=True)
class Target:
    """Where to send what."""

    host: str
    port: int
    model: str
    prompt: str
    max_tokens: int
    path: str = "/v1/chat/completions"

    def request(self) -> bytes:
        """The whole request."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": self.prompt}],
            "max_tokens": self.max_tokens,
            "stream": True,
            "temperature": 0,
        }
        data = json.dumps(body).encode()
        head = (
            f"POST {self.path} HTTP/1.1\r\nhost: {self.host}:{self.port}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(data)}\r\n\r\n"
        )
        return head.encode() + data


class _Connection(asyncio.Protocol):
    """One request at a time over one kept connection."""

    def __init__(self) -> None:
        self.result: Streamed | None = None
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[Streamed] | None = None
        self._head_came = False
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by type.

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._fail("the connection was closed")

    async def send(self, request: bytes) -> Streamed:
        """One request to its end. Raises BenchmarkError."""
        if self._transport is None:
            raise BenchmarkError("the connection is closed")
        self._done = asyncio.get_running_loop().create_future()
        self._head_came, self._tail = False, b""
        self.result = Streamed(time.perf_counter())
        self._transport.write(request)
        return await self._done

    def data_received(self, data: bytes) -> None:
        result = self.result
        if result is None:
            return
        now = time.perf_counter()
        if not self._head_came:
            self._head_came = True
            if not data.startswith(b"HTTP/1.1 200"):
                self._fail(f"it answered {data[:300]!r}")
                return
        if not result.first_at:
            if _ID not in data:
                return  # The head came alone.
            result.first_at = now
            start = data.index(_ID) + len(_ID)
            result.request_id = data[start : data.index(b'"', start)].decode()
        # An event may be cut anywhere, but each of these marks is in one event once.
        result.chunks += data.count(b"data: {") - data.count(b'"role":"') - data.count(b'"finish_reason":"')
        self._tail = (self._tail + data)[-len(_END) :]
        if self._tail == _END:
            result.last_at = now
            self.result = None
            if self._done is not None and not self._done.done():
                self._done.set_result(result)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _fail(self, reason: str) -> None:
        self.result = None
        if self._done is not None and not self._done.done():
            self._done.set_exception(BenchmarkError(reason))


@dataclass(slots=True)
class StreamLoad:
    """Connections to one router; they stay open between loads. Close it in the end."""

    target: Target
    _idle: deque[_Connection] = field(default_factory=deque)
    _open: list[_Connection] = field(default_factory=list)

    async def at_once(self, concurrent: int, total: int) -> list[Streamed]:
        """`total` requests, `concurrent` at a time. Raises BenchmarkError."""
        request, left, results = self.target.request(), iter(range(total)), list[Streamed]()

        async def worker() -> None:
            connection = await self._connection()
            for _ in left:
                results.append(await connection.send(request))
            self._idle.append(connection)

        async with asyncio.timeout(_TIMEOUT_S), asyncio.TaskGroup() as group:
            for _ in range(concurrent):
                group.create_task(worker())
        return results

    async def at_rate(self, per_s: float, total: int) -> list[Streamed]:
        """`total` requests, `per_s` begun a second, evenly. Raises BenchmarkError."""
        request, results = self.target.request(), list[Streamed]()

        async def one() -> None:
            connection = await self._connection()
            results.append(await connection.send(request))
            self._idle.append(connection)

        begun = time.perf_counter()
        async with asyncio.timeout(_TIMEOUT_S), asyncio.TaskGroup() as group:
            for number in range(total):
                await asyncio.sleep(max(0.0, begun + number / per_s - time.perf_counter()))
                group.create_task(one())
        return results

    async def close(self) -> None:
        """Close all connections."""
        for connection in self._open:
            connection.close()
        self._open.clear()
        self._idle.clear()
        await asyncio.sleep(0)

    async def _connection(self) -> _Connection:
        if self._idle:
            return self._idle.popleft()
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, self.target.host, self.target.port)
        self._open.append(connection)
        return connection

"""The least HTTP that a soak needs: a request by hand, and an answer read as slowly, and as far, as one likes."""

import asyncio
import json
import socket
from dataclasses import dataclass
from typing import Any, Self

_PIECE_BYTES = 65536
_SMALL_BUFFER_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Sent:
    """A request, ready to be sent."""

    path: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()
    method: str = "POST"

    @classmethod
    def json(cls, path: str, fields: dict[str, Any], *headers: tuple[str, str]) -> Self:
        """A body of these fields."""
        return cls(path, json.dumps(fields).encode(), headers)

    def head(self) -> bytes:
        """Everything before the body."""
        lines = [f"{self.method} {self.path} HTTP/1.1", "host: soak", "content-type: application/json"]
        lines += [f"content-length: {len(self.body)}", "connection: close"]
        lines += [f"{name}: {value}" for name, value in self.headers]
        return "\r\n".join((*lines, "", "")).encode()


class Exchange:
    """One connection for one request. Use as a context manager, which closes it, whatever was read."""

    def __init__(self, host: str, port: int, *, slow: bool = False) -> None:
        """`slow`: with a small buffer, so that the server notices that nobody reads."""
        self._address = host, port
        self._slow = slow
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reset = False

    async def __aenter__(self) -> Self:
        made = socket.socket()
        made.setblocking(False)
        if self._slow:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL_BUFFER_BYTES)
        await asyncio.get_running_loop().sock_connect(made, self._address)
        limit = _SMALL_BUFFER_BYTES if self._slow else _PIECE_BYTES
        self._reader, self._writer = await asyncio.open_connection(sock=made, limit=limit)
        return self

    async def __aexit__(self, *details: object) -> None:
        if self._writer is None:
            return
        if self._reset:
            self._writer.transport.abort()
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except OSError:
            return

    async def send(self, request: Sent) -> None:
        """All of it. A server that refuses a large body may close before it has come: then its answer is there."""
        assert self._writer is not None
        self._writer.write(request.head())
        try:
            for start in range(0, len(request.body), _PIECE_BYTES):
                self._writer.write(request.body[start : start + _PIECE_BYTES])
                await self._writer.drain()
            await self._writer.drain()
        except ConnectionError:
            return

    async def read(self, most: int = _PIECE_BYTES) -> bytes:
        """What comes next; empty at the end."""
        assert self._reader is not None
        return await self._reader.read(most)

    async def whole(self) -> "Received":
        """All of the answer. Raises ConnectionError when there is none."""
        parts = []
        while part := await self.read():
            parts.append(part)
        return received(b"".join(parts))

    def leave(self, *, reset: bool) -> None:
        """Close the connection at the end of the block, with RST or with FIN."""
        self._reset = reset


@dataclass(frozen=True, slots=True)
class Received:
    """One answer. `is_whole`: it ended as its head says."""

    status: int
    body: bytes
    is_whole: bool

    def events(self) -> list[Any]:
        """The data of its events; `[DONE]` as it is."""
        lines = [line[6:] for line in self.body.split(b"\n") if line.startswith(b"data: ")]
        return [line.decode() if line == b"[DONE]" else json.loads(line) for line in lines]


def received(data: bytes) -> Received:
    """Raises ConnectionError when it has no head."""
    head, mark, rest = data.partition(b"\r\n\r\n")
    if not mark:
        raise ConnectionError(f"no answer but {data[:80]!r}")
    lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    status = int(lines[0].split()[1])
    if headers.get("transfer-encoding") == "chunked":
        return Received(status, *_unchunked(rest))
    return Received(status, rest, len(rest) == int(headers.get("content-length", len(rest))))


def _unchunked(data: bytes) -> tuple[bytes, bool]:
    """The body, and whether its last chunk came."""
    parts: list[bytes] = []
    while True:
        size_text, mark, data = data.partition(b"\r\n")
        if not mark:
            return b"".join(parts), False
        size = int(size_text, 16)
        if size == 0:
            return b"".join(parts), True
        parts.append(data[:size])
        if len(data) < size + 2:
            return b"".join(parts), False
        data = data[size + 2 :]

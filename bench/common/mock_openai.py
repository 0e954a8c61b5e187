"""An engine without a model that speaks OpenAI's HTTP API, for routers that pass bytes on: streamed chat completions.

Only what a proxy needs of a backend: keep-alive, content-length bodies, chunked answers, a few pages about health and
models. It is as cheap as it can be made here, for what it costs is no router's.
"""

import asyncio
import json
from collections.abc import Sequence
from typing import cast

from bench.common.mock_steps import MockSequence, MockSteps

_MODEL = "mock"
_PAGES = {
    "/v1/models": {"object": "list", "data": [{"id": _MODEL, "object": "model", "owned_by": "mock"}]},
    "/health": {},
    "/health_generate": {},
    "/get_model_info": {"model_path": _MODEL, "is_generation": True},
    "/model_info": {"model_path": _MODEL, "is_generation": True},
    "/get_server_info": {"model_path": _MODEL, "served_model_name": _MODEL, "dp_size": 1},
    "/server_info": {"model_path": _MODEL, "served_model_name": _MODEL, "dp_size": 1},
}
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_END = b"data: [DONE]\n\n"


class MockOpenAi:
    """Answers every chat with the same words, at the pace of `steps`. Event-loop thread only."""

    def __init__(self, words: Sequence[str]) -> None:
        self.steps = MockSteps(self._emit)
        self._words = tuple(words)
        self._connections: dict[MockSequence, _Connection] = {}
        self._open: set[_Connection] = set()
        self._server: asyncio.Server | None = None
        self._ids = 0

    async def start(self) -> str:
        """Listen; returns the URL."""
        self._server = await asyncio.get_running_loop().create_server(lambda: _Connection(self), "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        """Listen no more, and end what is open."""
        if self._server is not None:
            self._server.close()
            for connection in list(self._open):
                connection.close_connection()
            await self._server.wait_closed()

    def begin(self, connection: "_Connection") -> MockSequence:
        """A chat came in."""
        self._ids += 1
        sequence = MockSequence(f"mock-{self._ids}", len(self._words))
        self._connections[sequence] = connection
        self.steps.add(sequence)
        return sequence

    def opened(self, connection: "_Connection") -> None:
        """A client has connected."""
        self._open.add(connection)

    def closed(self, connection: "_Connection") -> None:
        """And has gone."""
        self._open.discard(connection)

    def forget(self, sequence: MockSequence) -> None:
        """Its client left."""
        self.steps.remove(sequence)
        self._connections.pop(sequence, None)

    def _emit(self, batch: list[MockSequence]) -> None:
        for sequence in batch:
            connection = self._connections[sequence]
            events = [_event(sequence, {"content": self._words[sequence.sent]})]
            if not sequence.sent:
                events.insert(0, _event(sequence, {"role": "assistant", "content": ""}))
                connection.write(_STREAM_HEAD)
            is_last = sequence.sent + 1 == sequence.num_tokens
            if is_last:
                events += [_event(sequence, {}, "length"), _END]
                del self._connections[sequence]
            data = b"".join(events)
            connection.write(b"%x\r\n%b\r\n" % (len(data), data) + (b"0\r\n\r\n" if is_last else b""))
            if is_last:
                connection.sequence = None


class _Connection(asyncio.Protocol):
    """One connection; one request at a time."""

    def __init__(self, server: MockOpenAi) -> None:
        self.sequence: MockSequence | None = None
        self._server = server
        self._buffer = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by type.
        self._server.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._server.closed(self)
        if self.sequence is not None:
            self._server.forget(self.sequence)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end].lower()
            _, mark, length = head.partition(b"\r\ncontent-length:")
            size = end + 4 + (int(length.split(b"\r\n", 1)[0]) if mark else 0)
            if len(self._buffer) < size:
                return
            request_line = self._buffer[: self._buffer.index(b"\r\n")].decode()
            self._buffer = self._buffer[size:]
            self._answer(*request_line.split(" ")[:2])

    def write(self, data: bytes) -> None:
        """Send, unless the client has gone."""
        if self._transport is not None:
            self._transport.write(data)

    def close_connection(self) -> None:
        """Close it."""
        if self._transport is not None:
            self._transport.close()

    def _answer(self, method: str, target: str) -> None:
        path = target.partition("?")[0]
        if method == "POST" and path == "/v1/chat/completions":
            self.sequence = self._server.begin(self)
            return
        page = _PAGES.get(path)
        body = json.dumps({} if page is None else page).encode()
        status = "404 Not Found" if page is None else "200 OK"
        head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self.write(head.encode() + body)


def _event(sequence: MockSequence, delta: dict[str, str], finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    chunk = {
        "id": sequence.request_id,
        "object": "chat.completion.chunk",
        "created": 1,
        "model": _MODEL,
        "choices": [choice],
    }
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"

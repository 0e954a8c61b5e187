"""The socket side of the HTTP front door: uvicorn's protocol with the bounds that it lacks, and a server around it.

uvicorn's protocol keeps a request's head however long it grows, waits for one for ever, tells only the last of
several pipelined requests that the client left, and lets a reader that has stopped reading hold a stream for ever.
Here each of these has a bound.
"""

import asyncio
import contextlib
import ssl
import time
from collections.abc import Callable
from email.utils import formatdate
from functools import lru_cache
from typing import Any, cast

from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from router.http.asgi import CLIENT_PIPE
from router.http.errors import HttpError

# Framing between the pieces of a body that comes in chunks of one byte.
_OVERHEAD_PER_BODY_BYTE = 8
_LOOK_S = 0.02


@lru_cache(maxsize=1)
def _http_date(second: int) -> bytes:
    return formatdate(second, usegmt=True).encode()


class BoundedHttpProtocol(HttpToolsProtocol):
    """One client connection. The bounds are class attributes, so that a subclass can narrow them."""

    max_connections = 4096
    max_head_bytes = 64 * 1024
    head_timeout_s = 15.0
    # A client that does not take what its socket and our buffer hold in this time counts as gone.
    stalled_write_s = 60.0

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._received = 0  # Bytes of the current message,
        self._payload = 0  # and how many of them were body.
        self._in_head = False
        self._deaf = False  # Input is dropped; reading goes on only to see the connection end.
        self._retiring = False
        self._closes = False  # After the current answer, as its client wants it.
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._pipe: _SocketPipe | None = None  # Of the current request.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            self._refuse(503, "There are too many connections.", "overloaded")
        else:
            self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        if self._write_timer is not None:
            self._write_timer.cancel()
        super().connection_lost(exc)
        if self._pipe is not None:
            self._pipe.gone()

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        self._received += len(data)
        super().data_received(data)
        # Checked afterwards, when it is known what was body. The parser keeps an unfinished header or trailer line
        # of any length, so this bounds what it can hold.
        overhead = self._received - self._payload
        if overhead > self.max_head_bytes + _OVERHEAD_PER_BODY_BYTE * self._payload:
            self._refuse(431, "The request's headers are too large.", "headers_too_large")
        elif not self._answering():
            self._expect_head()

    def on_message_begin(self) -> None:
        self._in_head = True
        if not self._deaf:
            super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self._deaf:
            return
        if self._answering():
            # A pipelined request. It would hide the end of the connection from the one before it: it is dropped,
            # and the connection closes after the answer, which tells the client to send it again.
            self.cycle.keep_alive = False
            self._deaf = True
            return
        head_bytes = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if head_bytes > self.max_head_bytes:
            self._refuse(431, "The request's headers are too large.", "headers_too_large")
            return
        self._stop_head_timer()
        self.server_state.default_headers = [(b"date", _http_date(int(time.time())))]
        super().on_headers_complete()
        # Before the task that uvicorn has made begins.
        self._pipe = _SocketPipe(self.loop, self.transport, self.flow)
        cast(dict[str, Any], self.scope)[CLIENT_PIPE] = self._pipe
        # uvicorn would close behind the answer even if the body is still coming, and what then arrives makes the kernel
        # throw away an answer that the client has not read yet.
        self._closes, self.cycle.keep_alive = not self.cycle.keep_alive, True
        if self._retiring:
            self.cycle.keep_alive = False

    def on_response_complete(self) -> None:
        if self._closes and not self.transport.is_closing():
            if self.cycle.more_body:
                self._linger()
            else:
                self.transport.close()
        super().on_response_complete()

    def _linger(self) -> None:
        """The answer came before the end of the body: drop the rest, until the client closes or the keep-alive ends."""
        self._deaf = True
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def retire(self) -> None:
        """The answer under way, or else the next one, is the last on this connection, and says so if it still can."""
        self._retiring = True
        if self._answering():
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._payload += len(body)
        if not self._deaf:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._received = self._payload = 0
        if not self._deaf:
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Called by the parser's owner for bytes that are not HTTP."""
        self._refuse(400, msg, "malformed_http")

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.stalled_write_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()

    def _answering(self) -> bool:
        """A request has begun and its answer has not ended."""
        return self.cycle is not None and not self.cycle.response_complete

    def _expect_head(self) -> None:
        if self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(self.head_timeout_s, self._head_is_late)

    def _head_is_late(self) -> None:
        # Where a refused body is still coming, its request has had its answer.
        if self._in_head and not self._deaf:
            self._refuse(408, "The request's head did not arrive in time.", "request_timeout")
        else:
            self.transport.close()

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Close the connection, with an answer unless one is under way already."""
        self._deaf = True
        if self._answering():
            self.transport.abort()
            return
        body = HttpError(status, message, code=code).body()
        head = (
            f"HTTP/1.1 {status} {code}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


class _SocketPipe:
    """A ClientPipe: writes what uvicorn's `send` would write, in one call. It leads to no scope, so a scope may have it
    and nothing waits for the collector."""

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport, flow: FlowControl) -> None:
        self._loop = loop
        self._transport = transport
        self._flow = flow
        self._on_gone: Callable[[], None] | None = None
        self._is_gone = False

    @property
    def is_full(self) -> bool:
        return self._flow.write_paused

    def write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def watch(self, on_gone: Callable[[], None] | None) -> None:
        self._on_gone = on_gone
        if on_gone is not None:
            self._flow.resume_reading()  # A connection that is not read from does not end.
            if self._is_gone:
                self._loop.call_soon(self._tell)

    def gone(self) -> None:
        """The connection has ended."""
        self._is_gone = True
        self._tell()

    def _tell(self) -> None:
        on_gone, self._on_gone = self._on_gone, None
        if on_gone is not None:
            on_gone()


class HttpServer:
    """Listens and serves one ASGI application in the running event loop. Signals are its owner's business."""

    keep_alive_s = 30
    backlog = 1024

    def __init__(
        self,
        app: Any,
        *,
        host: str,
        port: int,
        tls: ssl.SSLContext | None = None,
        share_port: bool = False,
        protocol: type[BoundedHttpProtocol] = BoundedHttpProtocol,
    ) -> None:
        """With `tls` (`runtime.tls.https_context`) it speaks HTTPS and nothing else. `share_port`: other processes may
        listen there too, and each gets a share of the connections."""
        self._tls = tls
        self._share_port = share_port
        self._host = host
        self._port = port
        self._protocol = protocol
        self._state = ServerState()
        self._config = Config(
            app,
            http=protocol,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level="error",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=self.keep_alive_s,
        )

    async def start(self) -> None:
        """Begin to accept. Raises OSError when the address cannot be had."""
        self._config.load()
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: self._protocol(self._config, self._state, {}, loop),
            self._host,
            self._port,
            backlog=self.backlog,
            reuse_port=self._share_port or None,
            ssl=self._tls,
            ssl_handshake_timeout=None if self._tls is None else self._protocol.head_timeout_s,
        )
        self._port = int(self._server.sockets[0].getsockname()[1])

    @property
    def port(self) -> int:
        """The port that it listens on once started, also when it was asked for port 0."""
        return self._port

    async def retire(self, linger_s: float) -> None:
        """Stop accepting, and let each connection end with its next answer; return when all have, or after `linger_s`:
        then those that nobody asks anything on are closed. No answer is cut. For whoever leaves the port to another
        process."""
        self._server.close()
        for connection in list(self._state.connections):
            if isinstance(connection, BoundedHttpProtocol):  # All are; uvicorn's set has a wider type.
                connection.retire()
        # uvicorn tells nobody that a connection has ended, so this looks.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(linger_s):
                while self._state.connections:  # noqa: ASYNC110
                    await asyncio.sleep(_LOOK_S)
        for connection in list(self._state.connections):
            connection.shutdown()

    async def close(self, grace_s: float) -> None:
        """Stop accepting, let answers under way end for at most `grace_s`, then cut what is left."""
        self._server.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        if self._state.tasks:
            await asyncio.wait(self._state.tasks, timeout=grace_s)
        tasks = list(self._state.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for connection in list(self._state.connections):
            connection.transport.abort()
        await self._server.wait_closed()

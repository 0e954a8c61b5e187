"""Server-sent events over bare ASGI, and the watch on the client's connection.

The status line waits for the first event, so that a request which fails before it gets a real status. When nothing
happens for a while a comment goes out instead: proxies keep the connection, and a dead one is noticed.
"""

import asyncio
from collections.abc import Callable
from types import TracebackType

from router.http.asgi import RawHeaders, Receive, Send
from router.http.errors import ClientGone

DONE = b"data: [DONE]\n\n"
HEARTBEAT = b": keep-alive\n\n"
_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


def event(data: bytes) -> bytes:
    """One event; `data` holds no line break, as compact JSON never does."""
    return b"data: " + data + b"\n\n"


def named_event(name: str, data: bytes) -> bytes:
    """The same with a name of its kind."""
    return b"event: " + name.encode() + b"\n" + event(data)


class EventStream:
    """The answer to one streaming request: `async with`, `send` events, then `close`.

    `send` waits while the client reads too slowly, so nothing piles up here. One task uses it at a time.
    `heartbeat` gives what is sent after each `quiet_s` seconds of silence.
    """

    def __init__(
        self, send: Send, *, headers: RawHeaders, quiet_s: float, heartbeat: Callable[[], bytes] = lambda: HEARTBEAT
    ) -> None:
        self._send = send
        self._headers = [*_HEADERS, *headers]
        self._quiet_s = quiet_s
        self._silence = heartbeat
        self._loop = asyncio.get_running_loop()
        self._last_write = self._loop.time()
        self._writing = False
        self._heartbeat: asyncio.Task[None] | None = None
        self._timer = self._loop.call_later(quiet_s, self._on_timer)
        self.started = False

    async def __aenter__(self) -> "EventStream":
        return self

    async def __aexit__(self, *_: object) -> None:
        self._timer.cancel()
        if self._heartbeat is not None:
            self._heartbeat.cancel()
            await asyncio.gather(self._heartbeat, return_exceptions=True)

    async def send(self, data: bytes) -> None:
        """Send an event, or several joined ones, at once."""
        if self._heartbeat is not None:
            await self._heartbeat
        await self._write(data, more=True)

    async def close(self, data: bytes = DONE) -> None:
        """Send the last events, good or bad, and nothing after them."""
        self._timer.cancel()
        if self._heartbeat is not None:
            await self._heartbeat
        await self._write(data, more=False)

    async def _write(self, data: bytes, *, more: bool) -> None:
        self._writing = True
        try:
            if not self.started:
                self.started = True
                await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
            await self._send({"type": "http.response.body", "body": data, "more_body": more})
        finally:
            self._writing = False
            self._last_write = self._loop.time()

    def _on_timer(self) -> None:
        quiet_s = self._loop.time() - self._last_write
        if quiet_s < self._quiet_s:
            self._timer = self._loop.call_later(self._quiet_s - quiet_s, self._on_timer)
            return
        # A write that waits for a slow reader is no silence.
        if not self._writing:
            self._heartbeat = self._loop.create_task(self._beat())
        self._timer = self._loop.call_later(self._quiet_s, self._on_timer)

    async def _beat(self) -> None:
        try:
            await self._write(self._silence(), more=True)
        except OSError:
            pass  # The connection is gone, which the watch on it reports.
        finally:
            self._heartbeat = None


class ClientWatch:
    """`with ClientWatch(receive):` the block is cancelled when the client disconnects, and ClientGone is raised.

    The request's body must have been read. As with `asyncio.timeout`, a cancellation from outside stays one.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._gone = False

    def __enter__(self) -> "ClientWatch":
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a ClientWatch works only inside a task")
        self._owner = task
        self._cancelling = task.cancelling()
        self._watcher = asyncio.create_task(self._watch())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watcher.cancel()
        # Its cancellation's traceback leads to this watch: would that lead back, both had to wait for the collector.
        del self._watcher
        if not self._gone:
            return
        asked_from_outside = self._owner.uncancel() > self._cancelling
        if isinstance(error, asyncio.CancelledError) and not asked_from_outside:
            raise ClientGone from None

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._owner.cancel()

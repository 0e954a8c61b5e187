"""Server-sent events, and the watch on the client's connection.

The status line waits for the first event, so that a request which fails before it gets a real status. When nothing
happens for a while a comment goes out instead: proxies keep the connection, and a dead one is noticed.
"""

import asyncio
from collections.abc import Callable
from types import TracebackType

from router.http.asgi import ClientPipe, RawHeaders, Receive, Send
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
    """The answer to one streaming request: `async with`, `push` events, `flush` when it says so, then `close`.

    Nothing piles up here: what the connection does not take at once waits, and whoever pushed it waits in `flush`.
    `heartbeat` gives what is sent after each `quiet_s` seconds of silence. Event-loop thread only.
    """

    def __init__(
        self,
        send: Send,
        *,
        headers: RawHeaders,
        quiet_s: float,
        heartbeat: Callable[[], bytes] = lambda: HEARTBEAT,
        pipe: ClientPipe | None = None,
    ) -> None:
        """`pipe` takes events past `send`, which costs a step of the task for each; None: the server has none."""
        self._send = send
        self._headers = [*_HEADERS, *headers]
        self._quiet_s = quiet_s
        self._silence = heartbeat
        self._pipe = pipe
        self._pending: list[bytes] = []
        self._turn = asyncio.Lock()  # To `send`, which waits for slow readers.
        self._loop = asyncio.get_running_loop()
        self._last_write = self._loop.time()
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

    def push(self, data: bytes) -> bool:
        """Take an event, or several joined ones. False: it waits for its turn, in `flush`."""
        pipe = self._pipe
        if pipe is None or not self.started or self._pending or self._turn.locked() or pipe.is_full:
            self._pending.append(data)
            return False
        pipe.write(data)
        self._last_write = self._loop.time()
        return True

    def hold(self, data: bytes) -> None:
        """Take events that go out with the next ones: `close` follows."""
        self._pending.append(data)

    async def flush(self) -> None:
        """Return when all that was pushed is on its way. Any number of tasks may wait here."""
        async with self._turn:
            if self._pending:
                await self._write(self._taken(), more=True)

    async def close(self, data: bytes = DONE) -> None:
        """Send the last events, good or bad, and nothing after them."""
        self._pipe = None
        self._timer.cancel()
        async with self._turn:
            await self._write(self._taken() + data, more=False)

    def _taken(self) -> bytes:
        data = b"".join(self._pending)
        self._pending.clear()
        return data

    async def _write(self, data: bytes, *, more: bool) -> None:
        try:
            if not self.started:
                self.started = True
                await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
            await self._send({"type": "http.response.body", "body": data, "more_body": more})
        finally:
            self._last_write = self._loop.time()

    def _on_timer(self) -> None:
        quiet_s = self._loop.time() - self._last_write
        if quiet_s < self._quiet_s:
            self._timer = self._loop.call_later(self._quiet_s - quiet_s, self._on_timer)
            return
        # A write that waits for a slow reader is no silence.
        if not self._turn.locked():
            self._heartbeat = self._loop.create_task(self._beat())
        self._timer = self._loop.call_later(self._quiet_s, self._on_timer)

    async def _beat(self) -> None:
        try:
            async with self._turn:
                await self._write(self._silence(), more=True)
        except OSError:
            pass  # The connection is gone, which the watch on it reports.
        finally:
            self._heartbeat = None


class ClientWatch:
    """`with ClientWatch(receive):` the block is cancelled when the client disconnects, and ClientGone is raised.

    The request's body must have been read. As with `asyncio.timeout`, a cancellation from outside stays one.
    """

    def __init__(self, receive: Receive, pipe: ClientPipe | None = None) -> None:
        """With a `pipe` no task waits in `receive`."""
        self._receive = receive
        self._pipe = pipe
        self._gone = False
        self._watcher: asyncio.Task[None] | None = None

    def __enter__(self) -> "ClientWatch":
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a ClientWatch works only inside a task")
        self._owner = task
        self._cancelling = task.cancelling()
        if self._pipe is None:
            self._watcher = asyncio.create_task(self._watch())
        else:
            self._pipe.watch(self._has_left)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # What watches leads to this watch: would this lead back, both had to wait for the collector.
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None
        if self._pipe is not None:
            self._pipe.watch(None)
        if not self._gone:
            return
        asked_from_outside = self._owner.uncancel() > self._cancelling
        if isinstance(error, asyncio.CancelledError) and not asked_from_outside:
            raise ClientGone from None

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._has_left()

    def _has_left(self) -> None:
        self._gone = True
        self._owner.cancel()

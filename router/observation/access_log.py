"""One line in the log for each request that a client made, with its facts as fields: no header, no query, no text."""

import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from router.http.asgi import TENANT, Message, Receive, Scope, Send
from router.tenants import Tenant
from runtime.clock import Clock
from runtime.errors import KvferryError
from runtime.telemetry import FIELDS

App = Callable[[Scope, Receive, Send], Awaitable[None]]

_NOTE = "access_note"
_MAX_PATH_CHARS = 256
_CLIENT_GONE = 499  # Before there was a status; proxies log that too.

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class AccessNote:
    """What an endpoint knows of its request, and the socket side does not. `output_tokens` counts all choices."""

    request_id: str = ""
    trace_id: str = ""
    tenant: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0


def access_note(scope: Scope) -> AccessNote:
    """The note of a request, to be filled in; without a log nobody reads it."""
    note: AccessNote = scope.setdefault(_NOTE, AccessNote())
    return note


class AccessLog:
    """An ASGI application around another one. Event-loop task only."""

    def __init__(self, app: App, clock: Clock) -> None:
        self._app = app
        self._now = clock.now

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_at, status = self._now(), _CLIENT_GONE
        note = access_note(scope)

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            tenant: Tenant | None = scope.get(TENANT)
            note.tenant = tenant.name if tenant is not None else ""
            # As it was sent: percent-encoded, so it cannot break a line.
            path = scope.get("raw_path", b"").decode("ascii", "replace")
            _write(note, scope["method"], path, status, self._now() - started_at)


@contextmanager
def log_call(method: str, note: AccessNote, clock: Clock) -> Iterator[None]:
    """The same for one gRPC call: its status is that of the exception that leaves the block, if any."""
    started_at, status = clock.now(), "CANCELLED"
    try:
        yield
        status = "OK"
    except KvferryError as error:
        status = error.grpc_status.name
        raise
    except Exception:
        status = "INTERNAL"
        raise
    finally:
        _write(note, "gRPC", method, status, clock.now() - started_at)


def _write(note: AccessNote, method: str, path: str, status: int | str, duration_s: float) -> None:
    path, duration_ms = path[:_MAX_PATH_CHARS], round(duration_s * 1000, 3)
    fields = {
        "method": method,
        "path": path,
        "status": status,
        "duration_ms": duration_ms,
        "tenant": note.tenant,
        "prompt_tokens": note.prompt_tokens,
        "output_tokens": note.output_tokens,
    }
    extra = {FIELDS: fields, "request_id": note.request_id, "trace_id": note.trace_id}
    line = "%s %s %s duration_ms=%.1f tenant=%s prompt_tokens=%d output_tokens=%d"
    values = (note.tenant or "-", note.prompt_tokens, note.output_tokens)
    _log.info(line, method, path, status, duration_ms, *values, extra=extra)

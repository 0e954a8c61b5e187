"""The ASGI words used here, and the one way to send a whole answer."""

from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any, Protocol

from router.tenants import Tenant

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

TENANT = "tenant"
"""Where a scope has the tenant who asks, once that is known."""

CLIENT_PIPE = "kvferry.client_pipe"
"""Where a scope has the ClientPipe of its answer, if the server gives one."""

RawHeaders = Sequence[tuple[bytes, bytes]]


class ClientPipe(Protocol):
    """The connection to a client past ASGI, whose every message is a coroutine. Event-loop thread only.

    `write` may be used from the moment that the answer's head has been sent until its last message, which both go by
    ASGI; so does what finds the pipe full.
    """

    @property
    def is_full(self) -> bool:
        """Whether the client has to read first."""
        ...

    def write(self, data: bytes) -> None:
        """Send a piece of the body, not empty; what a client that has left does not get is dropped."""
        ...

    def watch(self, on_gone: Callable[[], None] | None) -> None:
        """Call `on_gone` when the client leaves, soon if it has left already; None: do not any more. The request's body
        must have been read."""
        ...


def client_pipe(scope: Scope) -> ClientPipe | None:
    """The pipe of a request; None with a server that has none."""
    pipe: ClientPipe | None = scope.get(CLIENT_PIPE)
    return pipe


def tenant_of(scope: Scope) -> Tenant:
    """The tenant who asks, on a route that has looked at the key."""
    tenant: Tenant = scope[TENANT]
    return tenant


async def send_body(
    send: Send, status: int, body: bytes, *, headers: RawHeaders = (), content_type: bytes = b"application/json"
) -> None:
    """One answer with a body of known length."""
    fixed = [(b"content-type", content_type), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*fixed, *headers]})
    await send({"type": "http.response.body", "body": body, "more_body": False})

"""The ASGI words used here, and the one way to send a whole answer."""

from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from router.tenants import Tenant

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

TENANT = "tenant"
"""Where a scope has the tenant who asks, once that is known."""

RawHeaders = Sequence[tuple[bytes, bytes]]


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

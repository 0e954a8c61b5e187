"""GET /debug/requests: which requests this router has, what each waits for and since when, and the last that ended.

Numbers and names only: no prompt, no text. A tenant sees its own requests; one that its key's file calls an admin sees
everybody's, and so does everybody where there are no keys.
"""

import time
from typing import Any

import orjson

from router.http.asgi import Receive, Scope, Send, send_body, tenant_of
from router.http.services import Services
from router.observation.live_requests import RequestView
from router.observation.request_fields import request_fields


class DebugRequests:
    """The endpoint. Event-loop thread only."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tenant, now = tenant_of(scope), self._services.clock.now()
        views = [view for view in self._services.live_requests(now) if tenant.may_see(view.tenant)]
        # Wall-clock times are made from the monotonic ones here, so a clock that was set meanwhile shifts them all.
        epoch = time.time() - now
        answer = {
            "object": "list",
            "now": round(now + epoch, 3),
            "in_flight": [_fields(view, now, epoch) for view in views if not view.phase.is_end],
            "ended": [_fields(view, now, epoch) for view in views if view.phase.is_end],
        }
        await send_body(send, 200, orjson.dumps(answer))


def _fields(view: RequestView, now: float, epoch: float) -> dict[str, Any]:
    return {
        **request_fields(view),
        "tenant": view.tenant,
        "model": view.model,
        "phase": view.phase.value,
        "arrived_at": round(view.arrived_at + epoch, 3),
        "since": round(view.since + epoch, 3),
        "in_phase_ms": round((now - view.since) * 1000, 3),
        "phases": [
            {
                "phase": begin.phase.value,
                "attempt": begin.attempt,
                "worker": begin.worker,
                "after_ms": round((begin.began_at - view.arrived_at) * 1000, 3),
            }
            for begin in view.phases
        ],
    }

"""The data behind the live page: one snapshot of the cluster, made twice a second for all who watch.

Workers and figures are the same for everybody. Of requests each tenant sees its own.
"""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import orjson

from kvferry_rpc.common_pb2 import ErrorCode
from router.observation.live_requests import LiveRequests, RequestView
from router.observation.page_fields import (
    first_token_at,
    percentile_fields,
    shown_requests,
    time_per_token_s,
    worker_fields,
)
from router.observation.recent import WINDOW_S, RecentBytes, RecentTimes
from router.tenants import Tenant
from router.workers.worker_registry import WorkerRegistry, WorkerView
from runtime.clock import Clock
from runtime.errors import KvferryError

TICK_S = 0.5
MAX_WATCHERS = 32


class LivePage:
    """All methods: event-loop thread only. `start` before anybody watches, `close` before the doors close."""

    def __init__(self, registry: WorkerRegistry, requests: LiveRequests, clock: Clock, router_id: str) -> None:
        self._registry = registry
        self._requests = requests
        self._clock = clock
        self._router_id = router_id
        self._ttft = RecentTimes()
        self._tpot = RecentTimes()
        self._moved = RecentBytes()
        # Of each life of a decode worker, the bytes that it had received when it was last looked at.
        self._received: dict[tuple[str, bytes], int] = {}
        # What the current tick has made so far: fields for everybody, and the whole for each tenant who asked.
        self._shared: tuple[dict[str, Any], tuple[RequestView, ...], float] | None = None
        self._states: dict[Tenant, bytes] = {}
        self._ticked = asyncio.Event()
        self._watchers = 0
        self._closed = False
        self._ticking: asyncio.Task[None] | None = None
        requests.subscribe(self._ended)

    def start(self) -> None:
        """Tick from now on."""
        self._ticking = asyncio.create_task(self._tick_for_ever())

    async def close(self) -> None:
        """Let everybody who watches go; nobody else may. Idempotent."""
        self._closed = True
        self._ticked.set()
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.gather(self._ticking, return_exceptions=True)

    def tick(self) -> None:
        """Look at the cluster again. What it costs depends on the workers; the rest is made when somebody asks."""
        self._count_bytes(self._registry.views())
        self._shared = None
        self._states.clear()
        self._ticked.set()
        self._ticked = asyncio.Event()

    def state(self, tenant: Tenant) -> bytes:
        """The state of the last tick as `tenant` may see it, as JSON."""
        if tenant not in self._states:
            if self._shared is None:
                self._shared = self._look()
            shared, views, now = self._shared
            seen = [view for view in views if tenant.may_see(view.tenant)]
            self._states[tenant] = orjson.dumps({**shared, "requests": shown_requests(seen, now)})
        return self._states[tenant]

    async def states(self, tenant: Tenant) -> AsyncGenerator[bytes, None]:
        """The state now and at each tick, until `close`. Who reads slowly misses some; nothing piles up.

        Raises KvferryError (OVERLOADED when too many watch, UNAVAILABLE behind `close`).
        """
        if self._closed:
            raise KvferryError(ErrorCode.UNAVAILABLE, "the router is shutting down")
        if self._watchers >= MAX_WATCHERS:
            raise KvferryError(ErrorCode.OVERLOADED, f"{MAX_WATCHERS} live pages are open, the limit")
        self._watchers += 1
        try:
            while not self._closed:
                next_tick = self._ticked
                yield self.state(tenant)
                await next_tick.wait()
        finally:
            self._watchers -= 1

    @property
    def watchers(self) -> int:
        """How many watch."""
        return self._watchers

    # ---- inside ----

    async def _tick_for_ever(self) -> None:
        while True:
            self.tick()
            await asyncio.sleep(TICK_S)

    def _look(self) -> tuple[dict[str, Any], tuple[RequestView, ...], float]:
        now = self._clock.now()
        views = self._requests.snapshot(now)
        live = [view for view in views if not view.phase.is_end]
        shared = {
            "router_id": self._router_id,
            "model": self._requests.model,
            "now": round(now, 3),
            "window_s": WINDOW_S,
            "workers": worker_fields(self._registry.views(), self._registry.departures(), now),
            "in_flight": len(live),
            "queued": sum(len(view.phases) == 1 for view in live),
            "bytes_per_second": self._moved.per_second(now),
            "ttft": percentile_fields(self._ttft.percentiles(now, _first_tokens(live))),
            "tpot": percentile_fields(self._tpot.percentiles(now, _times_per_token(live, now))),
        }
        return shared, views, now

    def _count_bytes(self, views: list[WorkerView]) -> None:
        """What decode workers have received since the last tick: every hand-off ends at one of them."""
        received = {
            (view.worker_id, view.register.incarnation): view.load.bytes_moved
            for view in views
            if view.role == "decode"
        }
        new = sum(max(0, size - self._received.get(life, size)) for life, size in received.items())
        self._received = received
        self._moved.add(self._clock.now(), new)

    def _ended(self, view: RequestView) -> None:
        now = self._clock.now()
        if (began_at := first_token_at(view)) is not None:
            self._ttft.add(began_at, began_at - view.arrived_at)
        if (tpot_s := time_per_token_s(view, now)) is not None:
            self._tpot.add(now, tpot_s)


def _first_tokens(views: list[RequestView]) -> list[tuple[float, float]]:
    """When each first token came, and how long after its request."""
    return [(at, at - view.arrived_at) for view in views if (at := first_token_at(view)) is not None]


def _times_per_token(views: list[RequestView], now: float) -> list[tuple[float, float]]:
    return [(now, tpot_s) for view in views if (tpot_s := time_per_token_s(view, now)) is not None]

"""What a router keeps of one attached worker, and of one request there."""

from collections.abc import Callable

from kv_cache.layout import KVCacheLayout
from kvferry_rpc.internal_pb2 import LoadReport, Register, RouterMessage
from router.workers.breaker import Breaker
from router.workers.prefix_index import PrefixIndex

Order = Callable[[RouterMessage], None]
"""Sends a worker a message on its stream, behind those before it. Raises KvferryError when it does not read them."""


class AttachedWorker:
    """The registry's own record of one incarnation. `membership_service.py` feeds it; others see views."""

    __slots__ = (
        "breaker",
        "draining",
        "full",
        "in_flight",
        "index",
        "layout",
        "load",
        "on_replaced",
        "order",
        "pending_tokens",
        "register",
        "reported_at",
        "suspect",
    )

    def __init__(
        self, register: Register, layout: KVCacheLayout, now: float, on_replaced: Callable[[], None], order: Order
    ) -> None:
        self.register = register
        self.layout = layout
        self.on_replaced = on_replaced
        self.order = order
        self.load = LoadReport(blocks_free=register.num_blocks)
        self.index = PrefixIndex(register.num_blocks)
        self.reported_at = now
        self.draining = False
        self.suspect = False
        self.breaker = Breaker()
        self.full = False
        self.in_flight = 0
        self.pending_tokens = 0


class WorkerLease:
    """One request's share of a worker. Made by `WorkerRegistry.lease`; event-loop thread only."""

    __slots__ = ("_pending_tokens", "_worker", "is_probe", "was_refused")

    def __init__(self, worker: AttachedWorker, pending_tokens: int) -> None:
        self.was_refused = False
        self._worker = worker
        self._pending_tokens = pending_tokens
        worker.in_flight += 1
        worker.pending_tokens += pending_tokens
        self.is_probe = worker.breaker.entered()

    def computed(self) -> None:
        """The prompt is computed: its tokens no longer wait there. Idempotent."""
        self._worker.pending_tokens -= self._pending_tokens
        self._pending_tokens = 0

    def refused(self) -> None:
        """The worker had no room for this request, so the end of the lease is no sign of room."""
        self.was_refused = True

"""Who is attached, what each worker last said, and what this router has running there.

A worker is known for exactly as long as its Attach stream lives (`membership_service.py`). Everything here belongs to
the event-loop thread; frozen views go out. What a request occupies on a worker is a `WorkerLease`, released by its
owner in one place, so a counter can neither leak nor be reset by anything else.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kv_cache.block_hash import BlockHasher
from kv_cache.layout import KVCacheLayout
from kvferry_rpc.common_pb2 import ErrorCode
from kvferry_rpc.internal_pb2 import KVEvents, LoadReport, Register, Role
from router.policy import ClusterLoad, Health, RequestShape, WorkerLoad, cached_prefix_tokens
from router.workers.attached_worker import AttachedWorker, Order, WorkerLease
from router.workers.breaker import BreakerState
from router.workers.prefix_index import Applied
from router.workers.registration import check_registration, refusal_between
from runtime.clock import Clock
from runtime.errors import KvferryError, invalid

MAX_WORKERS = 1024
# Workers report about four times a second, so this is some twenty reports missed in a row.
SILENT_AFTER_S = 5.0
STALLED_AFTER_MS = 10_000
_DEPARTURES_KEPT = 64

_PREFILL, _DECODE = Role.PREFILL, Role.DECODE  # Looking them up takes longer than comparing them.
_ROLE_NAMES = {Role.PREFILL: "prefill", Role.DECODE: "decode"}

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the attached workers can take: the vocabulary they share and the shortest of their contexts, in tokens."""

    vocab_size: int
    max_context_tokens: int


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One attached worker at one moment. The protobuf messages are not to be changed."""

    register: Register
    load: LoadReport
    health: Health
    report_age_s: float
    requests_in_flight: int
    index_blocks: int
    breaker: BreakerState

    @property
    def worker_id(self) -> str:
        return self.register.worker_id

    @property
    def role(self) -> str:
        """`prefill` or `decode`."""
        return _ROLE_NAMES[self.register.role]


class Departure(NamedTuple):
    """A worker that was detached at `at`, as it was the moment before."""

    view: WorkerView
    at: float


class PoolReport(NamedTuple):
    """A decode worker's pool as it registered and last reported it. The protobuf messages are not to be changed."""

    worker_id: str
    register: Register
    load: LoadReport
    reported_at: float
    full: bool


class RegistryListener(Protocol):
    """Told about changes, from within the event-loop call that makes them."""

    def worker_attached(self, register: Register) -> None: ...

    def worker_detached(self, register: Register) -> None: ...

    def room_changed(self) -> None:
        """Some worker may have room that it had not: a request left it, it reported, or it came."""
        ...


class WorkerRegistry:
    """The attached workers of one model. Event-loop thread only."""

    def __init__(self, clock: Clock, *, silent_after_s: float = SILENT_AFTER_S) -> None:
        self._clock = clock
        self._silent_after_s = silent_after_s
        self._workers: dict[str, AttachedWorker] = {}
        self._departures: deque[Departure] = deque(maxlen=_DEPARTURES_KEPT)
        self._listeners: list[RegistryListener] = []
        self._hashers: dict[KVCacheLayout, BlockHasher] = {}

    # ---- the membership side ----

    def subscribe(self, listener: RegistryListener) -> None:
        """Tell `listener` of changes from now on."""
        self._listeners.append(listener)

    def attach(
        self, register: Register, on_replaced: Callable[[], None], order: Order = lambda message: None
    ) -> AttachedWorker:
        """Admit a worker; an earlier one with the same id is detached first.

        `on_replaced` is called when, one day, a later one takes this worker's place. `order` is how it is told things.
        Raises KvferryError (INVALID_REQUEST, naming both values when it does not match the others; OVERLOADED).
        """
        layout = check_registration(register)
        self._check_agrees(register, layout)
        earlier = self._workers.get(register.worker_id)
        if earlier is None and len(self._workers) >= MAX_WORKERS:
            raise KvferryError(ErrorCode.OVERLOADED, f"this router has {MAX_WORKERS} workers, its limit")
        if earlier is not None:
            _log.warning("worker %s attached again: its earlier stream is dropped", register.worker_id)
            self.detach(earlier)
            earlier.on_replaced()
        worker = AttachedWorker(register, layout, self._clock.now(), on_replaced, order)
        self._workers[register.worker_id] = worker
        self._hashers.setdefault(layout, BlockHasher.for_layout(layout))
        _log.info("%s worker %s attached at %s", _ROLE_NAMES[register.role], register.worker_id, register.address)
        for listener in self._listeners:
            listener.worker_attached(register)
        self._room_changed()
        return worker

    def detach(self, worker: AttachedWorker) -> None:
        """Forget a worker and its index at once. Idempotent; a replaced worker's late end changes nothing."""
        if not self.is_current(worker):
            return
        self._departures.append(Departure(self._view(worker), self._clock.now()))
        del self._workers[worker.register.worker_id]
        if not any(other.layout == worker.layout for other in self._workers.values()):
            self._hashers.pop(worker.layout, None)
        _log.info("worker %s detached", worker.register.worker_id)
        for listener in self._listeners:
            listener.worker_detached(worker.register)

    def is_current(self, worker: AttachedWorker) -> bool:
        """Whether this life of the worker is the one attached now."""
        return self._workers.get(worker.register.worker_id) is worker

    def report(self, worker: AttachedWorker, load: LoadReport) -> None:
        """Take a load report: also the sign of life that ends suspicion."""
        worker.load = load
        worker.reported_at = self._clock.now()
        worker.suspect = False
        worker.full = False
        self._room_changed()

    def apply_events(self, worker: AttachedWorker, events: KVEvents) -> bool:
        """Take cache events. True when events were lost and the worker must send a snapshot."""
        return worker.index.apply(events.first_sequence, events.snapshot, events.events) is Applied.NEEDS_RESYNC

    def drain(self, worker: AttachedWorker, draining: bool = True) -> None:
        """The worker takes no new work, or does so again."""
        worker.draining = draining
        if not draining:
            self._room_changed()

    def attached(self) -> list[tuple[AttachedWorker, Health]]:
        """The records of all attached workers, and how each is."""
        return [(worker, self._health(worker)) for worker in self._workers.values()]

    # ---- the request side ----

    @contextmanager
    def lease(self, worker_id: str, pending_tokens: int) -> Iterator[WorkerLease]:
        """Count one request and its uncomputed tokens on a worker until the block ends, however it ends.

        A refused lease marks the worker full: not chosen until its next report, or until a request leaves it.

        Raises KvferryError (UNAVAILABLE) when the worker is not attached.
        """
        worker = self._workers.get(worker_id)
        if worker is None:
            raise KvferryError(ErrorCode.UNAVAILABLE, f"worker {worker_id} is gone")
        lease = WorkerLease(worker, pending_tokens)
        try:
            yield lease
        finally:
            lease.computed()
            worker.breaker.left(lease.is_probe)
            worker.in_flight -= 1
            worker.full = lease.was_refused
            if not lease.was_refused:
                self._room_changed()

    def suspect(self, worker_id: str) -> None:
        """A connection to the worker broke: chosen last until its next report shows that it lives."""
        if worker_id in self._workers:
            self._workers[worker_id].suspect = True

    def failed(self, worker_id: str, jitter: float) -> None:
        """The worker is to blame for the failure of a request. `jitter`: a random number, 0 to 1."""
        if worker_id in self._workers:
            self._workers[worker_id].breaker.failed(self._clock.now(), jitter)

    def succeeded(self, worker_id: str) -> None:
        """The worker did its part of a request."""
        if worker_id in self._workers:
            self._workers[worker_id].breaker.succeeded()

    # ---- reading ----

    def is_draining(self, worker_id: str) -> bool:
        """Whether an attached worker wants to leave."""
        return worker_id in self._workers and self._workers[worker_id].draining

    def cluster_load(self) -> ClusterLoad:
        """What the policy decides on. Valid until the next await: the block sets are live."""
        workers = self._workers.values()
        return ClusterLoad(
            prefill=tuple(self._policy_view(w) for w in workers if w.register.role == _PREFILL),
            decode=tuple(self._policy_view(w) for w in workers if w.register.role == _DECODE),
        )

    def views(self) -> list[WorkerView]:
        """All attached workers, in the order of their ids."""
        return [self._view(self._workers[worker_id]) for worker_id in sorted(self._workers)]

    def departures(self) -> tuple[Departure, ...]:
        """The last workers that were detached, the oldest first; one of them may be back."""
        return tuple(self._departures)

    def decode_pools(self) -> Iterator[PoolReport]:
        """Of the decode workers that new work goes to: the ready ones; if there are none, all that do not drain."""
        any_ready = False
        for worker in self._workers.values():
            if worker.register.role == _DECODE and self._health(worker) is Health.READY:
                any_ready = True
                yield _pool_report(worker)
        for worker in () if any_ready else self._workers.values():
            if worker.register.role == _DECODE and not worker.draining:
                yield _pool_report(worker)

    def reported_at(self, worker_id: str) -> float | None:
        """When the worker reported last, or attached; None when it is gone."""
        worker = self._workers.get(worker_id)
        return worker.reported_at if worker else None

    def cached_prefix_tokens(self, worker_id: str, request: RequestShape) -> int:
        """Tokens of the prompt that the worker probably has cached; 0 when it is gone."""
        worker = self._workers.get(worker_id)
        return cached_prefix_tokens(self._policy_view(worker), request) if worker else 0

    def registration(self, worker_id: str) -> Register | None:
        """How an attached worker registered; None when it is gone."""
        worker = self._workers.get(worker_id)
        return worker.register if worker else None

    @property
    def limits(self) -> ModelLimits | None:
        """None while no worker is attached."""
        if not self._workers:
            return None
        registers = [worker.register for worker in self._workers.values()]
        return ModelLimits(registers[0].vocab_size, min(register.max_context_tokens for register in registers))

    @property
    def hashers(self) -> Mapping[KVCacheLayout, BlockHasher]:
        """How the blocks of a prompt are named, for each layout that an attached worker has. Not to be changed."""
        return self._hashers

    @property
    def ready(self) -> bool:
        """Whether a decode worker is attached and would be used: what readiness probes ask."""
        return any(
            worker.register.role == Role.DECODE and self._health(worker) in (Health.READY, Health.FAILING)
            for worker in self._workers.values()
        )

    # ---- inside ----

    def _check_agrees(self, register: Register, layout: KVCacheLayout) -> None:
        for worker in self._workers.values():
            other = worker.register
            if other.worker_id == register.worker_id:
                continue
            if reason := refusal_between(register, layout, other, worker.layout):
                raise invalid("layout", f"of {register.worker_id} does not go with {other.worker_id}: {reason}")
            if register.vocab_size != other.vocab_size:
                sizes = f"is {register.vocab_size} on {register.worker_id} and {other.vocab_size} on {other.worker_id}"
                raise invalid("vocab_size", sizes)

    def _room_changed(self) -> None:
        for listener in self._listeners:
            listener.room_changed()

    def _health(self, worker: AttachedWorker) -> Health:
        if worker.draining:
            return Health.DRAINING
        silent = self._clock.now() - worker.reported_at > self._silent_after_s
        if silent or worker.suspect or worker.load.engine_stalled_ms > STALLED_AFTER_MS:
            return Health.STALLED
        return Health.READY if worker.breaker.lets_through(self._clock.now()) else Health.FAILING

    def _policy_view(self, worker: AttachedWorker) -> WorkerLoad:
        load = worker.load
        sequences = load.sequences_running + load.sequences_waiting + load.sequences_receiving
        return WorkerLoad(
            worker_id=worker.register.worker_id,
            health=self._health(worker),
            cached_blocks=worker.index.blocks,
            # Reports are up to a quarter of a second old, our own count is exact but blind to other routers.
            requests=max(worker.in_flight, sequences),
            pending_tokens=max(worker.pending_tokens, load.tokens_waiting),
            blocks_available=load.blocks_free + load.blocks_cached,
            layout=worker.layout,
            full=worker.full,
        )

    def _view(self, worker: AttachedWorker) -> WorkerView:
        return WorkerView(
            register=worker.register,
            load=worker.load,
            health=self._health(worker),
            report_age_s=self._clock.now() - worker.reported_at,
            requests_in_flight=worker.in_flight,
            index_blocks=len(worker.index.blocks),
            breaker=worker.breaker.state(self._clock.now()),
        )


def _pool_report(worker: AttachedWorker) -> PoolReport:
    return PoolReport(worker.register.worker_id, worker.register, worker.load, worker.reported_at, worker.full)

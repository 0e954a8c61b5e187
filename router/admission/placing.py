"""Turns and workers for requests: the queue (`admission.py`) and the forecast of KV (`forecast.py`), put together.

A request is let out of the queue when some decode worker will probably hold it to its end, so that no prompt is
computed for a sequence that is then refused or preempted. It counts on that worker from that moment, and on the one
that the policy chose from the moment of the plan, so a burst in one tick is spread as it will be.
"""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace

from kvferry_rpc.common_pb2 import ErrorCode
from router.admission.admission import Admission, AdmissionLimits, Entry, Seat
from router.admission.forecast import PoolState, fits
from router.admission.kv_ledger import Expectation, KVLedger
from router.admission.shedding import OutputLengths, ShedReason
from router.admission.slo import SloClass
from router.generation import GenerationRequest
from router.policy import NoPlan, Plan, RequestShape, choose, choose_successor
from router.workers.worker_registry import WorkerRegistry
from runtime.clock import Clock
from runtime.errors import KvferryError


@dataclass(frozen=True, slots=True)
class PlacingLimits:
    """`forecast_tokens`: how many tokens ahead the KV of decode workers is looked after; 0 = not at all, what they
    refuse is tried again. `slo_classes`: by their names."""

    admission: AdmissionLimits
    forecast_tokens: int
    slo_classes: tuple[SloClass, ...] = ()


class Placing:
    """Event-loop thread only."""

    def __init__(
        self,
        registry: WorkerRegistry,
        limits: PlacingLimits,
        clock: Clock,
        on_shed: Callable[[ShedReason, str], None],
    ) -> None:
        """`on_shed` is told of each request that is refused for want of capacity: why, and the name of its class."""
        self._registry = registry
        self._forecast_tokens = limits.forecast_tokens
        self._slo_classes = {slo.name: slo for slo in limits.slo_classes}
        self._ledger = KVLedger(registry.reported_at)
        self._lengths = OutputLengths()
        self._turn = 0
        self.admission = Admission(limits.admission, self, clock, on_shed)

    def slo_class(self, name: str) -> SloClass | None:
        """None for requests that name no class."""
        return self._slo_classes.get(name)

    # ---- the life of a request ----

    def seat(
        self, request: GenerationRequest, arrived_at: float, cached_tokens: Callable[[str], int]
    ) -> AbstractAsyncContextManager[Seat]:
        """A place for the request. `cached_tokens` tells how many tokens of it a worker has cached; it is asked only
        when room is tight. Raises KvferryError as `Admission.seat` does, and CONTEXT_LENGTH_EXCEEDED for what no
        worker could ever hold."""
        slo = self.slo_class(request.slo)
        most = request.sampling.max_tokens
        expectation = Expectation(
            prompt_tokens=len(request.prompt_token_ids),
            expected=self._lengths.expect(request.tenant, most),
            most=most,
            cached_tokens=cached_tokens,
        )
        self._check_size(expectation)
        entry = Entry(
            tenant=request.tenant,
            priority=request.priority + (slo.priority if slo is not None else 0),
            deadline=request.deadline,
            arrived_at=arrived_at,
            expectation=expectation,
            slo=slo,
            request_id=request.request_id,
        )
        return self.admission.seat(entry)

    def plan(self, seat: Seat, shape: RequestShape) -> Plan | NoPlan:
        """Choose workers now. With a Plan the request counts on its decode worker from here on."""
        if not self._registry.hashers:
            return NoPlan("decode", False, "no worker is attached")
        expectation = seat.entry.expectation
        self._ledger.leave(expectation, was_taken=seat.was_taken)
        if self._forecast_tokens:
            shape = replace(shape, crowded=self._crowded(expectation))
        self._turn += 1
        plan = choose(self._registry.cluster_load(), shape, self._turn)
        if isinstance(plan, Plan):
            self._count_there(expectation, plan)
        return plan

    def plan_successor(self, seat: Seat, leaving: str, shape: RequestShape) -> Plan | None:
        """Another decode worker for a request that is to leave that one with its KV, and counts on the new one then.
        None: there is none now."""
        self._turn += 1
        plan = choose_successor(self._registry.cluster_load(), leaving, shape, self._turn)
        if plan is not None:
            self._count_there(seat.entry.expectation, plan)
        return plan

    def generated(self, seat: Seat, count: int) -> None:
        """The request has `count` more tokens."""
        self._ledger.generated(seat.entry.expectation, count)

    def finished(self, request: GenerationRequest, num_tokens: int) -> None:
        """The request has its whole answer, of so many tokens: the next ones are expected to be like it."""
        self._lengths.note(request.tenant, num_tokens)

    def worker_left(self, worker_id: str) -> None:
        """The worker is gone."""
        self._ledger.worker_left(worker_id)

    def nobody_left(self, *, allow_local: bool) -> NoPlan | None:
        """Why no request could be placed, however long it waits; None when waiting makes sense."""
        shape = RequestShape(1, dict.fromkeys(self._registry.hashers, ()), allow_local=allow_local)
        plan = choose(self._registry.cluster_load(), shape, 0)
        return plan if isinstance(plan, NoPlan) and not plan.may_wait else None

    # ---- Rooms, for the admission ----

    def reserve(self, expectation: Expectation) -> bool:
        """See `admission.Rooms`. Without a worker there is nothing to wait for: the plan will say so."""
        if not self._forecast_tokens:
            return True
        is_empty = True
        for report in self._registry.decode_pools():
            is_empty = False
            pool = self._ledger.pool(report)
            if not report.full and self._fits(pool, expectation):
                self._ledger.place(expectation, report.worker_id, pool.block_size, 0)
                return True
        return is_empty

    def release(self, expectation: Expectation, *, was_taken: bool) -> None:
        """See `admission.Rooms`."""
        self._ledger.leave(expectation, was_taken=was_taken)

    # ---- inside ----

    def _count_there(self, expectation: Expectation, plan: Plan) -> None:
        register = self._registry.registration(plan.decode_worker)
        if register is not None and self._forecast_tokens:
            self._ledger.place(expectation, plan.decode_worker, register.layout.block_size, 0)

    def _crowded(self, expectation: Expectation) -> frozenset[str]:
        reports = tuple(self._registry.decode_pools())
        if len(reports) == 1:
            return frozenset()
        pools = map(self._ledger.pool, reports)
        return frozenset(pool.worker_id for pool in pools if not self._fits(pool, expectation))

    def _fits(self, pool: PoolState, expectation: Expectation) -> bool:
        demand = expectation.demand
        if fits(pool, demand, 0, self._forecast_tokens):
            return True
        shared_blocks = expectation.cached_tokens(pool.worker_id) // pool.block_size
        return shared_blocks > 0 and fits(pool, demand, shared_blocks, self._forecast_tokens)

    def _check_size(self, expectation: Expectation) -> None:
        most = expectation.prompt_tokens + expectation.most
        largest = 0
        for report in self._registry.decode_pools():
            largest = max(largest, report.register.num_blocks * report.register.layout.block_size)
            if most <= largest:
                return
        if largest:
            message = f"Prompt and answer may have {most} tokens, more than any KV pool holds ({largest})."
            raise KvferryError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, message, field="max_tokens")

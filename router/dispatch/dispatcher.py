"""Drives one request over the cluster, from admission to its receipt.

Life of a request:
1. Take a place (bounded), or wait for one in a bounded, fair queue (`placing.py`).
2. Plan: the policy picks workers from what is known this moment; places on both are taken in the same instant.
3. Attempt (`attempt.py`): admit on decode, prefill into its ticket, give out tokens in order.
4. Receipt: both workers' halves and the router's times, checked against each other (`proof.py`), kept for a while. A
   request that got a place and failed leaves one too.

Failure exits:
* no place, and a queue that is full or too long for the deadline: OVERLOADED at once. No decode worker: UNAVAILABLE
  at once.
* a worker has no room: wait in line for a sign of room, then 2 again; OVERLOADED when that takes too long.
* a decode worker drains: the answer moves to another one with its KV, if one has room (`course.py`).
* a worker is lost or the hand-off fails: 2 again, avoiding whom to blame, with the tokens given out so far appended
  to the prompt. The text goes on unchanged: noise depends on positions, not on workers. Bounded by attempts per
  request and by a budget over all requests; then the failure is the caller's.
* any other failure of a worker (bad request, defect): the caller's at once.
* strict hand-off refuses what it cannot prove: the caller's at once.
* the deadline: DEADLINE_EXCEEDED, from whatever state, and both workers are told.
* the caller goes away (task cancelled, or its sink failed): both workers are told; the queues are left at once.
"""

import asyncio
import functools
import logging
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from kv_cache.layout import KVCacheLayout
from kvferry_rpc.common_pb2 import ErrorCode, FinishReason, PromptTokenLogprob, TokenOutput
from kvferry_rpc.internal_pb2 import Register
from router.admission.admission import Seat
from router.admission.placing import Placing
from router.dispatch import receipts
from router.dispatch.attempt import Attempt, AttemptFailed, Halt
from router.dispatch.blame import Blame
from router.dispatch.course import Course, Moves
from router.dispatch.dispatch_limits import DispatchLimits
from router.dispatch.placement import Placement
from router.dispatch.prefill_call import PrefillCall
from router.dispatch.proof import Clause, HandoffRules, StrictRefusal, check_whole
from router.dispatch.reader import Reader, ReaderLeft
from router.dispatch.receipts import AttemptRecord, ReceiptStore
from router.dispatch.request_run import RequestRun
from router.dispatch.retry import MAX_ATTEMPTS, MAX_FAILURES, RetryBudget, backoff_s, is_retriable
from router.dispatch.work import remaining_s, wants_prompt_logprobs, without_prompt_logprobs
from router.dispatch.worker_links import WorkerLinks
from router.generation import GenerationRequest, Sink, TokenBatch, TokenEnd
from router.observation.live_requests import LiveRequests
from router.observation.metrics import RouterMetrics
from router.policy import NoPlan, RequestShape
from router.workers.worker_registry import WorkerRegistry
from runtime.clock import Clock
from runtime.errors import KvferryError

_log = logging.getLogger(__name__)


class Dispatcher:
    """The TokenSource of a router. Event-loop thread only."""

    def __init__(
        self,
        registry: WorkerRegistry,
        links: WorkerLinks,
        store: ReceiptStore,
        metrics: RouterMetrics,
        limits: DispatchLimits,
        clock: Clock,
        rng: random.Random,
        eos_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        """`eos_token_ids` are the model's end-of-text tokens: an answer that has one is complete whatever becomes of
        its decode worker. `rng` jitters waits; it decides nothing else."""
        self._registry = registry
        self._links = links
        self._store = store
        self._metrics = metrics
        self._limits = limits
        self._rules = HandoffRules(limits.strict_handoff, limits.require_transports)
        self._clock = clock
        self._rng = rng
        self._eos_token_ids = eos_token_ids
        self._placing = Placing(registry, limits.placing, clock, metrics.shed)
        self._admission = self._placing.admission
        self._blame = Blame(registry, links, rng)
        self._budget = RetryBudget(limits.max_in_flight, clock)
        self._moves = Moves(clock, registry.is_draining, lambda outcome: metrics.migrations.labels(outcome).inc())
        self.live = LiveRequests(clock, self._admission.ahead)
        registry.subscribe(self)
        metrics.watch(registry, self._admission)

    @property
    def in_flight(self) -> int:
        """Requests accepted and not finished, queued ones included."""
        return self._admission.in_flight + self._admission.queued

    @property
    def queued(self) -> int:
        """Of those in flight, the ones that wait for a place or for room on a worker."""
        return self._admission.queued + self._admission.resuming

    async def wait_idle(self) -> None:
        """Return when no request is in flight. The caller sets the deadline."""
        await self._admission.wait_idle()

    async def run(self, request: GenerationRequest, sink: Sink[TokenBatch]) -> TokenEnd:
        """See `TokenSource.run`."""
        try:
            return await self._run(request, sink)
        except ReaderLeft as left:
            error = left.error
        try:
            raise error
        finally:
            # Its traceback has this frame: together they would hold the prompt until the collector comes.
            del error

    async def _run(self, request: GenerationRequest, sink: Sink[TokenBatch]) -> TokenEnd:
        end: TokenEnd | None = None
        output: list[int] = []
        with (
            self._metrics.request(self._placing.slo_class(request.slo), request.tenant) as meter,
            self.live.request(request, arrived_at := self._clock.now(), output) as live,
        ):
            run = RequestRun(request, arrived_at, Reader(sink), meter, live, output)
            self._budget.deposit()
            async with self._place(run) as seat:
                while end is None:
                    run.course = course = await self._next_course(run, seat)
                    live.begun(course)
                    try:
                        async with course:
                            reason = await self._give_out(run, seat, course)
                            end = self._end(run, await course.finish(), reason)
                    except AttemptFailed as failure:
                        end = await self._after_failure(run, course, failure)
        return end

    # ---- RegistryListener ----

    def worker_attached(self, register: Register) -> None:
        """Nothing yet: `room_changed` follows."""

    def worker_detached(self, register: Register) -> None:
        self._placing.worker_left(register.worker_id)
        if self._placing.nobody_left(allow_local=not self._limits.strict_handoff) is None:
            self._admission.room_changed()
        else:
            self._admission.fail_waiting(lambda: self._unavailable("the last worker that could serve it is gone"))

    def room_changed(self) -> None:
        self._admission.room_changed()

    # ---- planning ----

    async def _next_course(self, run: RequestRun, seat: Seat) -> Course:
        """Place the request, waiting for room while every suitable worker is full. Raises KvferryError."""
        while isinstance(plan := self._placing.plan(seat, self._shape(run)), NoPlan):
            if not plan.may_wait:
                raise self._cannot_place(run, plan)
            await self._admission.wait_for_room(seat, begun=bool(run.output))
        work = run.next_work()
        placement = Placement(self._registry, plan, len(run.request.prompt_token_ids) + len(run.output))
        link = self._links.prefill_link(plan.prefill_worker) if plan.prefill_worker else None
        session = self._links.decode_session(plan.decode_worker)
        source = self._links.decode_session(plan.source.worker_id) if plan.source else None
        send = PrefillCall(work, placement, link, source, self._clock).run if plan.prefill_worker else None
        on_taken = functools.partial(self._admission.taken, seat)
        attempt = Attempt(work, placement, session, send, self._clock, on_taken, self._rules)
        return Course(attempt, self._moves, lambda leaving: self._successor(run, seat, leaving))

    def _successor(self, run: RequestRun, seat: Seat, leaving: Attempt) -> Attempt | None:
        """Where the answer goes on, which stands still with all that `run` has of it. None = nowhere, now."""
        plan = self._placing.plan_successor(seat, leaving.plan.decode_worker, self._shape(run))
        if plan is None:
            return None
        work = run.next_work(moves=True)
        placement = Placement(self._registry, plan, 0, moves=True)
        session = self._links.decode_session(plan.decode_worker)
        on_taken = functools.partial(self._admission.taken, seat)
        return Attempt(work, placement, session, leaving.hand_over, self._clock, on_taken, self._rules)

    def _shape(self, run: RequestRun) -> RequestShape:
        tokens = (*run.request.prompt_token_ids, *run.output)
        names: dict[KVCacheLayout, list[bytes]] = {}
        for layout, hasher in self._registry.hashers.items():
            names[layout] = []
            # Who scores a prompt computes all of it: what is cached spares nothing, and nothing is pulled.
            if not wants_prompt_logprobs(run.request):
                names[layout] = run.block_hashes.setdefault(layout, [])
                hasher.extend(names[layout], tokens, run.request.cache_salt)
        return RequestShape(
            num_tokens=len(tokens),
            block_hashes=names,
            avoid=frozenset(run.avoid),
            allow_local=not self._limits.strict_handoff,
            allow_pull=self._limits.reuse_decode_kv,
        )

    def _cannot_place(self, run: RequestRun, plan: NoPlan) -> KvferryError:
        message = "; ".join([plan.reason, *run.failure_lines[-1:]])
        if plan.role == "prefill":
            return StrictRefusal(Clause.LOCAL_PREFILL, message, retry_after_ms=self._admission.retry_after_ms())
        return self._unavailable(message)

    def _unavailable(self, message: str) -> KvferryError:
        return KvferryError(ErrorCode.UNAVAILABLE, message, retry_after_ms=self._admission.retry_after_ms())

    # ---- tokens ----

    async def _give_out(self, run: RequestRun, seat: Seat, course: Course) -> "FinishReason.ValueType | None":
        """Push tokens to the reader while they come. STOP if it wants no more of them; None: decode is done. Raises as
        `Course.flow`, and ReaderLeft."""

        def give(batch: tuple[TokenOutput, ...]) -> bool:
            run.output.extend([token.token_id for token in batch])
            run.meter.tokens(len(batch))
            self._placing.generated(seat, len(batch))
            return run.reader.push(TokenBatch(batch, _prompt_logprobs(run, course)))

        while await course.flow(give) is Halt.FULL:
            if not await run.reader.wants_more():
                return FinishReason.STOP
        return None

    # ---- ends ----

    async def _after_failure(self, run: RequestRun, course: Course, failure: AttemptFailed) -> TokenEnd | None:
        """Get ready for another attempt, or raise the failure. A TokenEnd when the answer was complete already."""
        error = failure.error
        run.failure_lines.append(f"attempt {run.attempts}: {error.code_name}: {error.message}")
        if error.code == ErrorCode.OVERLOADED:
            run.live.attempt_failed()
            # The worker is marked full: the next plan takes another, or waits, or finds that all are gone.
            return None
        run.computed_before = run.computed_before or course.was_taken
        record = course.record()
        if record.plan.prefill_worker is not None:
            self._metrics.handoff_failed()
        self._blame.count(course.plan, failure)
        if not is_retriable(error):
            raise error
        limits = self._registry.limits
        longest = limits.max_context_tokens if limits else None
        if (reason := run.reason_to_end(self._eos_token_ids, longest)) is not None:
            return self._end(run, record, reason)
        run.failures = 1 if course.brought_tokens else run.failures + 1
        run.failures_in_all += 1
        if run.failures >= MAX_ATTEMPTS or run.failures_in_all >= MAX_FAILURES or not self._budget.withdraw():
            raise error
        self._metrics.retries.inc()
        run.live.attempt_failed()
        extra = {"request_id": run.request.request_id}
        _log.warning("trying again after %d tokens: %s", len(run.output), run.failure_lines[-1], extra=extra)
        await asyncio.sleep(min(backoff_s(run.failures, self._rng), remaining_s(run.request, self._clock.now())))
        run.avoid |= self._blame.workers_to_avoid(course.plan, failure)
        return None

    def _end(self, run: RequestRun, record: AttemptRecord, reason: "FinishReason.ValueType | None" = None) -> TokenEnd:
        """Check and keep the receipt. `reason` stands in for a decode half that did not come."""
        record = replace(record, computed_before=run.computed_before)
        request_id, prompt_tokens = run.request.request_id, len(run.request.prompt_token_ids)
        check_whole(self._rules, record)
        for worker_id in receipts.workers(record):
            self._registry.succeeded(worker_id)
        receipt = receipts.merge(request_id, prompt_tokens, record, run.failure_lines)
        cached_tokens = receipts.cached_tokens(record, prompt_tokens)
        self._store.put(receipt, run.request.tenant)
        run.live.left_receipt(receipt, cached_tokens)
        self._metrics.handoff_committed(receipt, self._rules)
        run.meter.finished(receipt, cached_tokens)
        self._placing.finished(run.request, len(run.output))
        return TokenEnd(
            reason=reason or (record.decode_done.reason if record.decode_done else FinishReason.STOP),
            prompt_tokens=prompt_tokens,
            completion_tokens=len(run.output),
            cached_tokens=cached_tokens,
            receipt=receipt,
        )

    @asynccontextmanager
    async def _place(self, run: RequestRun) -> AsyncIterator[Seat]:
        """A place among the requests that run. If what is done in it fails, or the caller leaves, a receipt says what
        is known. Raises KvferryError when there is no place."""
        remaining_s(run.request, self._clock.now())
        cached = lambda worker_id: self._registry.cached_prefix_tokens(worker_id, self._shape(run))  # noqa: E731
        async with self._placing.seat(run.request, run.arrived_at, cached) as seat:
            try:
                yield seat
            except BaseException as error:
                if isinstance(error, StrictRefusal):
                    self._metrics.strict_refusal(error.clause)
                if isinstance(error, KvferryError) and error.code in (ErrorCode.INTERNAL, ErrorCode.HANDOFF_FAILED):
                    _log.error("no answer: %s", error.message, extra={"request_id": run.request.request_id})
                receipt = run.failed_receipt(error, self._clock.now())
                self._store.put(receipt, run.request.tenant)
                run.live.left_receipt(receipt)
                raise


def _prompt_logprobs(run: RequestRun, course: Course) -> tuple[PromptTokenLogprob, ...]:
    """Those of the whole prompt, with its first batch; later attempts, and moves, are not asked for them again."""
    if not wants_prompt_logprobs(run.request):
        return ()
    run.request = without_prompt_logprobs(run.request)
    return course.take_prompt_logprobs()

"""Drives one request over the cluster, from admission to its receipt.

Life of a request:
1. Take a place (bounded), or wait for one in a bounded queue.
2. Plan: the policy picks workers from what is known this moment; places on both are taken in the same instant.
3. Attempt (`attempt.py`): admit on decode, prefill into its ticket, give out tokens in order.
4. Receipt: both workers' halves and the router's times, checked against each other (`proof.py`), kept for a while. A
   request that got a place and failed leaves one too.

Failure exits:
* no place and a full queue: OVERLOADED at once. No decode worker: UNAVAILABLE at once.
* a worker has no room: wait in line for a sign of room, then 2 again; OVERLOADED when that takes too long.
* a worker is lost or the hand-off fails: 2 again, avoiding whom to blame, with the tokens given out so far appended
  to the prompt. The text goes on unchanged: noise depends on positions, not on workers. Bounded by attempts per
  request and by a budget over all requests; then the failure is the caller's.
* any other failure of a worker (bad request, defect): the caller's at once.
* strict hand-off refuses what it cannot prove: the caller's at once.
* the deadline: DEADLINE_EXCEEDED, from whatever state, and both workers are told.
* the caller goes away (iterator closed, task cancelled): both workers are told; the queues are left at once.
"""

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from kv_cache.layout import KVCacheLayout
from kvferry_rpc.common_pb2 import ErrorCode, FinishReason, KVReceipt, TokenOutput
from kvferry_rpc.internal_pb2 import Register
from router import receipts
from router.admission import RETRY_AFTER_MS, Admission, RoomQueue
from router.attempt import Attempt, AttemptFailed, Work
from router.generation import EnoughTokens, GenerationRequest, TokenBatch, TokenEnd
from router.metrics import RequestMeter, RouterMetrics
from router.placement import Placement, Side
from router.policy import NoPlan, Plan, RequestShape, choose
from router.proof import Clause, HandoffRules, StrictRefusal, check_whole
from router.receipts import AttemptRecord, ReceiptStore
from router.retry import MAX_ATTEMPTS, RetryBudget, backoff_s, is_retriable
from router.worker_links import WorkerLinks
from router.worker_registry import WorkerRegistry
from runtime.clock import Clock
from runtime.errors import KvferryError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DispatchLimits:
    """Bounds of the dispatcher. Tokens are prompt tokens; `max_room_wait_s` is how long a request may wait for room
    on a worker. `strict_handoff`: every prompt comes from a prefill worker, provably, or the request fails;
    `require_transports`: over one of these, if any are named. `reuse_decode_kv`: prefill workers may pull what decode
    workers have cached."""

    max_in_flight: int = 256
    max_queued: int = 1024
    max_queued_tokens: int = 4_000_000
    max_room_wait_s: float = 120.0
    strict_handoff: bool = False
    require_transports: tuple[str, ...] = ()
    reuse_decode_kv: bool = True


@dataclass(slots=True)
class _Run:
    """One request under way: what outlives its attempts."""

    request: GenerationRequest
    arrived_at: float
    meter: RequestMeter
    output: list[int] = field(default_factory=list)  # Token ids given out so far.
    # Of prompt and output, as far as they were needed.
    block_hashes: dict[KVCacheLayout, list[bytes]] = field(default_factory=dict)
    attempts: int = 0
    attempt: Attempt | None = None  # The last one.
    failures: int = 0  # Attempts that failed for another reason than want of room.
    failure_lines: list[str] = field(default_factory=list)
    avoid: set[str] = field(default_factory=set)
    waiting_since: float | None = None  # When it began to wait for room; None once it has got tokens.
    computed_before: bool = False


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
        self._admission = Admission(limits.max_in_flight, limits.max_queued, limits.max_queued_tokens)
        self._room = RoomQueue()
        self._budget = RetryBudget(limits.max_in_flight, clock)
        self._turn = 0
        registry.subscribe(self)
        metrics.watch(registry, self._admission, self._room)

    @property
    def in_flight(self) -> int:
        """Requests accepted and not finished, queued ones included."""
        return self._admission.in_flight + self._admission.queued

    @property
    def queued(self) -> int:
        """Of those in flight, the ones that wait for a place or for room on a worker."""
        return self._admission.queued + len(self._room)

    async def wait_idle(self) -> None:
        """Return when no request is in flight. The caller sets the deadline."""
        await self._admission.wait_idle()

    async def tokens(self, request: GenerationRequest) -> AsyncGenerator[TokenBatch | TokenEnd, None]:
        """Yield batches, then exactly one TokenEnd. Raises KvferryError when the request cannot be finished.

        Closing the iterator, or cancelling the task that reads it, cancels the request on every worker. A reader that
        has what it wanted throws EnoughTokens instead, and gets the TokenEnd.
        """
        end: TokenEnd | None = None
        with self._metrics.request() as meter:
            run = _Run(request, self._clock.now(), meter)
            self._budget.deposit()
            async with self._place(run):
                while end is None:
                    run.attempt = attempt = await self._next_attempt(run)
                    try:
                        async with attempt:
                            reason = None
                            try:
                                while (batch := await attempt.next_batch()) is not None:
                                    self._note(run, batch)
                                    yield TokenBatch(batch)
                            except EnoughTokens:
                                reason = FinishReason.STOP
                            end = self._end(run, await attempt.finish(), reason)
                    except AttemptFailed as failure:
                        end = await self._after_failure(run, attempt, failure)
        # Behind the block: whoever has the end may close the iterator, and that is no cancellation.
        yield end

    # ---- RegistryListener ----

    def worker_attached(self, register: Register) -> None:
        """Nothing yet: `room_changed` follows."""

    def worker_detached(self, register: Register) -> None:
        self._room.wake_all()

    def room_changed(self) -> None:
        self._room.wake()

    # ---- planning ----

    async def _next_attempt(self, run: _Run) -> Attempt:
        """Place the request, waiting for room while every suitable worker is full. Raises KvferryError."""
        if len(self._room) and run.waiting_since is None:
            await self._wait_for_room(run)
        while isinstance(plan := self._plan(run), NoPlan):
            if not plan.may_wait:
                raise self._cannot_place(run, plan)
            await self._wait_for_room(run)
        run.attempts += 1
        work = Work(run.request, run.attempts, tuple(run.output), run.arrived_at)
        placement = Placement(self._registry, plan, len(run.request.prompt_token_ids) + len(run.output))
        stub = self._links.prefill_stub(plan.prefill_worker) if plan.prefill_worker else None
        session = self._links.decode_session(plan.decode_worker)
        source = self._links.decode_session(plan.source.worker_id) if plan.source else None
        return Attempt(work, placement, session, stub, source, self._clock, self._room.wake, self._rules)

    def _plan(self, run: _Run) -> Plan | NoPlan:
        if not self._registry.hashers:
            return NoPlan("decode", False, "no worker is attached")
        tokens = (*run.request.prompt_token_ids, *run.output)
        names = {}
        for layout, hasher in self._registry.hashers.items():
            names[layout] = run.block_hashes.setdefault(layout, [])
            hasher.extend(names[layout], tokens, run.request.cache_salt)
        shape = RequestShape(
            num_tokens=len(tokens),
            block_hashes=names,
            avoid=frozenset(run.avoid),
            allow_local=not self._limits.strict_handoff,
            allow_pull=self._limits.reuse_decode_kv,
        )
        self._turn += 1
        return choose(self._registry.cluster_load(), shape, self._turn)

    def _cannot_place(self, run: _Run, plan: NoPlan) -> KvferryError:
        message = "; ".join([plan.reason, *run.failure_lines[-1:]])
        if plan.role == "prefill":
            return StrictRefusal(Clause.LOCAL_PREFILL, message, retry_after_ms=RETRY_AFTER_MS)
        return KvferryError(ErrorCode.UNAVAILABLE, message, retry_after_ms=RETRY_AFTER_MS)

    async def _wait_for_room(self, run: _Run) -> None:
        """Wait for a sign of room. Raises KvferryError when that takes too long."""
        now = self._clock.now()
        run.waiting_since = run.waiting_since or now
        patience_s = run.waiting_since + self._limits.max_room_wait_s - now
        if await self._room.wait(min(patience_s, self._remaining_s(run)), run.arrived_at):
            return
        self._remaining_s(run)
        waited = f"no worker had room for {self._limits.max_room_wait_s:g} s"
        raise KvferryError(ErrorCode.OVERLOADED, waited, retry_after_ms=RETRY_AFTER_MS)

    # ---- ends ----

    def _note(self, run: _Run, batch: tuple[TokenOutput, ...]) -> None:
        run.waiting_since = None
        run.output.extend(token.token_id for token in batch)
        run.meter.tokens(len(batch))

    async def _after_failure(self, run: _Run, attempt: Attempt, failure: AttemptFailed) -> TokenEnd | None:
        """Get ready for another attempt, or raise the failure. A TokenEnd when the answer was complete already."""
        error = failure.error
        run.failure_lines.append(f"attempt {run.attempts}: {error.code_name}: {error.message}")
        if error.code == ErrorCode.OVERLOADED:
            # The worker is marked full: the next plan takes another, or waits, or finds that all are gone.
            run.waiting_since = run.waiting_since or self._clock.now()
            return None
        run.computed_before = run.computed_before or attempt.was_taken
        record = attempt.record()
        if record.plan.prefill_worker is not None:
            self._metrics.handoff_failed()
        if not is_retriable(error):
            raise error
        if (reason := self._reason_to_end(run)) is not None:
            return self._end(run, record, reason)
        run.failures += 1
        if run.failures >= MAX_ATTEMPTS or not self._budget.withdraw():
            raise error
        self._metrics.retries.inc()
        extra = {"request_id": run.request.request_id}
        _log.warning("trying again after %d tokens: %s", len(run.output), run.failure_lines[-1], extra=extra)
        await asyncio.sleep(min(backoff_s(run.failures, self._rng), self._remaining_s(run)))
        run.avoid |= self._blame(record.plan, failure)
        return None

    def _blame(self, plan: Plan, failure: AttemptFailed) -> set[str]:
        """The workers to avoid after a failure. Asked a moment later, when it has shown who is gone."""
        unavailable = failure.error.code == ErrorCode.UNAVAILABLE
        blamed = set()
        session = self._links.decode_session(plan.decode_worker)
        if session is None or not session.is_open or (unavailable and failure.side is Side.DECODE):
            blamed.add(plan.decode_worker)
        if plan.prefill_worker is not None:
            is_gone = self._registry.registration(plan.prefill_worker) is None
            if is_gone or (unavailable and failure.side is Side.PREFILL):
                self._registry.suspect(plan.prefill_worker)
                blamed.add(plan.prefill_worker)
        # Blocks that did not verify: either end may be at fault.
        return blamed or {plan.decode_worker, plan.prefill_worker or plan.decode_worker}

    def _reason_to_end(self, run: _Run) -> "FinishReason.ValueType | None":
        """Why the answer so far is complete, if it is: the decode worker was lost before it could say so."""
        sampling, limits = run.request.sampling, self._registry.limits
        if not run.output:
            return None
        last = run.output[-1]
        is_eos = last in self._eos_token_ids and not sampling.ignore_eos
        if (is_eos or last in sampling.stop_token_ids) and len(run.output) >= sampling.min_tokens:
            return FinishReason.STOP
        length = len(run.request.prompt_token_ids) + len(run.output)
        if len(run.output) >= sampling.max_tokens or (limits and length >= limits.max_context_tokens):
            return FinishReason.LENGTH
        return None

    def _end(self, run: _Run, record: AttemptRecord, reason: "FinishReason.ValueType | None" = None) -> TokenEnd:
        """Check and keep the receipt. `reason` stands in for a decode half that did not come."""
        record = replace(record, computed_before=run.computed_before)
        request_id, prompt_tokens = run.request.request_id, len(run.request.prompt_token_ids)
        check_whole(self._rules, record)
        receipt = receipts.merge(request_id, prompt_tokens, record, run.failure_lines)
        self._store.put(receipt)
        self._metrics.handoff_committed(receipt, self._rules)
        run.meter.finished(receipt)
        return TokenEnd(
            reason=reason or (record.decode_done.reason if record.decode_done else FinishReason.STOP),
            prompt_tokens=prompt_tokens,
            completion_tokens=len(run.output),
            cached_tokens=receipts.cached_tokens(record, prompt_tokens),
            receipt=receipt,
        )

    @asynccontextmanager
    async def _place(self, run: _Run) -> AsyncIterator[None]:
        """A place among the requests that run. If what is done in it fails, or the caller leaves, a receipt says what
        is known. Raises KvferryError when there is no place."""
        async with self._admission.place(len(run.request.prompt_token_ids), self._remaining_s(run)):
            try:
                yield
            except BaseException as error:
                if isinstance(error, StrictRefusal):
                    self._metrics.strict_refusal(error.clause)
                if isinstance(error, KvferryError) and error.code in (ErrorCode.INTERNAL, ErrorCode.HANDOFF_FAILED):
                    _log.error("no answer: %s", error.message, extra={"request_id": run.request.request_id})
                self._store.put(self._failed_receipt(run, error))
                raise

    def _failed_receipt(self, run: _Run, error: BaseException) -> KVReceipt:
        if isinstance(error, KvferryError):
            line = f"{error.code_name}: {error.message}"
        elif isinstance(error, Exception):
            line = f"internal: {type(error).__name__}"
        else:
            line = "cancelled: the caller left"
        lines = list(run.failure_lines)
        if lines and lines[-1].endswith(line):
            line = lines.pop()
        lines.append(receipts.FINAL_FAILURE + line)
        request_id, prompt_tokens = run.request.request_id, len(run.request.prompt_token_ids)
        if run.attempt is None:
            waited_ms = (self._clock.now() - run.arrived_at) * 1000
            return receipts.unplaced(request_id, prompt_tokens, waited_ms, lines)
        return receipts.merge(request_id, prompt_tokens, run.attempt.record(), lines)

    def _remaining_s(self, run: _Run) -> float:
        remaining_s = run.request.deadline - self._clock.now()
        if remaining_s <= 0:
            raise KvferryError(ErrorCode.DEADLINE_EXCEEDED, "the request's deadline passed")
        return remaining_s

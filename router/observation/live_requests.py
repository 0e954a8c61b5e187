"""What each request does this moment, what it waits for, and since when; and how the last ones went.

The dispatcher keeps one `LiveRequest` for each request that has come to it, and tells it when an attempt begins and
when one has failed. All the rest is read from the attempts, when somebody asks: a token costs nothing here.

Phases, in their order; a new attempt begins with `queued` again:
* `queued`: waiting for a place, or for room on a decode worker
* `prefill`: a worker computes the prompt
* `transfer`: the first token is known, and the decode worker has not verified the KV; or a running answer moves
* `decode`: the decode worker has the KV, and tokens come from it
* `finished`, `failed` or `cancelled`: it is over
No prompt and no text is kept here.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from kvferry_rpc.common_pb2 import ErrorCode, KVReceipt
from router.generation import GenerationRequest
from router.policy import Plan
from runtime.clock import Clock
from runtime.errors import KvferryError

FINISHED_KEPT = 200
"""How many requests are remembered after their end."""
MAX_ATTEMPTS_KEPT = 64
"""Of one request: one that waits for room may make many."""


class Phase(Enum):
    """See the head of the file."""

    QUEUED = "queued"
    PREFILL = "prefill"
    TRANSFER = "transfer"
    DECODE = "decode"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_end(self) -> bool:
        """Whether nothing comes after it."""
        return self in (Phase.FINISHED, Phase.FAILED, Phase.CANCELLED)


@dataclass(frozen=True, slots=True)
class PhaseBegin:
    """A request entered a phase at `began_at`, in the `attempt` of that number (0: before the first one). `worker` is
    who works in that phase: who computes the prompt, the KV's receiver, who decodes; empty in the others."""

    phase: Phase
    began_at: float
    attempt: int
    worker: str = ""


@dataclass(frozen=True, slots=True)
class AttemptBegin:
    """Workers were chosen at `planned_at`, for `reason`. `moves`: a running answer goes from one to the other."""

    attempt: int
    planned_at: float
    prefill_worker: str
    decode_worker: str
    reason: str
    moves: bool


@dataclass(frozen=True, slots=True)
class RequestView:
    """One request at one moment. Times are in seconds on the router's clock.

    `phases` begins with `queued` and ends with the phase that it is in; `phase` and `since` are of that one. Workers
    are those of the last attempt, empty before the first; `prefill_worker` is the decode worker where that one computes
    the prompt. `cached_tokens`: None until the end. `waits_for` is for people, empty after the end. `error`: the code's
    name for one that failed. `receipt`: the message that the store keeps, not to be changed; None before the end.
    `attempts`: the first ones, up to a bound. `traceparent`: as in the request.
    """

    request_id: str
    tenant: str
    endpoint: str
    model: str
    arrived_at: float
    phases: tuple[PhaseBegin, ...]
    attempt: int
    prefill_worker: str
    decode_worker: str
    prompt_tokens: int
    cached_tokens: int | None
    output_tokens: int
    max_tokens: int
    waits_for: str
    error: str = ""
    receipt: KVReceipt | None = None
    attempts: tuple[AttemptBegin, ...] = ()
    traceparent: str = ""

    @property
    def phase(self) -> Phase:
        """The one that it is in."""
        return self.phases[-1].phase

    @property
    def since(self) -> float:
        """When that one began."""
        return self.phases[-1].began_at


@dataclass(frozen=True, slots=True)
class Progress:
    """How far an attempt has come. Times are None before they have happened.

    `planned_at`: its workers were chosen. `placed_at`: a worker was asked for the prompt's KV. `sampled_at`: the first
    token came from a worker that sends its KV. `decoding_at`: the decode worker has the KV, or has sent a token.
    `moves`: the KV comes from another decode worker. `was_taken`: the decode worker has room for it. `is_paused`: it
    stands still, to be moved. `has_unread_tokens`: its reader has not taken what is there. `is_over`: the decode worker
    has said its last word.
    """

    attempt: int
    plan: Plan
    planned_at: float
    moves: bool
    was_taken: bool
    placed_at: float | None
    sampled_at: float | None
    decoding_at: float | None
    is_paused: bool
    has_unread_tokens: bool
    is_over: bool


class Attempting(Protocol):
    """What a request goes through at the moment. `router.dispatch.course.Course` is one."""

    def progress(self) -> Sequence[Progress]:
        """Of its attempts, one for each decode worker that the answer was or is on, in order; at least one."""
        ...


class LiveRequest:
    """One request. Its dispatcher tells it of attempts; made by `LiveRequests.request`. Event-loop thread only."""

    __slots__ = (
        "_attempt",
        "_attempting",
        "_attempts",
        "_cached_tokens",
        "_clock",
        "_history",
        "_output",
        "_receipt",
        "_request",
    )

    def __init__(self, request: GenerationRequest, arrived_at: float, output: Sequence[int], clock: Clock) -> None:
        self._request = request
        self._output = output
        self._clock = clock
        self._history = [PhaseBegin(Phase.QUEUED, arrived_at, 0)]
        self._attempts: list[AttemptBegin] = []
        self._attempting: Attempting | None = None
        self._attempt = 0
        self._cached_tokens: int | None = None
        self._receipt: KVReceipt | None = None

    @property
    def request_id(self) -> str:
        return self._request.request_id

    def begun(self, attempting: Attempting) -> None:
        """Workers were chosen, and will be asked now."""
        self._attempting = attempting

    def attempt_failed(self) -> None:
        """It is without workers again."""
        steps, self._attempting = self._progress(), None
        self._attempts = self._all_attempts(steps)
        self._history += _phases(steps)
        self._attempt = steps[-1].attempt if steps else self._attempt
        # An attempt that found no room has not ended the wait.
        if self._history[-1].phase is not Phase.QUEUED:
            self._history.append(PhaseBegin(Phase.QUEUED, self._clock.now(), self._attempt))

    def left_receipt(self, receipt: KVReceipt, cached_tokens: int | None = None) -> None:
        """The request is about to end, with this receipt."""
        self._receipt = receipt
        self._cached_tokens = cached_tokens

    def view(self, model: str, ahead: int | None) -> RequestView:
        """`ahead`: so many requests are before it in the queue; None: it is not in the queue."""
        steps = self._progress()
        phases = [*self._history, *_phases(steps)]
        return self._view(model, phases, steps, _waits_for(phases[-1], steps, ahead))

    def final_view(self, model: str, end: Phase, error: str) -> RequestView:
        """As it was left."""
        steps = self._progress()
        attempt = steps[-1].attempt if steps else self._attempt
        phases = [*self._history, *_phases(steps), PhaseBegin(end, self._clock.now(), attempt)]
        return self._view(model, phases, steps, "", error)

    # ---- inside ----

    def _progress(self) -> Sequence[Progress]:
        return self._attempting.progress() if self._attempting is not None else ()

    def _all_attempts(self, steps: Sequence[Progress]) -> list[AttemptBegin]:
        return [*self._attempts, *map(_attempt_begin, steps)][:MAX_ATTEMPTS_KEPT]

    def _view(
        self, model: str, phases: list[PhaseBegin], steps: Sequence[Progress], waits_for: str, error: str = ""
    ) -> RequestView:
        request, last = self._request, steps[-1] if steps else None
        return RequestView(
            request_id=request.request_id,
            tenant=request.tenant,
            endpoint=request.endpoint,
            model=model,
            arrived_at=self._history[0].began_at,
            phases=tuple(phases),
            attempt=last.attempt if last else self._attempt,
            prefill_worker=(last.plan.prefill_worker or last.plan.decode_worker) if last else "",
            decode_worker=last.plan.decode_worker if last else "",
            prompt_tokens=len(request.prompt_token_ids),
            cached_tokens=self._cached_tokens,
            output_tokens=len(self._output),
            max_tokens=request.sampling.max_tokens,
            waits_for=waits_for,
            error=error,
            receipt=self._receipt,
            attempts=tuple(self._all_attempts(steps)),
            traceparent=request.traceparent,
        )


class LiveRequests:
    """The requests that a dispatcher has, and the last ones that it had. Event-loop thread only."""

    def __init__(
        self, clock: Clock, queue: Callable[[], Mapping[str, int]], *, model: str = "", kept: int = FINISHED_KEPT
    ) -> None:
        """`queue`: for each request that waits for a place, by its id, how many are before it."""
        self.model = model
        self._clock = clock
        self._queue = queue
        # By identity: an id is the caller's word, and two may give the same one.
        self._live: dict[LiveRequest, None] = {}
        self._ended: deque[RequestView] = deque(maxlen=kept)
        self._listeners: list[Callable[[RequestView], None]] = []

    def subscribe(self, listener: Callable[[RequestView], None]) -> None:
        """Tell `listener` of each request when it has ended. It must be quick and may not raise."""
        self._listeners.append(listener)

    @contextmanager
    def request(self, request: GenerationRequest, arrived_at: float, output: Sequence[int]) -> Iterator[LiveRequest]:
        """Follow one request for the length of the block; how the block ends is how it ended. `output` grows with the
        answer."""
        live = LiveRequest(request, arrived_at, output, self._clock)
        self._live[live] = None
        end, code = Phase.CANCELLED, ""
        try:
            yield live
            end = Phase.FINISHED
        except KvferryError as error:
            if error.code != ErrorCode.CANCELLED:
                end, code = Phase.FAILED, error.code_name
            raise
        except Exception:
            end, code = Phase.FAILED, "internal"
            raise
        finally:
            del self._live[live]
            view = live.final_view(self.model, end, code)
            self._ended.append(view)
            for listener in self._listeners:
                listener(view)

    def snapshot(self, now: float) -> tuple[RequestView, ...]:
        """Those in flight, the oldest first, then those that have ended, the last one first. `now` is on the router's
        clock; it costs a sort of the queue, and no request is held up otherwise."""
        ahead = self._queue()
        live = [request.view(self.model, ahead.get(request.request_id)) for request in self._live]
        return (*live, *reversed(self._ended))


def _attempt_begin(step: Progress) -> AttemptBegin:
    plan = step.plan
    prefill_worker = plan.prefill_worker or plan.decode_worker
    return AttemptBegin(step.attempt, step.planned_at, prefill_worker, plan.decode_worker, plan.reason, step.moves)


def _phases(steps: Sequence[Progress]) -> list[PhaseBegin]:
    """The phases of attempts, in order. One that did not happen, or took no time, is not there."""
    phases: list[PhaseBegin] = []
    for step in steps:
        plan, attempt = step.plan, step.attempt
        decoding_at, is_remote = step.decoding_at, plan.prefill_worker is not None
        if step.placed_at is None:
            continue
        if step.moves:
            phases.append(PhaseBegin(Phase.TRANSFER, step.placed_at, attempt, plan.decode_worker))
        else:
            phases.append(PhaseBegin(Phase.PREFILL, step.placed_at, attempt, plan.prefill_worker or plan.decode_worker))
            sampled_at = step.sampled_at
            if is_remote and sampled_at is not None and (decoding_at is None or sampled_at < decoding_at):
                phases.append(PhaseBegin(Phase.TRANSFER, sampled_at, attempt, plan.decode_worker))
        if decoding_at is not None:
            phases.append(PhaseBegin(Phase.DECODE, decoding_at, attempt, plan.decode_worker))
    return phases


def _waits_for(last: PhaseBegin, steps: Sequence[Progress], ahead: int | None) -> str:
    """For people."""
    if ahead is not None:
        return f"a place ({ahead} before it)"
    if not steps:
        return "room on a decode worker" if last.attempt else "its turn"
    step = steps[-1]
    worker = step.plan.decode_worker
    if step.has_unread_tokens:
        return "its client to read"
    if last.phase is Phase.QUEUED or not step.was_taken:
        return f"room on {worker}"
    if step.is_over:
        return "the rest of its receipt"
    if step.is_paused:
        return f"another decode worker than {worker}"
    if last.phase is Phase.PREFILL:
        return f"first token from {last.worker}"
    if last.phase is Phase.TRANSFER:
        return f"its KV on {worker}"
    return f"tokens from {worker}"

"""The router's spans of a request: `request`, and below it `queue` and `attempt` spans, one for each wait and try.

Below an attempt's span are `admit` (a decode worker is asked for room), and the spans of the workers, which are told
its context. All of it is made when the request is over, from the table of live requests and the receipt.
"""

from collections.abc import Callable

from router.observation.live_requests import AttemptBegin, Phase, PhaseBegin, RequestView
from runtime.tracing import Attribute, Span, TraceContext, client_context, inner_context


class Traces:
    """What a front door needs: where each request belongs. Event-loop thread only."""

    def __init__(self, new_trace_id: Callable[[], str]) -> None:
        """`new_trace_id` gives 32 lower-case hexadecimal digits, not all zero."""
        self._new_trace_id = new_trace_id

    def begin(self, traceparent: str | None) -> str:
        """What goes into `GenerationRequest.traceparent`, for a client that sent this header or none. Empty: the client
        does not want it recorded."""
        parent, wanted = client_context(traceparent or "")
        if not wanted:
            return ""
        return str(parent or TraceContext(self._new_trace_id()))


def untraced(traceparent: str | None) -> str:
    """In place of `Traces.begin` where nothing is traced."""
    return ""


def attempt_traceparent(traceparent: str, request_id: str, attempt: int) -> str:
    """What the workers of an attempt are told; empty for a request that is not traced."""
    trace = inner_context(traceparent) if traceparent else None
    return str(_attempt_context(trace, request_id, attempt)) if trace is not None else ""


def request_spans(view: RequestView) -> list[Span]:
    """Of a request that is over; none if it is not traced."""
    trace = inner_context(view.traceparent)
    if trace is None:
        return []
    context = trace.child("request", view.request_id)
    root = Span(
        "request", context, trace.span_id, view.arrived_at, view.since, _facts(view), view.error, is_server=True
    )
    spans = [root]
    for number, begin in enumerate(begin for begin in view.phases if begin.phase is Phase.QUEUED):
        ended_at = _end_of_wait(view, begin)
        queue = context.child("queue", number)
        spans.append(Span("queue", queue, context.span_id, begin.began_at, ended_at, {}))
    for attempt in view.attempts:
        spans += _attempt_spans(view, trace, context, attempt)
    return spans


def _attempt_spans(view: RequestView, trace: TraceContext, root: TraceContext, attempt: AttemptBegin) -> list[Span]:
    own = [begin for begin in view.phases if begin.attempt == attempt.attempt and begin.phase is not Phase.QUEUED]
    placed_at = own[0].began_at if own and not own[0].phase.is_end else None
    ended_at = _end_of_attempt(view, attempt)
    context = _attempt_context(trace, view.request_id, attempt.attempt)
    facts: dict[str, Attribute] = {
        "kvferry.attempt": attempt.attempt,
        "kvferry.prefill_worker": attempt.prefill_worker,
        "kvferry.decode_worker": attempt.decode_worker,
        "kvferry.plan_reason": attempt.reason,
        "kvferry.moves": attempt.moves,
    }
    name = f"attempt {attempt.attempt}"
    spans = [Span(name, context, root.span_id, attempt.planned_at, ended_at, facts)]
    if placed_at is not None:
        admit = context.child("admit")
        spans.append(Span("admit", admit, context.span_id, attempt.planned_at, placed_at, {}))
    return spans


def _end_of_wait(view: RequestView, begin: PhaseBegin) -> float:
    """Until a plan was made, or nothing was waited for any more."""
    after = [attempt.planned_at for attempt in view.attempts if attempt.planned_at >= begin.began_at]
    return min([*after, view.since])


def _end_of_attempt(view: RequestView, attempt: AttemptBegin) -> float:
    """When the request waited again, or was with another worker, or ended."""
    after = [
        begin.began_at
        for begin in view.phases
        if begin.began_at >= attempt.planned_at
        and (begin.phase is Phase.QUEUED or begin.phase.is_end or begin.attempt > attempt.attempt)
    ]
    return min(after, default=view.since)


def _attempt_context(trace: TraceContext, request_id: str, attempt: int) -> TraceContext:
    return trace.child("request", request_id).child("attempt", attempt)


def _facts(view: RequestView) -> dict[str, Attribute]:
    facts: dict[str, Attribute] = {
        "kvferry.request_id": view.request_id,
        "kvferry.tenant": view.tenant,
        "kvferry.endpoint": view.endpoint,
        "kvferry.model": view.model,
        "kvferry.outcome": view.phase.value,
        "kvferry.prompt_tokens": view.prompt_tokens,
        "kvferry.output_tokens": view.output_tokens,
        "kvferry.attempts": view.attempt,
    }
    receipt = view.receipt
    if receipt is not None:
        facts |= {
            "kvferry.handoff_id": receipt.handoff_id,
            "kvferry.transport": receipt.transport,
            "kvferry.checksum_verified": receipt.checksum_verified,
            "kvferry.tokens_recomputed": receipt.tokens_recomputed,
            "kvferry.bytes_sent": receipt.bytes_sent,
        }
    if view.cached_tokens is not None:
        facts["kvferry.cached_tokens"] = view.cached_tokens
    return facts

"""The spans of a request on a prefill worker."""

from dataclasses import dataclass

from kv_transfer.events import SendStats
from runtime.tracing import Attribute, Span, TraceContext, child_span


@dataclass(frozen=True, slots=True)
class PrefillTimes:
    """On the worker's clock, in seconds; None = did not happen."""

    arrived_at: float
    started_at: float | None
    sampled_at: float | None
    ended_at: float


def prefill_spans(
    trace: TraceContext, times: PrefillTimes, stats: SendStats | None, facts: dict[str, Attribute], error: str = ""
) -> list[Span]:
    """The whole time here, and its parts: wait, compute, transfer. `stats`: None when nothing was delivered. `error`:
    `cancelled`, or the name of an error's code."""
    context = trace.child("prefill worker", facts["kvferry.worker"])
    facts = {**facts, "kvferry.end": error or "sent"}
    problem = "" if error == "cancelled" else error
    whole = Span(
        "prefill worker", context, trace.span_id, times.arrived_at, times.ended_at, facts, problem, is_server=True
    )
    spans = [
        whole,
        *child_span(whole, "wait", times.arrived_at, times.started_at),
        *child_span(whole, "compute", times.started_at, times.sampled_at),
    ]
    if stats is not None:
        spans += child_span(
            whole, "transfer", stats.first_write_at, stats.last_write_at,
            transport=stats.transport, blocks=stats.num_blocks, bytes=stats.size_bytes, detail=stats.transport_detail,
        )  # fmt: skip
    return spans

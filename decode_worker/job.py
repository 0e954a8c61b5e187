"""One request of a decode worker: how it comes to the worker, and what the worker keeps of it until its last event."""

from collections.abc import Callable
from dataclasses import dataclass

from engine.sequence import Sequence
from kv_transfer.events import Committed
from kvferry_rpc.internal_pb2 import DecodeEvent
from runtime.tracing import Attribute, Span, TraceContext, child_span

Emit = Callable[[list[DecodeEvent]], None]


@dataclass(frozen=True, slots=True)
class AdmitRequest:
    """A request of a session, checked by the server; its sequence has the name that `sequence_id` gives it. `emit`
    takes the session's events of one step; it is called on the owner thread and must not block. Times are on the
    worker's clock, in seconds. `trace`: where its spans belong, None = it is not traced."""

    session_id: int
    request_id: str
    attempt: int
    sequence: Sequence
    local_prefill: bool
    deadline: float
    emit: Emit
    trace: TraceContext | None = None


@dataclass(slots=True)
class Job:
    """From `AdmitRequest` to its last event."""

    admit: AdmitRequest
    admitted_at: float
    cached_tokens: int = 0
    handoff_id: str | None = None  # while RECEIVING
    commit: Committed | None = None
    started_at: float | None = None

    def spans(self, trace: TraceContext, worker_id: str, end: str, now: float) -> list[Span]:
        """The whole time here, and its parts: receive, verify, decode. `end`: a finish reason, `handed_over`,
        `cancelled`, or the name of an error's code."""
        is_error = end not in ("stop", "length", "handed_over", "cancelled")
        admit, commit, seq = self.admit, self.commit, self.admit.sequence
        facts: dict[str, Attribute] = {
            "kvferry.request_id": admit.request_id,
            "kvferry.attempt": admit.attempt,
            "kvferry.worker": worker_id,
            "kvferry.local_prefill": admit.local_prefill,
            "kvferry.cached_tokens": self.cached_tokens,
            "kvferry.output_tokens": seq.num_output_tokens,
            "kvferry.preempted_tokens": seq.preempted_tokens,
            "kvferry.end": end,
        }
        context = trace.child("decode worker", worker_id)
        error = end if is_error else ""
        whole = Span("decode worker", context, trace.span_id, self.admitted_at, now, facts, error, is_server=True)
        spans = [whole]
        if commit is not None:
            stats = commit.stats
            spans += child_span(
                whole, "receive", stats.first_write_at, stats.last_write_at,
                transport=stats.transport, blocks=stats.num_blocks, bytes=stats.size_bytes,
            )  # fmt: skip
            spans += child_span(
                whole, "verify", stats.commit_received_at, stats.verified_at, checksum_verified=stats.verified
            )
        recomputed = seq.arrival_tokens_computed if commit is not None else 0
        return spans + child_span(whole, "decode", self.started_at, now, tokens_recomputed=recomputed)

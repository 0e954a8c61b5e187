"""One request of a prefill worker: how it comes to the worker, and what the worker keeps of it until it is drained."""

from collections.abc import Callable
from dataclasses import dataclass

from engine.sequence import Sequence
from kv_transfer.events import SendStats
from kvferry_rpc.internal_pb2 import KVSource, PrefillEvent, Ticket
from prefill_worker.pull import Pull
from runtime.tracing import Attribute, Span, TraceContext, child_span

Reply = Callable[[PrefillEvent], None]


@dataclass(frozen=True, slots=True)
class Submit:
    """A request, checked by the server; its sequence has the hand-off's id for a name. `reply` is called on the owner
    thread or a sender's and must not block; it gets at most one `pull`, the prompt's log probabilities if they are
    wanted, the first token or not, and then one `done` or `error`, or nothing more after a Cancel. Times are on the
    worker's clock, in seconds. `source`: who may hold more of the prompt's KV. `request_id` is
    for log lines and spans. `trace`: where its spans belong, None = it is not traced."""

    sequence: Sequence
    ticket: Ticket
    arrived_at: float
    deadline: float
    reply: Reply
    source: KVSource | None = None
    awaits_constraint: bool = False
    request_id: str = ""
    trace: TraceContext | None = None


@dataclass(slots=True)
class Job:
    """From `Submit` to `Drained`. The times are set before the commit, and only read after it."""

    submit: Submit
    started_at: float | None = None
    sampled_at: float | None = None
    quarantine_id: int | None = None
    pull: Pull | None = None
    awaits_constraint: bool = False

    @property
    def pulled_tokens(self) -> int:
        """Prompt tokens whose KV a decode worker had."""
        return self.pull.tokens_found(self.submit.sequence.num_cached_tokens) if self.pull is not None else 0

    def spans(self, trace: TraceContext, worker_id: str, stats: SendStats | None, error: str, now: float) -> list[Span]:
        """The whole time here, and its parts: wait, compute, transfer. `stats`: None when nothing was delivered.
        `error`: empty, `cancelled`, or the name of an error's code."""
        submit, seq = self.submit, self.submit.sequence
        facts: dict[str, Attribute] = {
            "kvferry.request_id": submit.request_id,
            "kvferry.handoff_id": submit.ticket.handoff_id,
            "kvferry.attempt": submit.ticket.attempt,
            "kvferry.worker": worker_id,
            "kvferry.prompt_tokens": seq.num_arrival_tokens,
            "kvferry.cached_tokens": seq.num_cached_tokens,
            "kvferry.pulled_tokens": self.pulled_tokens,
            "kvferry.end": error or "sent",
        }
        context = trace.child("prefill worker", worker_id)
        problem = "" if error == "cancelled" else error
        whole = Span("prefill worker", context, trace.span_id, submit.arrived_at, now, facts, problem, is_server=True)
        spans = [
            whole,
            *child_span(whole, "wait", submit.arrived_at, self.started_at),
            *child_span(whole, "compute", self.started_at, self.sampled_at),
        ]
        if stats is not None:
            spans += child_span(
                whole, "transfer", stats.first_write_at, stats.last_write_at,
                transport=stats.transport, blocks=stats.num_blocks, bytes=stats.size_bytes,
                detail=stats.transport_detail,
            )  # fmt: skip
        return spans

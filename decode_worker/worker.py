"""The decode worker's step, on the engine's owner thread.

Life of a request here:

1. `AdmitRequest` comes from a router's session. Blocks are reserved for what the prefix cache lacks and for the first
   new token; the answer is the ticket. No room: OVERLOADED at once.
2. A prefill worker fills the blocks. The engine does not look at them (RECEIVING).
3. `Committed`: every block was verified, nobody can write any more. The router hears of it first; then the sequence
   runs, with the first token that the prefill worker sampled.
4. Each step gives each running sequence a token, or several where guesses were right. The tokens of a step leave in
   one message a session.
5. Finished: the blocks go back (full ones stay in the prefix cache), the router gets this half of the receipt.

With `local_prefill` there is no ticket: the prompt is computed here, its log probabilities are told if they are wanted,
and 4 follows. What stays in the prefix cache can be sent back to a prefill worker later (`export.py`). While this
worker drains, a sequence may leave in the middle of 4 and go on elsewhere (`hand_over.py`).

Failure exits: refused at the door (nothing held); hand-off failed or its lease ran out; cancelled, past its deadline,
or the session closed. All of them go through `_stop`; blocks that a remote side may still write wait for `Fenced`.
"""

import logging
from dataclasses import dataclass
from typing import assert_never

from google.protobuf.message import DecodeError

from decode_worker.export import Exporter, ExportRequest
from decode_worker.hand_over import HandOverRequest, HandOvers, PauseRequest, ResumeRequest
from decode_worker.job import AdmitRequest, Emit, Job
from decode_worker.receipt import decode_half, verified_half
from engine.engine import Engine, EngineLoad, SequenceOutput
from engine.sequence import FinishReason
from engine.wire import prompt_logprobs, publish_cache_changes, token_output, token_sample
from kv_transfer.events import Committed, Failed, Fenced, SendEvent
from kv_transfer.receiver import HandoffReceiver
from kvferry_rpc import common_pb2, internal_pb2
from kvferry_rpc.internal_pb2 import DecodeEvent
from runtime.clock import Clock
from runtime.errors import ErrorCode, KvferryError
from runtime.kv_event_log import KVEventLog
from runtime.tracing import Tracer

_RETRY_AFTER_MS = 200

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """A router wants one request no more."""

    session_id: int
    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class SessionClosed:
    """A router is gone, and with it everybody who wanted its requests."""

    session_id: int


@dataclass(frozen=True, slots=True)
class ExportEvent:
    """News of what this worker sends: an export, or a hand-over. (A bare `Failed` is about what it receives.)"""

    event: SendEvent


def sequence_id(session_id: int, request_id: str, attempt: int) -> str:
    """Name of an attempt's sequence. Routers choose request ids without knowing of each other: none can touch, or
    stand in the way of, what another one has admitted under the same id."""
    return f"{session_id}/{request_id}/{attempt}"


Command = (
    AdmitRequest
    | CancelRequest
    | SessionClosed
    | Committed
    | Failed
    | Fenced
    | ExportRequest
    | ExportEvent
    | PauseRequest
    | ResumeRequest
    | HandOverRequest
)


@dataclass(frozen=True, slots=True)
class DecodeView:
    """A frozen view for other threads; totals count from the start."""

    load: EngineLoad
    handoffs_committed: int
    handoffs_failed: int
    bytes_moved: int


class DecodeWorker:
    """Handler of the engine loop. Every method belongs to the owner thread."""

    def __init__(
        self,
        engine: Engine,
        receiver: HandoffReceiver,
        exporter: Exporter,
        hand_overs: HandOvers,
        vocab_size: int,
        log: KVEventLog,
        clock: Clock,
        tracer: Tracer | None = None,
    ) -> None:
        """Without `tracer` no request is traced."""
        self._engine = engine
        self._exporter = exporter
        self._hand_overs = hand_overs
        self._vocab_size = vocab_size
        self._receiver = receiver
        self._log = log
        self._clock = clock
        self._tracer = tracer
        self._jobs: dict[str, Job] = {}  # by sequence
        self._seq_of: dict[str, str] = {}  # by open hand-off
        self._quarantines: dict[str, int | None] = {}  # by hand-off, until Fenced
        self._leaving: dict[str, Job] = {}  # by the hand-off that takes them elsewhere
        self._outbox: dict[int, tuple[Emit, list[DecodeEvent]]] = {}
        self._audited = True
        self._committed = self._failed = self._bytes_received = 0

    # ---- commands ------------------------------------------------------------------------------------------------

    def handle(self, command: Command) -> None:
        """Carry out one command; what is wrong with a request is answered, never raised."""
        match command:
            case AdmitRequest():
                self._admit(command)
            case CancelRequest():
                self._stop(sequence_id(command.session_id, command.request_id, command.attempt), None)
            case SessionClosed():
                for seq_id in [key for key, job in self._jobs.items() if job.admit.session_id == command.session_id]:
                    self._stop(seq_id, None)
            case Committed():
                self._on_committed(command)
            case Failed():
                self._on_handoff_failed(command)
            case Fenced():
                self._release_quarantine(command.handoff_id)
            case ExportRequest():
                self._audited = False
                self._exporter.begin(command)
            case ExportEvent():
                self._on_send_event(command.event)
            case PauseRequest() | HandOverRequest():
                self._prepare_to_leave(command)
            case ResumeRequest():
                self._hand_overs.resume(command.seq_id)
            case _:
                assert_never(command)
        self._flush()

    def _admit(self, admit: AdmitRequest) -> None:
        seq = admit.sequence
        job = Job(admit, self._clock.now())
        try:
            if admit.local_prefill:
                self._engine.add(seq)
            else:
                self._emit(job, DecodeEvent(ticket=self._reserve(job)))
        except KvferryError as error:
            self._emit(job, DecodeEvent(failed=error.to_proto()))
            return
        self._jobs[seq.seq_id] = job
        self._audited = False

    def _reserve(self, job: Job) -> internal_pb2.Ticket:
        """Blocks and a place at the receiver. Raises KvferryError (OVERLOADED, and as `Engine.reserve`)."""
        seq = job.admit.sequence
        allocation = self._engine.reserve(seq)
        if allocation is None:
            raise KvferryError(
                ErrorCode.OVERLOADED, "no KV blocks or slots are free for this request", retry_after_ms=_RETRY_AFTER_MS
            )
        first = allocation.cached_blocks
        job.cached_tokens = min(first * self._engine.block_manager.block_size, seq.num_tokens)
        prompt_blocks = -(-seq.num_tokens // self._engine.block_manager.block_size)
        blocks = allocation.block_table[first:prompt_blocks]
        try:
            ticket = self._receiver.reserve(job.admit.request_id, job.admit.attempt, first, blocks, seq.num_tokens)
        except BaseException:
            self._engine.cancel(seq.seq_id)
            raise
        job.handoff_id = ticket.handoff_id
        self._seq_of[ticket.handoff_id] = seq.seq_id
        return ticket

    # ---- the hand-off --------------------------------------------------------------------------------------------

    def _on_committed(self, event: Committed) -> None:
        self._committed += 1
        self._bytes_received += event.stats.size_bytes
        self._receiver.release(event.handoff_id)
        seq_id = self._seq_of.pop(event.handoff_id, None)
        if seq_id is None:
            self._release_quarantine(event.handoff_id)
            return
        job = self._jobs[seq_id]
        job.handoff_id, job.commit, job.started_at = None, event, self._clock.now()
        seq = job.admit.sequence
        try:
            first = token_sample(common_pb2.TokenOutput.FromString(event.record.first_token))
            if first.token_id >= self._vocab_size:
                raise ValueError(f"token {first.token_id} is outside the vocabulary")
            output = self._engine.admit_received(seq, event.record.num_tokens, first)
        except (ValueError, DecodeError) as error:  # its blocks verified, but the record makes no sense
            self._stop(seq_id, KvferryError(ErrorCode.HANDOFF_FAILED, f"the commit record is not usable: {error}"))
            return
        if output is not None:
            self._emit(job, DecodeEvent(verified=verified_half(job.cached_tokens, event.stats)))
            self._on_output(output)

    def _on_handoff_failed(self, event: Failed) -> None:
        seq_id = self._seq_of.pop(event.handoff_id, None)
        if seq_id is None:
            return  # the answer to our own abort
        self._failed += 1
        job = self._jobs.pop(seq_id)
        self._trace(job, event.error.code_name)
        self._quarantines[event.handoff_id] = self._engine.abort_received(job.admit.sequence)
        self._say_failed(job, event.error)

    def _release_quarantine(self, handoff_id: str) -> None:
        quarantine_id = self._quarantines.pop(handoff_id, None)
        if quarantine_id is not None:
            self._engine.release_quarantine(quarantine_id)

    # ---- leaving in the middle -----------------------------------------------------------------------------------

    def _prepare_to_leave(self, command: PauseRequest | HandOverRequest) -> None:
        """Stand still, or leave; if that cannot be, say so and go on."""
        job = self._jobs.get(command.seq_id)
        if job is None:
            return  # it has ended, and the router was told
        if isinstance(command, PauseRequest):
            if (refusal := self._hand_overs.pause(job.admit.sequence)) is None:
                self._emit(job, DecodeEvent(paused=internal_pb2.Paused()))
        else:
            refusal = self._hand_overs.begin(job.admit.sequence, command.ticket, job.admit.deadline)
            if refusal is None:
                self._leaving[command.ticket.handoff_id] = self._jobs.pop(command.seq_id)
        if refusal is not None:
            self._emit(job, DecodeEvent(resumed=refusal.to_proto()))

    def _on_send_event(self, event: SendEvent) -> None:
        if event.handoff_id not in self._hand_overs:
            self._exporter.handle(event)
            return
        end = self._hand_overs.handle(event)
        job = self._leaving.pop(event.handoff_id, None)
        if job is None or end is None:
            return
        self._trace(job, end.code_name if isinstance(end, KvferryError) else "handed_over")
        if isinstance(end, KvferryError):
            self._emit(job, DecodeEvent(failed=end.to_proto()))
        else:
            self._emit(job, DecodeEvent(handed_over=end))

    # ---- one step: schedule, run, publish ------------------------------------------------------------------------

    def step(self) -> bool:
        """A token or more for each running sequence, and a chunk of what is computed here."""
        schedule = self._engine.schedule(self._hand_overs.paused)
        if not schedule:
            return False
        now = self._clock.now()
        for item in schedule.items:
            job = self._jobs[item.seq.seq_id]
            if job.started_at is None:
                job.started_at = now
                job.cached_tokens = item.seq.num_cached_tokens
        result = self._engine.run(schedule)
        for output in self._engine.publish(schedule, result):
            self._on_output(output)
        self._flush()
        return True

    def _on_output(self, output: SequenceOutput) -> None:
        seq = output.seq
        job = self._jobs[seq.seq_id]
        for scored in prompt_logprobs(output.prompt_logprobs):
            self._emit(job, DecodeEvent(prompt_logprobs=scored))
        if output.samples:
            first = seq.num_output_tokens - len(output.samples)
            tokens = [token_output(index, sample) for index, sample in enumerate(output.samples, first)]
            self._emit(job, DecodeEvent(tokens=internal_pb2.Tokens(tokens=tokens)))
        if output.finish_reason is None:
            return
        del self._jobs[seq.seq_id]
        self._hand_overs.resume(seq.seq_id)
        self._trace(job, output.error.code_name if output.error else output.finish_reason.name.lower())
        if output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._emit(job, DecodeEvent(done=self._receipt_half(job, output.finish_reason)))
        else:
            error = output.error or KvferryError(ErrorCode.INTERNAL, "the sequence ended without a reason")
            self._emit(job, DecodeEvent(failed=error.to_proto()))

    def _receipt_half(self, job: Job, reason: FinishReason) -> internal_pb2.DecodeDone:
        decode_ms = (self._clock.now() - (job.started_at or self._clock.now())) * 1e3
        return decode_half(job.admit.sequence, job.cached_tokens, job.commit, reason, decode_ms)

    # ---- the ways out --------------------------------------------------------------------------------------------

    def _stop(self, seq_id: str, error: KvferryError | None) -> None:
        """End a request early, with an answer if somebody listens. Idempotent."""
        job = self._jobs.pop(seq_id, None)
        if job is None:
            return
        self._trace(job, error.code_name if error else "cancelled")
        self._hand_overs.resume(seq_id)
        if job.handoff_id is None:
            self._engine.cancel(seq_id)
        else:
            # The blocks are the remote writer's until Fenced; or until Committed, if that is already on its way.
            del self._seq_of[job.handoff_id]
            self._quarantines[job.handoff_id] = self._engine.abort_received(job.admit.sequence)
            self._receiver.abort(job.handoff_id, error.log_text if error else "cancelled by the router")
        if error is not None:
            self._say_failed(job, error)

    def _say_failed(self, job: Job, error: KvferryError) -> None:
        extra = {"request_id": job.admit.request_id}
        _log.info("given up: %s", error.log_text, extra=extra)
        self._emit(job, DecodeEvent(failed=error.to_proto()))

    def _emit(self, job: Job, event: DecodeEvent) -> None:
        """Tell the router; whose request it is, is filled in here."""
        event.request_id, event.attempt = job.admit.request_id, job.admit.attempt
        self._outbox.setdefault(job.admit.session_id, (job.admit.emit, []))[1].append(event)

    def _trace(self, job: Job, end: str) -> None:
        if self._tracer is not None and job.admit.trace is not None:
            self._tracer.emit(job.spans(job.admit.trace, self._tracer.process, end, self._clock.now()))

    def _flush(self) -> None:
        outbox, self._outbox = self._outbox, {}
        for emit, events in outbox.values():
            emit(events)

    # ---- timers and views ----------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Deadlines; news of the prefix cache; and the books, whenever everything has come to rest."""
        publish_cache_changes(self._engine.block_manager, self._log)
        for seq_id, job in list(self._jobs.items()):
            if now >= job.admit.deadline:
                self._stop(
                    seq_id, KvferryError(ErrorCode.DEADLINE_EXCEEDED, "the deadline passed on the decode worker")
                )
        self._flush()
        if not self._audited and not self._jobs and not self._quarantines and not (self._exporter or self._hand_overs):
            self._engine.check_integrity()
            self._audited = True

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

    @property
    def has_timers(self) -> bool:
        return bool(self._jobs)

    def view(self) -> DecodeView:
        return DecodeView(self._engine.load(), self._committed, self._failed, self._bytes_received)

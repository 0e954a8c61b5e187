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

With `local_prefill` there is no ticket: the prompt is computed here, and 4 follows. What stays in the prefix cache can
be sent back to a prefill worker later (`export.py`).

Failure exits: refused at the door (nothing held); hand-off failed or its lease ran out; cancelled, past its deadline,
or the session closed. All of them go through `_stop`; blocks that a remote side may still write wait for `Fenced`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

from google.protobuf.message import DecodeError

from decode_worker.export import Exporter, ExportRequest
from engine.engine import Engine, EngineLoad, SequenceOutput
from engine.sequence import FinishReason, Sequence
from engine.wire import finish_reason, publish_cache_changes, token_output, token_sample
from kv_transfer.events import Committed, Failed, Fenced, ReceiveStats, SendEvent
from kv_transfer.receiver import HandoffReceiver
from kvferry_rpc import common_pb2, internal_pb2
from runtime.clock import Clock
from runtime.errors import ErrorCode, KvferryError
from runtime.kv_event_log import KVEventLog

Emit = Callable[[list[internal_pb2.DecodeEvent]], None]

_RETRY_AFTER_MS = 200


@dataclass(frozen=True, slots=True)
class AdmitRequest:
    """A request of a session, checked by the server; its sequence has the name that `sequence_id` gives it. `emit`
    takes the session's events of one step; it is called on the owner thread and must not block. Times are on the
    worker's clock, in seconds."""

    session_id: int
    request_id: str
    attempt: int
    sequence: Sequence
    local_prefill: bool
    deadline: float
    emit: Emit


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
    """News of what this worker sends: an export. (A bare `Failed` is about what it receives.)"""

    event: SendEvent


def sequence_id(session_id: int, request_id: str, attempt: int) -> str:
    """Name of an attempt's sequence. Routers choose request ids without knowing of each other: none can touch, or
    stand in the way of, what another one has admitted under the same id."""
    return f"{session_id}/{request_id}/{attempt}"


Command = AdmitRequest | CancelRequest | SessionClosed | Committed | Failed | Fenced | ExportRequest | ExportEvent


@dataclass(frozen=True, slots=True)
class DecodeView:
    """A frozen view for other threads; totals count from the start."""

    load: EngineLoad
    handoffs_committed: int
    handoffs_failed: int
    bytes_received: int


@dataclass(slots=True)
class _Job:
    """One request from `AdmitRequest` to its last event."""

    admit: AdmitRequest
    cached_tokens: int = 0
    handoff_id: str | None = None  # while RECEIVING
    commit: Committed | None = None
    started_at: float | None = None


class DecodeWorker:
    """Handler of the engine loop. Every method belongs to the owner thread."""

    def __init__(
        self,
        engine: Engine,
        receiver: HandoffReceiver,
        exporter: Exporter,
        vocab_size: int,
        log: KVEventLog,
        clock: Clock,
    ) -> None:
        self._engine = engine
        self._exporter = exporter
        self._vocab_size = vocab_size
        self._receiver = receiver
        self._log = log
        self._clock = clock
        self._jobs: dict[str, _Job] = {}  # by sequence
        self._seq_of: dict[str, str] = {}  # by open hand-off
        self._quarantines: dict[str, int | None] = {}  # by hand-off, until Fenced
        self._outbox: dict[int, tuple[Emit, list[internal_pb2.DecodeEvent]]] = {}
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
                self._exporter.handle(command.event)
            case _:
                assert_never(command)
        self._flush()

    def _admit(self, admit: AdmitRequest) -> None:
        seq = admit.sequence
        job = _Job(admit)
        try:
            if admit.local_prefill:
                self._engine.add(seq)
            else:
                self._emit(job, ticket=self._reserve(job))
        except KvferryError as error:
            self._emit(job, failed=error.to_proto())
            return
        self._jobs[seq.seq_id] = job
        self._audited = False

    def _reserve(self, job: _Job) -> internal_pb2.Ticket:
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
            self._emit(job, verified=_verified(job.cached_tokens, event.stats))
            self._on_output(output)

    def _on_handoff_failed(self, event: Failed) -> None:
        seq_id = self._seq_of.pop(event.handoff_id, None)
        if seq_id is None:
            return  # the answer to our own abort
        self._failed += 1
        job = self._jobs.pop(seq_id)
        self._quarantines[event.handoff_id] = self._engine.abort_received(job.admit.sequence)
        self._emit(job, failed=event.error.to_proto())

    def _release_quarantine(self, handoff_id: str) -> None:
        quarantine_id = self._quarantines.pop(handoff_id, None)
        if quarantine_id is not None:
            self._engine.release_quarantine(quarantine_id)

    # ---- one step: schedule, run, publish ------------------------------------------------------------------------

    def step(self) -> bool:
        """A token or more for each running sequence, and a chunk of what is computed here."""
        schedule = self._engine.schedule()
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
        if output.samples:
            first = seq.num_output_tokens - len(output.samples)
            tokens = [token_output(index, sample) for index, sample in enumerate(output.samples, first)]
            self._emit(job, tokens=internal_pb2.Tokens(tokens=tokens))
        if output.finish_reason is None:
            return
        del self._jobs[seq.seq_id]
        if output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._emit(job, done=self._receipt_half(job, output.finish_reason))
        else:
            error = output.error or KvferryError(ErrorCode.INTERNAL, "the sequence ended without a reason")
            self._emit(job, failed=error.to_proto())

    def _receipt_half(self, job: _Job, reason: FinishReason) -> internal_pb2.DecodeDone:
        seq, commit = job.admit.sequence, job.commit
        done = internal_pb2.DecodeDone(
            reason=finish_reason(reason),
            cached_tokens=job.cached_tokens,
            preempted_tokens=seq.preempted_tokens,
            decode_ms=(self._clock.now() - (job.started_at or self._clock.now())) * 1e3,
        )
        if commit is not None:
            done.tokens_recomputed = seq.arrival_tokens_computed
            done.checksum_verified = commit.stats.verified
            done.checksum = commit.stats.digest
            done.commit_ms = _commit_ms(commit.stats)
        return done

    # ---- the ways out --------------------------------------------------------------------------------------------

    def _stop(self, seq_id: str, error: KvferryError | None) -> None:
        """End a request early, with an answer if somebody listens. Idempotent."""
        job = self._jobs.pop(seq_id, None)
        if job is None:
            return
        if job.handoff_id is None:
            self._engine.cancel(seq_id)
        else:
            # The blocks are the remote writer's until Fenced; or until Committed, if that is already on its way.
            del self._seq_of[job.handoff_id]
            self._quarantines[job.handoff_id] = self._engine.abort_received(job.admit.sequence)
            self._receiver.abort(job.handoff_id, error.message if error else "cancelled by the router")
        if error is not None:
            self._emit(job, failed=error.to_proto())

    def _emit(
        self,
        job: _Job,
        *,
        ticket: internal_pb2.Ticket | None = None,
        verified: internal_pb2.HandoffVerified | None = None,
        tokens: internal_pb2.Tokens | None = None,
        done: internal_pb2.DecodeDone | None = None,
        failed: common_pb2.Error | None = None,
    ) -> None:
        event = internal_pb2.DecodeEvent(
            request_id=job.admit.request_id,
            attempt=job.admit.attempt,
            ticket=ticket,
            verified=verified,
            tokens=tokens,
            done=done,
            failed=failed,
        )
        self._outbox.setdefault(job.admit.session_id, (job.admit.emit, []))[1].append(event)

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
        if not self._audited and not self._jobs and not self._quarantines and not self._exporter:
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


def _verified(cached_tokens: int, stats: ReceiveStats) -> internal_pb2.HandoffVerified:
    return internal_pb2.HandoffVerified(
        cached_tokens=cached_tokens,
        checksum_verified=stats.verified,
        checksum=stats.digest,
        commit_ms=_commit_ms(stats),
        transport=stats.transport,
    )


def _commit_ms(stats: ReceiveStats) -> float:
    """Pages are fingerprinted as they land, so what is left to the end is the commit: from the last of them on."""
    if stats.last_write_at is None:
        return 0.0
    return (stats.verified_at - stats.last_write_at) * 1e3

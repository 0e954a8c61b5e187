"""The prefill worker's step, on the engine's owner thread.

Life of a request here:

1. `Submit` comes from the server with its ticket. The hand-off is opened at once, so its lease is renewed while the
   request waits. If a decode worker holds more of the prompt's KV than is cached here, the request first waits,
   for a bounded time, for that to be pulled (`pull.py`); with a grammar, it waits for that to be compiled.
2. The scheduler admits it when blocks for the whole prompt are free; a cached prefix is pinned, not computed.
3. Each step computes a chunk. As soon as a layer of the chunk is stored, its complete blocks are pushed: they travel
   while the next layer is computed. A sequence whose link is too far behind is left out of the step, so that a slow
   link slows down its own prompts and nothing piles up.
4. The last chunk gives the first token. It goes to the router at once, and into the commit record.
5. `Sent`: the decode worker has verified the blocks. The router gets this half of the receipt, straight from the
   sender's thread: a step can take seconds, and the end of somebody's answer must not wait for it.
6. `Drained`: no thread reads the local blocks any more. Only now can they be overwritten.

Failure exits: refused at the door (typed error, nothing held); cancelled, past its deadline, or failed on the way
(hand-off aborted, blocks in quarantine until `Drained`). All of them go through `_stop`.
"""

import logging
from dataclasses import dataclass
from typing import assert_never

from engine.engine import Engine, EngineLoad, SequenceOutput
from engine.scheduler import Schedule
from engine.sequence import TokenConstraint
from engine.wire import prompt_logprobs, publish_cache_changes, token_output
from kv_transfer.events import CommitRecord, Drained, Failed, ReceiveEvent, SendEvent, SendStats, Sent
from kv_transfer.sender import HandoffSender
from kvferry_rpc import internal_pb2
from prefill_worker.job import Job, Submit
from prefill_worker.pull import Puller
from prefill_worker.receipt import prefill_half
from runtime.clock import Clock
from runtime.errors import ErrorCode, KvferryError, invalid
from runtime.kv_event_log import KVEventLog
from runtime.tracing import Tracer

_MAX_HANDOFF_ID_CHARS = 256

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Constrain:
    """What a request that `awaits_constraint` waits for: it, or why there is none."""

    submit: Submit
    outcome: TokenConstraint | KvferryError


@dataclass(frozen=True, slots=True)
class Cancel:
    """The router cancelled, or its call broke: nobody listens to this request any more. It names the call, not the
    hand-off: a second call with the same ticket must not end the first."""

    submit: Submit


@dataclass(frozen=True, slots=True)
class PullEvent:
    """News of what this worker receives: a pull. (A bare `SendEvent` is about what it sends.)"""

    event: ReceiveEvent


@dataclass(frozen=True, slots=True)
class Nudge:
    """A link has caught up: what was held back for it may go on."""


Command = Submit | Constrain | Cancel | SendEvent | PullEvent | Nudge


@dataclass(frozen=True, slots=True)
class PrefillView:
    """A frozen view for other threads; totals count from the start."""

    load: EngineLoad
    handoffs_committed: int
    handoffs_failed: int
    bytes_moved: int


class PrefillWorker:
    """Handler of the engine loop. Every method but `report_sent` belongs to the owner thread."""

    def __init__(
        self,
        engine: Engine,
        sender: HandoffSender,
        puller: Puller,
        num_layers: int,
        log: KVEventLog,
        clock: Clock,
        tracer: Tracer | None = None,
    ) -> None:
        """Without `tracer` no request is traced."""
        self._engine = engine
        self._sender = sender
        self._puller = puller
        self._layers = range(num_layers)
        self._block_size = engine.block_manager.block_size
        self._log = log
        self._clock = clock
        self._tracer = tracer
        self._jobs: dict[str, Job] = {}  # by hand-off, which is also the name of the sequence
        # Jobs whose router waits for its last word. Whoever takes a job out, the owner thread or a sender's, has the
        # right to that word: a dict's single operations are atomic, so it is said once.
        self._unanswered: dict[str, Job] = {}
        self._audited = True
        self._sent = self._failed = self._bytes_sent = 0

    # ---- commands ------------------------------------------------------------------------------------------------

    def handle(self, command: Command) -> None:
        """Carry out one command; what is wrong with a request is answered, never raised."""
        match command:
            case Submit():
                self._submit(command)
            case Constrain():
                self._on_constraint(command)
            case Cancel():
                self._on_cancel(command.submit)
            case Sent():
                self._on_sent(command)
            case Failed():
                self._on_failed(command)
            case Drained():
                self._on_drained(command.handoff_id)
            case PullEvent():
                self._puller.handle(command.event)
            case Nudge():
                pass  # to be awake is all it takes
            case _:
                assert_never(command)

    def _submit(self, submit: Submit) -> None:
        seq, ticket = submit.sequence, submit.ticket
        try:
            self._check_ticket(submit)
            self._engine.add(seq)
            try:
                self._sender.open(ticket, seq.num_tokens, submit.deadline)
            except BaseException:
                self._engine.cancel(seq.seq_id)
                raise
        except (KvferryError, ValueError) as error:
            self._answer(submit, error if isinstance(error, KvferryError) else invalid("ticket", str(error)))
            return
        job = self._jobs[ticket.handoff_id] = self._unanswered[ticket.handoff_id] = Job(
            submit, awaits_constraint=submit.awaits_constraint
        )
        self._audited = False
        # Whose prompt is to be scored computes all of it, whatever is cached.
        if submit.source is not None and seq.prompt_logprobs is None:
            job.pull = self._puller.begin(seq, submit.source, submit.deadline, submit.request_id)
            if job.pull is not None:
                submit.reply(internal_pb2.PrefillEvent(pull=job.pull.ticket))

    def _on_constraint(self, command: Constrain) -> None:
        handoff_id = command.submit.ticket.handoff_id
        job = self._jobs.get(handoff_id)
        if job is None or job.submit is not command.submit:
            return
        if isinstance(command.outcome, KvferryError):
            self._stop(handoff_id, command.outcome)
            return
        job.submit.sequence.constraint = command.outcome
        job.awaits_constraint = False

    def _check_ticket(self, submit: Submit) -> None:
        """Raises KvferryError for a ticket that does not fit the prompt, before anything is held for it."""
        ticket, block_size = submit.ticket, submit.ticket.layout.block_size  # the decode worker's, not ours
        if not 1 <= len(ticket.handoff_id) <= _MAX_HANDOFF_ID_CHARS:
            raise invalid("ticket", f"its hand-off id must have 1 to {_MAX_HANDOFF_ID_CHARS} characters")
        if ticket.handoff_id in self._jobs:
            raise invalid("ticket", f"{ticket.handoff_id} is in use")
        if block_size < 1:
            raise invalid("ticket", "does not say how large its blocks are")
        num_blocks = -(-submit.sequence.num_tokens // block_size)
        if ticket.first_block + len(ticket.block_ids) != num_blocks:
            raise invalid("ticket", f"does not hold the {num_blocks} blocks of the prompt")

    # ---- one step: schedule, run, publish ------------------------------------------------------------------------

    def step(self) -> bool:
        """Compute one chunk of what the scheduler chose, pushing each layer as it is stored."""
        schedule = self._engine.schedule(self._held())
        if not schedule:
            return False
        pushes = self._plan_pushes(schedule)
        result = self._engine.run(schedule, on_layer=lambda layer: self._push_layer(pushes, layer))
        for output in self._engine.publish(schedule, result):
            self._on_output(output)
        return True

    def _held(self) -> set[str]:
        """Sequences that wait for a pull or a grammar, or whose link is too far behind."""
        return {
            handoff_id
            for handoff_id, job in self._jobs.items()
            if job.awaits_constraint
            or (job.pull is not None and job.pull.is_open)
            or not self._sender.may_push(handoff_id)
        }

    def _plan_pushes(self, schedule: Schedule) -> list[tuple[str, int, tuple[int, ...]]]:
        """(hand-off, first prompt block, local blocks) that this step completes. Cached blocks go out right here."""
        pushes = []
        for item in schedule.items:
            handoff_id = item.seq.seq_id
            job = self._jobs[handoff_id]
            if job.started_at is None:
                job.started_at = self._clock.now()
                cached = item.start // self._block_size
                if cached:
                    self._sender.push(handoff_id, 0, tuple(item.block_table[:cached]), self._layers)
            first = item.start // self._block_size
            # A block that the next chunk goes on filling is sent then; the last, partly filled one now.
            end = -(-item.end // self._block_size) if item.samples else item.end // self._block_size
            if end > first:
                pushes.append((handoff_id, first, tuple(item.block_table[first:end])))
        return pushes

    def _push_layer(self, pushes: list[tuple[str, int, tuple[int, ...]]], layer: int) -> None:
        for handoff_id, first, blocks in pushes:
            self._sender.push(handoff_id, first, blocks, range(layer, layer + 1))

    def _on_output(self, output: SequenceOutput) -> None:
        seq = output.seq
        handoff_id, job = seq.seq_id, self._jobs[seq.seq_id]
        for scored in prompt_logprobs(output.prompt_logprobs):
            job.submit.reply(internal_pb2.PrefillEvent(prompt_logprobs=scored))
        if output.finish_reason is None:
            return
        if not output.samples:
            error = output.error or KvferryError(ErrorCode.INTERNAL, "no token was sampled")
            self._stop(handoff_id, error)
            return
        token = token_output(seq.num_output_tokens - 1, output.samples[0])
        job.sampled_at = self._clock.now()
        job.quarantine_id = self._engine.quarantine(seq.seq_id)
        # Before the commit: `report_sent` may follow it at once, on another thread, and its word is the last.
        job.submit.reply(internal_pb2.PrefillEvent(first_token=token))
        self._sender.commit(handoff_id, CommitRecord(seq.num_arrival_tokens, token.SerializeToString()))

    # ---- the ways out --------------------------------------------------------------------------------------------

    def report_sent(self, event: Sent) -> None:
        """Give the router this half of the receipt. Called by the sender's threads, before the event is handled."""
        job = self._unanswered.pop(event.handoff_id, None)
        if job is not None:
            job.submit.reply(internal_pb2.PrefillEvent(done=prefill_half(job, event.stats)))
            self._trace(job, event.stats)

    def _on_sent(self, event: Sent) -> None:
        self._sent += 1
        self._bytes_sent += event.stats.size_bytes

    def _on_failed(self, event: Failed) -> None:
        self._failed += event.handoff_id in self._unanswered  # otherwise it is the answer to our own abort
        self._stop(event.handoff_id, event.error)

    def _on_cancel(self, submit: Submit) -> None:
        job = self._jobs.get(submit.ticket.handoff_id)
        if job is not None and job.submit is submit:
            self._stop(submit.ticket.handoff_id, None)

    def _stop(self, handoff_id: str, error: KvferryError | None) -> None:
        """End a request early: no more compute, no more writes, an answer if somebody listens. Idempotent."""
        job = self._jobs.get(handoff_id)
        if job is None:
            return
        quarantine_id = self._engine.cancel(job.submit.sequence.seq_id, quarantine=True)
        if quarantine_id is not None:
            job.quarantine_id = quarantine_id
        if job.pull is not None:
            self._puller.give_up(job.pull)
        self._sender.abort(handoff_id, error.log_text if error else "cancelled by the router")
        if self._unanswered.pop(handoff_id, None) is not None:
            self._trace(job, None, error.code_name if error else "cancelled")
            if error is not None:
                extra = {"request_id": job.submit.request_id}
                _log.info("given up: %s", error.log_text, extra=extra)
                self._answer(job.submit, error)

    def _on_drained(self, handoff_id: str) -> None:
        job = self._jobs.pop(handoff_id)
        if job.quarantine_id is not None:
            self._engine.release_quarantine(job.quarantine_id)

    def _answer(self, submit: Submit, error: KvferryError) -> None:
        submit.reply(internal_pb2.PrefillEvent(error=error.to_proto()))

    def _trace(self, job: Job, stats: SendStats | None, error: str = "") -> None:
        """Called once for each job, by whoever says its last word."""
        if self._tracer is not None and job.submit.trace is not None:
            self._tracer.emit(job.spans(job.submit.trace, self._tracer.process, stats, error, self._clock.now()))

    # ---- timers and views ----------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Deadlines; news of the prefix cache; and the books, whenever everything has come to rest."""
        publish_cache_changes(self._engine.block_manager, self._log)
        for handoff_id, job in list(self._jobs.items()):
            if now >= job.submit.deadline and handoff_id in self._unanswered:
                self._stop(handoff_id, KvferryError(ErrorCode.DEADLINE_EXCEEDED, "the deadline passed during prefill"))
        self._puller.tick(now)
        if not self._audited and not self._jobs and not self._puller:
            self._engine.check_integrity()
            self._audited = True

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

    @property
    def has_timers(self) -> bool:
        return bool(self._jobs or self._puller)

    def view(self) -> PrefillView:
        return PrefillView(self._engine.load(), self._sent, self._failed, self._bytes_sent)

"""The engine of a worker: sequences in, sampled tokens out. Everything here belongs to one owner thread.

    schedule = engine.schedule()                    which tokens; may preempt and admit
    result = engine.run(schedule, on_layer=hook)    compute and sample
    outputs = engine.publish(schedule, result)      new tokens and endings; full blocks become shareable

Life of a sequence:

1. computed here:   add -> (steps) -> publish reports its end and its blocks are free again
2. hand-off, decode side:   reserve -> its blocks are filled by a remote writer -> admit_received -> (steps)
                                    \\-> abort_received: quarantine until no remote writer can touch them
3. hand-off, prefill side (`prefill_only`):   add -> (steps) -> first token -> finish, or quarantine until sent
4. handed over while it decodes:   1 or 2 -> hand_over -> quarantine until sent

`cancel` ends it in any state. Every way out goes through `_release`, once.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from engine.model_runner import LayerHook, RowResult, Runner
from engine.prefix_holds import PoolCopies, PrefixHolds
from engine.prompt_logprobs import PromptToken
from engine.scheduler import Schedule, ScheduledSequence, Scheduler, SchedulerConfig
from engine.sequence import FinishReason, Sequence, SequenceStatus, TokenSample
from kv_cache.block_hash import BlockHasher
from kv_cache.block_manager import Allocation, BlockManager, IntegrityError, PoolUsage
from kvferry_rpc.common_pb2 import ErrorCode
from runtime.errors import KvferryError, invalid


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """What one step did for one sequence: tokens (several where guesses were right), an end, or both; and the next log
    probabilities of its prompt, if it wants them, which come before its first token.

    `finish_reason` None = it goes on. `error` is set exactly when the reason is FAILED; there is nothing else then.
    """

    seq: Sequence
    samples: tuple[TokenSample, ...]
    finish_reason: FinishReason | None = None
    error: KvferryError | None = None
    prompt_logprobs: tuple[PromptToken, ...] = ()


@dataclass(frozen=True, slots=True)
class LeftBlocks:
    """Where the KV of a sequence lies that has left: nobody overwrites it before its quarantine is released."""

    block_table: tuple[int, ...]
    quarantine_id: int


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What the engine is doing; may be handed to other threads. Totals count from the start of the engine."""

    blocks: PoolUsage
    num_running: int
    num_waiting: int
    num_receiving: int
    tokens_waiting: int  # to compute before each sequence, running or waiting, has its next token; receiving left out
    steps: int
    preemptions: int
    prompt_tokens_computed: int  # counted once each: what a preemption makes compute again is left out
    tokens_generated: int
    drafted_tokens: int = 0  # guessed ahead and computed
    accepted_tokens: int = 0  # of those: right, and part of a text

    @property
    def is_at_rest(self) -> bool:
        """Whether no sequence was known, and no block in use or in quarantine."""
        return self.blocks.available == self.blocks.total and not (
            self.num_running or self.num_waiting or self.num_receiving
        )


class Engine:
    """Scheduler, pool and model of one worker. Not thread-safe: EngineLoop gives it an owner thread."""

    def __init__(
        self,
        config: SchedulerConfig,
        block_manager: BlockManager,
        hasher: BlockHasher,
        runner: Runner,
        copies: PoolCopies | None = None,
    ) -> None:
        """`copies`: between the runner's pool and the one that hand-offs see; None where these are one."""
        self.block_manager = block_manager
        self.prefix_holds = PrefixHolds(block_manager, hasher, copies)
        self._copies = copies
        self._config = config
        self._scheduler = Scheduler(config, block_manager, hasher)
        self._runner = runner
        self._sequences: dict[str, Sequence] = {}
        self._quarantines: set[int] = set()
        self._step_open = False
        self._steps = 0
        self._prompt_tokens_computed = 0
        self._tokens_generated = 0
        self._drafted_tokens = 0
        self._accepted_tokens = 0

    # ---- sequences in --------------------------------------------------------------------------------------------

    def add(self, seq: Sequence) -> None:
        """Queue a sequence to be computed here, from the longest cached prefix on.

        Raises KvferryError: INVALID_REQUEST or CONTEXT_LENGTH_EXCEEDED for a sequence that could never finish here,
        OVERLOADED when the queue is full.
        """
        self._check(seq)
        if not self._scheduler.add(seq):
            raise KvferryError(
                ErrorCode.OVERLOADED, f"{self._config.max_waiting} sequences are waiting already", retry_after_ms=1000
            )
        self._sequences[seq.seq_id] = seq

    def reserve(self, seq: Sequence) -> Allocation | None:
        """Reserve blocks for a sequence whose KV a hand-off brings: all its tokens and the first generated one.

        The first `cached_blocks` of the block table are valid already (maybe all full blocks of the prompt) and may
        be in use by others: nobody may write them. The sequence is RECEIVING. None = no room now, nothing changed.
        Raises KvferryError as `add` does, and RuntimeError between `schedule` and `publish`.
        """
        self._check(seq)
        if self._step_open:
            raise RuntimeError("reserve between schedule and publish: the step may still write to freed blocks")
        allocation = self._scheduler.reserve(seq)
        if allocation is not None:
            # Whoever computes the prompt tells of it. If this engine has to compute it again, nobody wants it twice.
            seq.prompt_logprobs = None
            self._sequences[seq.seq_id] = seq
        return allocation

    def admit_received(self, seq: Sequence, num_computed_tokens: int, first: TokenSample) -> SequenceOutput | None:
        """The KV of a RECEIVING sequence is complete and verified up to `num_computed_tokens`, and `first` follows.

        Its full blocks may be shared from now on, and it runs; the first token may already end it. None = it was
        cancelled before: nothing changed. Raises ValueError unless every token at arrival is covered.
        """
        if self._sequences.get(seq.seq_id) is not seq or seq.status is not SequenceStatus.RECEIVING:
            return None
        if num_computed_tokens != seq.num_tokens:
            raise ValueError(f"{seq.seq_id}: KV of {num_computed_tokens} tokens received, {seq.num_tokens} expected")
        if self._copies is not None:
            self._copies.to_device(seq.block_table[seq.num_stored_blocks :])
        self._scheduler.admit_received(seq, num_computed_tokens)
        output = self._append(seq, (first,))
        if output.finish_reason is not None:
            self._end(seq, output.finish_reason)
        return output

    # ---- sequences out -------------------------------------------------------------------------------------------

    def abort_received(self, seq: Sequence) -> int | None:
        """The hand-off of a RECEIVING sequence failed. Its blocks stay untouchable until `release_quarantine`."""
        return self.cancel(seq.seq_id, quarantine=True)

    def cancel(self, seq_id: str, *, quarantine: bool = False) -> int | None:
        """End a sequence in any state; one that is unknown or ended already is left alone (None).

        With `quarantine` its blocks stay untouchable until `release_quarantine(id)` of the id returned (None when it
        held no blocks); otherwise they can be reused at once.
        """
        return self._release(seq_id, FinishReason.CANCELLED, quarantine)

    def finish(self, seq_id: str) -> None:
        """`prefill_only`: a sequence that `publish` reported is done with, and so are its blocks. Idempotent."""
        self._release(seq_id, FinishReason.CANCELLED, quarantine=False)

    def quarantine(self, seq_id: str) -> int | None:
        """`prefill_only`: a sequence that `publish` reported is done with, but its blocks are still being sent.

        They can be matched by others, but not overwritten before `release_quarantine(id)` of the id returned.
        None = there is no such sequence (any more).
        """
        return self._release(seq_id, FinishReason.CANCELLED, quarantine=True)

    def can_hand_over(self, seq: Sequence) -> bool:
        """Whether the sequence runs here with the KV of every token but the last one, a generated one."""
        is_here = self._sequences.get(seq.seq_id) is seq and seq.status is SequenceStatus.RUNNING
        return is_here and bool(seq.samples) and seq.num_tokens_to_compute == 1 and not self._step_open

    def hand_over(self, seq: Sequence) -> LeftBlocks:
        """A sequence that `can_hand_over` ends here. Its KV, of every token but the last, is going to be sent.

        Raises ValueError for one that cannot be handed over now.
        """
        if not self.can_hand_over(seq):
            raise ValueError(f"sequence {seq.seq_id} cannot be handed over")
        num_blocks = -(-seq.num_computed_tokens // self.block_manager.block_size)
        block_table = tuple(seq.block_table[:num_blocks])
        if self._copies is not None:
            self._copies.to_host(block_table)
        quarantine_id = self._release(seq.seq_id, FinishReason.CANCELLED, quarantine=True)
        assert quarantine_id is not None, "a running sequence has blocks"
        return LeftBlocks(block_table, quarantine_id)

    def release_quarantine(self, quarantine_id: int) -> None:
        """No remote side and no sender touches these blocks any more. Raises UnknownQuarantineError if called twice."""
        self.block_manager.release_quarantine(quarantine_id)
        self._quarantines.discard(quarantine_id)

    # ---- one step ------------------------------------------------------------------------------------------------

    def schedule(self, held: Collection[str] = ()) -> Schedule:
        """Plan a step; falsy when there is nothing to compute now. `publish` must follow before the next call.

        `held`: ids of sequences to leave alone in this step; others go on past them.
        """
        if self._step_open:
            raise RuntimeError("schedule before the last step was published")
        schedule = self._scheduler.schedule(held)
        self._step_open = bool(schedule)
        return schedule

    def run(self, schedule: Schedule, on_layer: LayerHook | None = None) -> dict[str, RowResult]:
        """Compute the step and sample. `on_layer(l)`, called from inside, says that the KV of all of the schedule's
        tokens in layer l is in the pool and final; it may cancel sequences. Exceptions are fatal for the engine."""
        return self._runner.run(schedule, on_layer) if schedule else {}

    def publish(self, schedule: Schedule, result: Mapping[str, RowResult]) -> list[SequenceOutput]:
        """Apply the step: tokens appended, full blocks shareable, ended sequences released.

        With `prefill_only` each sequence reported is FINISHED (LENGTH when its first token did not end it otherwise)
        but keeps its blocks: the caller must call `finish`, `quarantine` or `cancel` for it. Sequences cancelled
        during the step are not reported.
        """
        self._step_open = False
        self._steps += bool(schedule)
        outputs = []
        for item in schedule.items:
            # Cancelled during the step, and maybe followed by a namesake: nobody wants what was computed.
            if self._sequences.get(item.seq.seq_id) is item.seq:
                output = self._apply(item, result.get(item.seq.seq_id))
                if output is not None:
                    outputs.append(output)
        for output in outputs:
            if output.finish_reason is not None:
                self._end(output.seq, output.finish_reason)
        return outputs

    # ---- views ---------------------------------------------------------------------------------------------------

    @property
    def pool_tokens(self) -> int:
        """Tokens that the whole pool holds: an upper bound for `max_context_tokens` of a sequence here."""
        return self.block_manager.num_blocks * self.block_manager.block_size

    @property
    def has_work(self) -> bool:
        """Whether a step may have something to compute. Receiving sequences and quarantines don't count."""
        return bool(self._scheduler.running or self._scheduler.waiting)

    @property
    def is_idle(self) -> bool:
        """Whether nothing at all is in flight: no sequence in any state, no quarantine and no held prefix."""
        return not self._sequences and not self._quarantines and not self.prefix_holds

    @property
    def has_room_for_queue(self) -> bool:
        """Whether the pool could take in all sequences that wait, at once."""
        return self.block_manager.can_allocate(self._scheduler.promised_blocks)

    def get(self, seq_id: str) -> Sequence | None:
        """The sequence with this id, if it has not been released."""
        return self._sequences.get(seq_id)

    def usage(self) -> PoolUsage:
        """Blocks by state."""
        return self.block_manager.usage()

    def load(self) -> EngineLoad:
        """A frozen view for other threads."""
        scheduler = self._scheduler
        return EngineLoad(
            blocks=self.usage(),
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_receiving=len(scheduler.receiving),
            tokens_waiting=sum(seq.num_tokens_to_compute for seq in scheduler.running + scheduler.waiting),
            steps=self._steps,
            preemptions=scheduler.preemptions,
            prompt_tokens_computed=self._prompt_tokens_computed,
            tokens_generated=self._tokens_generated,
            drafted_tokens=self._drafted_tokens,
            accepted_tokens=self._accepted_tokens,
        )

    def check_integrity(self) -> None:
        """Audit blocks, queues and statuses. Raises IntegrityError. For idle moments and tests: it costs O(blocks)."""
        self.block_manager.check_integrity()
        scheduler = self._scheduler
        queues = (
            (scheduler.waiting, (SequenceStatus.WAITING, SequenceStatus.PREEMPTED), False),
            (scheduler.running, (SequenceStatus.RUNNING,), True),
            (scheduler.receiving, (SequenceStatus.RECEIVING,), True),
        )
        for queue, statuses, has_table in queues:
            for seq in queue:
                if self._sequences.get(seq.seq_id) is not seq or seq.status not in statuses:
                    raise IntegrityError([f"sequence {seq.seq_id} is queued as {statuses} but is {seq.status.name}"])
                if (seq.seq_id in self.block_manager) is not has_table:
                    raise IntegrityError([f"sequence {seq.seq_id} ({seq.status.name}): block table missing or leaked"])
        usage = self.usage()
        if self.is_idle and usage.available != usage.total:
            raise IntegrityError([f"idle, but blocks are still held: {usage}"])

    # ---- inside --------------------------------------------------------------------------------------------------

    def _check(self, seq: Sequence) -> None:
        if seq.seq_id in self._sequences:
            raise invalid("request_id", f"{seq.seq_id} is being served already")
        if seq.num_output_tokens >= seq.sampling.max_tokens:
            raise invalid("max_tokens", f"({seq.sampling.max_tokens}) is reached before the first token")
        if seq.num_tokens >= seq.max_context_tokens:
            raise KvferryError(
                ErrorCode.CONTEXT_LENGTH_EXCEEDED,
                f"{seq.num_tokens} tokens leave no room in a context of {seq.max_context_tokens}",
                field="prompt",
            )
        if not self._scheduler.fits_alone(seq):
            raise KvferryError(
                ErrorCode.CONTEXT_LENGTH_EXCEEDED,
                f"up to {seq.max_total_tokens} tokens do not fit a KV pool of {self.pool_tokens} tokens",
                field="prompt",
            )

    def _apply(self, item: ScheduledSequence, result: RowResult | None) -> SequenceOutput | None:
        """Append and count what a step gave one sequence; None = nothing that anybody wants to know."""
        seq = item.seq
        if isinstance(result, KvferryError):
            # What a failed sequence computed is not trusted, so it does not enter the prefix cache.
            return SequenceOutput(seq, (), FinishReason.FAILED, result)
        num_new_tokens = item.num_new_tokens - len(item.draft_token_ids)
        output = None
        if result is not None:
            output = self._append(seq, result)
            # Each token but the last was guessed before it was sampled, so its KV is in the pool too.
            num_right = len(output.samples) - 1
            num_new_tokens += num_right
            if item.draft_token_ids:
                self._count_draft(seq, len(item.draft_token_ids), num_right)
        before = seq.arrival_tokens_computed
        self._scheduler.complete(seq, num_new_tokens)
        self._prompt_tokens_computed += seq.arrival_tokens_computed - before
        if seq.prompt_logprobs is not None and (scored := seq.prompt_logprobs.take()):
            output = replace(output or SequenceOutput(seq, ()), prompt_logprobs=scored)
        return output

    def _append(self, seq: Sequence, samples: tuple[TokenSample, ...]) -> SequenceOutput:
        """Append samples up to the one that ends the sequence; what would follow an end is dropped."""
        reason = None
        for count, sample in enumerate(samples, 1):
            reason = seq.append_token(sample)
            if reason is not None:
                samples = samples[:count]
                break
        self._tokens_generated += len(samples)
        if self._config.prefill_only:
            reason = reason or FinishReason.LENGTH
        return SequenceOutput(seq, samples, reason)

    def _count_draft(self, seq: Sequence, num_drafted: int, num_right: int) -> None:
        self._drafted_tokens += num_drafted
        self._accepted_tokens += num_right
        if seq.drafter is not None:
            seq.drafter.learn(num_drafted, num_right)

    def _end(self, seq: Sequence, reason: FinishReason) -> None:
        """The step ended the sequence. On a prefill worker a sender may still read its blocks: they stay."""
        if self._config.prefill_only:
            self._scheduler.remove(seq)
            seq.finish(reason)
        else:
            self._release(seq.seq_id, reason, quarantine=False)

    def _release(self, seq_id: str, reason: FinishReason, quarantine: bool) -> int | None:
        """The one way out: off the queues, terminal state (unless `_end` entered it), blocks back."""
        seq = self._sequences.pop(seq_id, None)
        if seq is None:
            return None
        self._scheduler.remove(seq)
        if seq.status is not SequenceStatus.FINISHED:
            seq.finish(reason)
        if seq_id not in self.block_manager:
            return None
        if not quarantine:
            self.block_manager.free(seq_id)
            return None
        quarantine_id = self.block_manager.quarantine(seq_id)
        self._quarantines.add(quarantine_id)
        return quarantine_id

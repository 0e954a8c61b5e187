"""Which tokens the next step computes. Pure: no clock, no tensors, no threads.

There are no separate phases: a sequence has tokens still to compute, one (it decodes) or many (its prompt, or what a
preemption took away). A step takes, within the token budget:

1. one token of every running sequence that decodes; each may need a block to grow into, and when none is left the
   youngest running sequence is preempted;
2. further chunks of running sequences, oldest first;
3. new sequences in order of arrival, preempted ones first. Blocks for all their tokens are allocated at once, so a
   prompt never waits half-way for blocks;
4. with what is left, guesses of decoding sequences, oldest first (`engine.speculation`). They take free blocks only:
   for a guess nobody is preempted and nothing cached is evicted. What a wrong guess took goes back with the step.

The oldest running sequence is never preempted for another, so something always finishes: no livelock.

A caller may hold sequences back from a step, one whose output cannot leave for example: others go on past them, and a
held sequence keeps its place in the order, and its blocks if it has any, but no slot.
"""

import math
from array import array
from bisect import insort
from collections.abc import Collection
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple

from engine.sequence import Sequence, SequenceStatus
from engine.speculation import Drafter
from kv_cache.block_hash import BlockHasher
from kv_cache.block_manager import Allocation, BlockManager


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Bounds of one step and of the queue. Raises ValueError when they contradict each other.

    `prefill_only`: sequences leave after their first token, so nothing grows and no headroom is kept.
    `headroom`: share of the pool kept free for growth when a sequence is admitted beside running ones; at least
    one block for each of those is kept free too.
    `speculative_tokens`: most tokens that a decoding sequence guesses ahead in one step; 0 = it never does.
    """

    token_budget: int
    max_num_seqs: int
    max_waiting: int
    prefill_only: bool = False
    headroom: float = 0.01
    speculative_tokens: int = 0

    def __post_init__(self) -> None:
        if self.speculative_tokens < 0 or (self.prefill_only and self.speculative_tokens):
            raise ValueError("speculative_tokens must not be negative, and 0 where nothing is decoded")
        if min(self.max_num_seqs, self.max_waiting) < 1:
            raise ValueError("max_num_seqs and max_waiting must be at least 1")
        if self.token_budget < self.max_num_seqs:
            raise ValueError(
                f"token_budget ({self.token_budget}) must be at least max_num_seqs ({self.max_num_seqs}): "
                "every decoding sequence takes one token of each step"
            )
        if not 0.0 <= self.headroom < 1.0:
            raise ValueError(f"headroom must be in [0, 1), not {self.headroom}")


class ScheduledSequence(NamedTuple):
    """`num_new_tokens` tokens from position `start` on: of `seq`, then `draft_token_ids`, guesses of what follows.

    `block_table` covers them and all before them; it is the live one, so it is good until the step is published.
    `samples`: they reach the last token of the sequence, so a token is sampled after it, and after each right guess.
    """

    seq: Sequence
    start: int
    num_new_tokens: int
    samples: bool
    block_table: SequenceOf[int]
    draft_token_ids: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """One past the last position computed."""
        return self.start + self.num_new_tokens


@dataclass(frozen=True, slots=True)
class Schedule:
    """One step. Falsy when there is nothing to compute."""

    items: tuple[ScheduledSequence, ...]
    preempted: tuple[Sequence, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.items)

    @property
    def num_tokens(self) -> int:
        """Tokens to compute."""
        return sum(item.num_new_tokens for item in self.items)


class Scheduler:
    """Queues of sequences over one block manager. Single-threaded; owns `Sequence.status` until FINISHED."""

    def __init__(self, config: SchedulerConfig, block_manager: BlockManager, hasher: BlockHasher) -> None:
        self.config = config
        self.preemptions = 0
        self._block_manager = block_manager
        self._hasher = hasher
        self._block_size = block_manager.block_size
        self._arrivals = 0
        self._waiting: list[Sequence] = []  # PREEMPTED first, then WAITING; each by arrival
        self._running: list[Sequence] = []  # by arrival
        self._receiving: dict[str, Sequence] = {}

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        """Sequences without blocks: PREEMPTED ones, then WAITING ones."""
        return tuple(self._waiting)

    @property
    def running(self) -> tuple[Sequence, ...]:
        """Sequences with blocks and tokens to compute, oldest first."""
        return tuple(self._running)

    @property
    def receiving(self) -> tuple[Sequence, ...]:
        """Sequences whose blocks a hand-off is filling."""
        return tuple(self._receiving.values())

    def fits_alone(self, seq: Sequence) -> bool:
        """Whether the pool, otherwise empty, could hold the sequence to its end."""
        most_tokens = seq.num_tokens if self.config.prefill_only else seq.max_total_tokens
        return self._blocks_for(most_tokens) <= self._block_manager.num_blocks

    def add(self, seq: Sequence) -> bool:
        """Queue a WAITING sequence that `fits_alone`. False when the queue is full: nothing changed."""
        if len(self._waiting) >= self.config.max_waiting:
            return False
        self._number(seq)
        insort(self._waiting, seq, key=_queue_order)
        return True

    def reserve(self, seq: Sequence) -> Allocation | None:
        """Give blocks to a sequence whose KV will be received: all its tokens and the first one it will generate.

        Every full block may be a cached one, for nothing is computed here. None = no room now, nothing changed;
        room that queued sequences need is not given away. The sequence is RECEIVING and is not scheduled.
        """
        if self._slots() <= len(self._waiting):
            return None
        most_cached = seq.num_tokens // self._block_size
        allocation = self._allocate(seq, seq.num_tokens + 1, most_cached, self.promised_blocks)
        if allocation is not None:
            self._number(seq)
            seq.move_to(SequenceStatus.RECEIVING)
            self._receiving[seq.seq_id] = seq
        return allocation

    def admit_received(self, seq: Sequence, num_valid_tokens: int) -> None:
        """A RECEIVING sequence's KV is complete and verified: its full blocks may be shared and it runs."""
        seq.move_to(SequenceStatus.RUNNING)
        del self._receiving[seq.seq_id]
        insort(self._running, seq, key=_arrival)
        seq.start_computing(num_valid_tokens)
        self._store_full_blocks(seq)

    @property
    def promised_blocks(self) -> int:
        """What all waiting sequences would take, if nothing of them were cached."""
        return sum(self._blocks_for(waiting.num_tokens) for waiting in self._waiting)

    def remove(self, seq: Sequence) -> None:
        """Take the sequence out of every queue. Its blocks stay with the block manager: the caller releases them."""
        self._receiving.pop(seq.seq_id, None)
        for queue in (self._waiting, self._running):
            if seq in queue:
                queue.remove(seq)

    def schedule(self, held: Collection[str] = ()) -> Schedule:
        """Plan one step. Preempts and admits; computes nothing. `complete` must follow before the next call.

        `held`: ids of sequences that this step must leave alone, in whatever state.
        """
        ready, preempted = self._grow_running(held)
        decoding: list[Sequence] = []
        computing: list[Sequence] = []
        for seq in ready:
            (decoding if seq.num_tokens_to_compute == 1 else computing).append(seq)
        items: list[ScheduledSequence] = []
        budget = self.config.token_budget
        # Those that come back from being held may be more than there are slots: the youngest wait for a later step.
        for seq in (decoding + computing)[: self.config.max_num_seqs]:
            budget -= self._take(seq, budget, items)
        while budget > 0:
            admitted = self._admit_next(held)
            if admitted is None:
                break
            budget -= self._take(admitted, budget, items)
        if self.config.speculative_tokens and budget > 0:
            self._add_drafts(items, budget)
        return Schedule(tuple(items), tuple(preempted))

    def complete(self, seq: Sequence, num_new_tokens: int) -> None:
        """The KV of the next `num_new_tokens` tokens of `seq` is in the pool: count it, and offer blocks that became
        full to the prefix cache.

        Call it after right guesses were appended. What the step wrote behind these tokens, for wrong ones, counts as
        nothing: it is never in a stored block, later tokens overwrite it, and blocks that were taken for it go back.
        """
        seq.advance(num_new_tokens)
        self._store_full_blocks(seq)
        num_blocks = self._blocks_for(seq.num_tokens)
        if num_blocks < len(seq.block_table):
            self._block_manager.trim(seq.seq_id, seq.num_tokens)
            del seq.block_table[num_blocks:]

    def _grow_running(self, held: Collection[str]) -> tuple[list[Sequence], list[Sequence]]:
        """Make room for the next token of running sequences, oldest first. Returns (can compute, preempted)."""
        ready: list[Sequence] = []
        preempted: list[Sequence] = []
        for seq in self.running:
            while seq.status is SequenceStatus.RUNNING and seq.seq_id not in held:
                if self._grow(seq, seq.num_tokens):
                    ready.append(seq)
                    break
                if self._running == [seq]:
                    # Only hand-offs being received or drained hold the other blocks. They end in bounded time by
                    # themselves, so it costs less to wait with the KV in place than to compute it again.
                    break
                preempted.append(self._preempt_youngest())
        return ready, preempted

    def _grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Blocks for that many tokens. False = there are too few now, nothing changed."""
        known = len(seq.block_table)
        if num_tokens > known * self._block_size:
            if not self._block_manager.append(seq.seq_id, num_tokens):
                return False
            seq.block_table.extend(self._block_manager.block_table(seq.seq_id)[known:])
        return True

    def _add_drafts(self, items: list[ScheduledSequence], budget: int) -> None:
        """Let sequences that decode guess ahead, within `budget` tokens for all of them."""
        decoding = [i for i, item in enumerate(items) if item.samples and item.num_new_tokens == 1]
        for i in decoding:
            seq = items[i].seq
            # The last token that the sequence may have is sampled, so it need not be guessed.
            most = min(self.config.speculative_tokens, budget, seq.max_total_tokens - seq.num_tokens - 1)
            if most < 1:
                continue
            seq.drafter = seq.drafter or Drafter()
            draft = seq.drafter.propose(seq.token_ids, most, len(decoding))
            draft = draft[: self._room_for_guesses(seq, len(draft))]
            if draft:
                items[i] = items[i]._replace(num_new_tokens=1 + len(draft), draft_token_ids=tuple(draft))
                budget -= len(draft)

    def _room_for_guesses(self, seq: Sequence, num_guesses: int) -> int:
        """How many guesses have a slot behind the sequence's last token, blocks that are free included."""
        missing = self._blocks_for(seq.num_tokens + num_guesses) - len(seq.block_table)
        if missing > 0:
            num_blocks = len(seq.block_table) + min(missing, self._block_manager.num_free)
            self._grow(seq, num_blocks * self._block_size)
        return len(seq.block_table) * self._block_size - seq.num_tokens

    def _preempt_youngest(self) -> Sequence:
        victim = self._running.pop()
        self._block_manager.free(victim.seq_id)
        victim.lose_blocks()
        victim.move_to(SequenceStatus.PREEMPTED)
        insort(self._waiting, victim, key=_queue_order)
        self.preemptions += 1
        return victim

    def _admit_next(self, held: Collection[str]) -> Sequence | None:
        """Move the first waiting sequence to running, with blocks. None = nobody waits, or no room now."""
        seq = next((seq for seq in self._waiting if seq.seq_id not in held), None)
        if seq is None or self._slots(held) < 1:
            return None
        if self._allocate(seq, seq.num_tokens, seq.most_cached_tokens // self._block_size, promised_blocks=0) is None:
            return None
        self._waiting.remove(seq)
        seq.move_to(SequenceStatus.RUNNING)
        insort(self._running, seq, key=_arrival)
        return seq

    def _allocate(self, seq: Sequence, num_tokens: int, max_cached: int, promised_blocks: int) -> Allocation | None:
        seq.extend_hashes(self._hasher)
        spare = promised_blocks + self._headroom_blocks()
        if spare and not self._block_manager.can_allocate(self._blocks_for(num_tokens) + spare):
            # Tight: now it is worth finding out how much of it is cached.
            cached = min(self._block_manager.match_prefix(seq.block_hashes, seq.token_ids), max_cached)
            if not self._block_manager.can_allocate(self._blocks_for(num_tokens) - cached + spare):
                return None
        allocation = self._block_manager.allocate(seq.seq_id, num_tokens, seq.block_hashes, seq.token_ids, max_cached)
        if allocation is not None:
            num_valid_tokens = allocation.cached_blocks * self._block_size
            if seq.status is SequenceStatus.WAITING:
                seq.num_cached_tokens = num_valid_tokens
            seq.start_computing(num_valid_tokens)
            seq.num_stored_blocks = allocation.cached_blocks
            seq.block_table = array("i", allocation.block_table)
        return allocation

    def _headroom_blocks(self) -> int:
        growing = len(self._running) + len(self._receiving)
        if self.config.prefill_only or not growing:
            return 0
        return max(growing, math.ceil(self.config.headroom * self._block_manager.num_blocks))

    def _take(self, seq: Sequence, budget: int, items: list[ScheduledSequence]) -> int:
        """Schedule as many tokens of `seq` as the budget allows; returns how many."""
        start = seq.num_computed_tokens
        end = min(seq.num_tokens, start + budget)
        if end < seq.num_tokens:
            # Ending on a block boundary lets a block be sent and shared one step earlier.
            aligned = end // self._block_size * self._block_size
            end = aligned if aligned > start else end
        if end > start:
            items.append(ScheduledSequence(seq, start, end - start, end == seq.num_tokens, seq.block_table))
        return end - start

    def _store_full_blocks(self, seq: Sequence) -> None:
        size = self._block_size
        if seq.num_computed_tokens < (seq.num_stored_blocks + 1) * size:
            return
        seq.extend_hashes(self._hasher)
        for index in range(seq.num_stored_blocks, seq.num_computed_tokens // size):
            tokens = seq.token_ids[index * size : (index + 1) * size]
            self._block_manager.store(seq.seq_id, index, seq.block_hashes[index], tokens)
            seq.num_stored_blocks = index + 1

    def _number(self, seq: Sequence) -> None:
        self._arrivals += 1
        seq.arrival = self._arrivals

    def _slots(self, held: Collection[str] = ()) -> int:
        active = sum(seq.seq_id not in held for seq in self._running)
        return self.config.max_num_seqs - active - len(self._receiving)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)


def _arrival(seq: Sequence) -> int:
    return seq.arrival


def _queue_order(seq: Sequence) -> tuple[bool, int]:
    return seq.status is not SequenceStatus.PREEMPTED, seq.arrival

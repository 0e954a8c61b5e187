"""A scheduler over a pool, with steps that compute nothing."""

import random

from engine.scheduler import Schedule, ScheduledSequence, Scheduler, SchedulerConfig
from engine.sequence import FinishReason, SamplingParams, Sequence, TokenSample
from kv_cache.block_hash import BlockHasher
from kv_cache.block_manager import BlockManager
from kv_cache.layout import KVDtype

BLOCK = 8


class World:
    """Every sampled token is 1, or what `draw` says."""

    def __init__(
        self,
        num_blocks: int,
        *,
        token_budget: int = 64,
        max_num_seqs: int = 8,
        max_waiting: int = 1000,
        prefill_only: bool = False,
        headroom: float = 0.01,
        speculative_tokens: int = 0,
    ) -> None:
        self.blocks = BlockManager(num_blocks, BLOCK)
        config = SchedulerConfig(token_budget, max_num_seqs, max_waiting, prefill_only, headroom, speculative_tokens)
        self.scheduler = Scheduler(config, self.blocks, BlockHasher("m", "r", BLOCK, KVDtype.FP32))
        self.steps = 0

    def add(self, seq_id: str, tokens: int, max_tokens: int = 10, first: int = 0) -> Sequence:
        seq = make(seq_id, tokens, max_tokens, first)
        assert self.scheduler.add(seq)
        return seq

    def step(self, draw: random.Random | None = None) -> Schedule:
        schedule = self.scheduler.schedule()
        assert schedule.num_tokens <= self.scheduler.config.token_budget
        assert len(schedule.items) <= self.scheduler.config.max_num_seqs
        ended = [item.seq for item in schedule.items if self.apply(item, draw)]
        for seq in ended:
            self.end(seq)
        self.blocks.check_integrity()
        self.steps += 1
        return schedule

    def apply(self, item: ScheduledSequence, draw: random.Random | None = None) -> bool:
        """Append what one item samples, and what follows right guesses. Whether the sequence ends."""
        seq, num_computed, ends = item.seq, item.num_new_tokens - len(item.draft_token_ids), False
        guesses = [*item.draft_token_ids, None] if item.samples else []
        for guess in guesses:
            token = draw.randrange(1000) if draw else 1
            ends = seq.append_token(TokenSample(token)) is not None
            if ends or token != guess:
                break
            num_computed += 1
        self.scheduler.complete(seq, num_computed)
        return ends

    def end(self, seq: Sequence) -> None:
        self.scheduler.remove(seq)
        seq.finish(FinishReason.LENGTH)
        if seq.seq_id in self.blocks:
            self.blocks.free(seq.seq_id)

    def run(self, max_steps: int = 5000, draw: random.Random | None = None) -> None:
        while self.scheduler.running or self.scheduler.waiting:
            self.step(draw)
            assert self.steps < max_steps, "livelock"


def make(seq_id: str, tokens: int, max_tokens: int = 10, first: int = 0) -> Sequence:
    return Sequence(
        seq_id, range(first, first + tokens), SamplingParams(max_tokens=max_tokens), max_context_tokens=10_000
    )

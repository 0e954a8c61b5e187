"""From a schedule to sampled tokens: build the batch, run the model, sample, and see which guesses were right."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from engine.attention.interface import AttentionBackend
from engine.batch import Batch, BatchRow, build_batch
from engine.prompt_scoring import score_prompts
from engine.sampler import Sampler, SampleRow
from engine.scheduler import Schedule, ScheduledSequence
from engine.sequence import Sequence, TokenSample
from runtime.errors import KvferryError

LayerHook: TypeAlias = Callable[[int], None]
RowResult: TypeAlias = tuple[TokenSample, ...] | KvferryError
"""What a sequence sampled in one step, never empty: one token, and one more for each guess that was right."""


class Model(Protocol):
    """A decoder-only model. Called under torch.inference_mode by the engine's owner thread only."""

    def forward(self, batch: Batch, attention: AttentionBackend, on_layer: LayerHook) -> Tensor:
        """Final hidden states [T, hidden], after the last norm.

        In each layer: one of the two stores of `attention`, then `on_layer(layer)`, then `attention.attend`.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 [R, vocab] for hidden states [R, hidden]."""
        ...


class Runner(Protocol):
    """What an engine runs its steps with: `ModelRunner`, or `engine.execution.device_runner.DeviceRunner`."""

    def run(self, schedule: Schedule, on_layer: LayerHook | None = None) -> dict[str, RowResult]:
        """See ModelRunner."""
        ...


class ModelRunner:
    """Runs schedules, one operation after the other. Owner thread only."""

    def __init__(self, model: Model, attention: AttentionBackend, sampler: Sampler, block_size: int) -> None:
        """`block_size`: tokens a block of the pool that `attention` reads and writes."""
        self._model = model
        self._attention = attention
        self._sampler = sampler
        self._block_size = block_size

    @torch.inference_mode()
    def run(self, schedule: Schedule, on_layer: LayerHook | None = None) -> dict[str, RowResult]:
        """Compute a schedule that is not empty: KV of all its tokens into the pool, one result a sampling sequence.

        A sequence that cannot be sampled, or whose prompt cannot be scored (NaN logits), has a KvferryError as its
        result and harms no other. Log probabilities of prompts are added to `Sequence.prompt_logprobs`.
        `on_layer(l)` is called when the KV of layer l is in the pool and final, before the layer's attention.
        Exceptions of the model or the hook pass through.
        """
        batch = build_batch([batch_row(item) for item in schedule.items], self._block_size)
        hidden = self._model.forward(batch, self._attention, on_layer or no_hook)
        failed: dict[str, RowResult] = {}
        if len(batch.scored_rows):
            failed = {**score_prompts(self._model.logits, hidden, batch, schedule.items)}
        if not batch.logits_order:
            return failed
        # Finished by now, whatever the hook cancelled: rows of cancelled sequences are sampled and then ignored.
        if len(batch.logits_order) < len(hidden):
            hidden = hidden[batch.logits_rows]
        logits = self._model.logits(hidden)
        sampled = [schedule.items[i] for i in dict.fromkeys(batch.logits_order)]
        if len(sampled) < len(logits):
            return {**verify(self._sampler, logits, sampled), **failed}
        results = self._sampler.sample(logits, [sample_row(item.seq) for item in sampled])
        sampled_results: dict[str, RowResult] = {
            item.seq.seq_id: result if isinstance(result, KvferryError) else (result,)
            for item, result in zip(sampled, results, strict=True)
        }
        return {**sampled_results, **failed} if failed else sampled_results


def verify(sampler: Sampler, logits: Tensor, sampled: list[ScheduledSequence]) -> dict[str, RowResult]:
    """Sample after each sequence's own last token, then after each guess that was right.

    One round a position, so nothing is sampled in vain: with guesses or without, each token is drawn once, from
    the logits behind the tokens that are before it. `logits` of one sequence are neighbours, in the order given.
    """
    rows, first = [], 0
    for item in sampled:
        rows.append(_Verified(item, first))
        first += 1 + len(item.draft_token_ids)
    going_on = rows
    while going_on:
        values = logits[[row.first_logits + len(row.samples) for row in going_on]]
        results = sampler.sample(values, [row.sample_row() for row in going_on])
        going_on = [row for row, result in zip(going_on, results, strict=True) if row.take(result)]
    return {row.item.seq.seq_id: row.finish() for row in rows}


@dataclass(slots=True)
class _Verified:
    """A sequence, the first of its logits, and what was sampled from these so far."""

    item: ScheduledSequence
    first_logits: int
    samples: list[TokenSample] = field(default_factory=list)
    error: KvferryError | None = None
    num_advanced: int = 0

    def sample_row(self) -> SampleRow:
        """How the next token is chosen."""
        return sample_row(self.item.seq, [sample.token_id for sample in self.samples])

    def take(self, result: TokenSample | KvferryError) -> bool:
        """Keep what was sampled. Returns whether it is what was guessed, and the text goes on behind it."""
        if isinstance(result, KvferryError):
            self.error = result
            return False
        seq, draft = self.item.seq, self.item.draft_token_ids
        self.samples.append(result)
        count = len(self.samples)
        if count > len(draft) or result.token_id != draft[count - 1]:
            return False
        if seq.ending(result.token_id, seq.num_output_tokens + count) is not None:
            return False
        if seq.constraint is not None:
            seq.constraint.advance(result.token_id)
            self.num_advanced += 1
        return True

    def finish(self) -> RowResult:
        """The result. Leaves the sequence's constraint where it was before the step."""
        if self.item.seq.constraint is not None:
            self.item.seq.constraint.rewind(self.num_advanced)
        # A failure behind a right guess is that of a later token: the next step meets it again, after this text.
        if self.error is not None and not self.samples:
            return self.error
        return tuple(self.samples)


def sample_row(seq: Sequence, accepted: list[int] | None = None) -> SampleRow:
    """How the token behind the sequence, and behind guesses accepted before it, is chosen."""
    output_token_ids, position = seq.output_token_ids, seq.num_tokens
    if accepted:
        output_token_ids = output_token_ids + accepted
        position += len(accepted)
    return SampleRow(
        sampling=seq.sampling,
        prompt_token_ids=seq.prompt_token_ids,
        output_token_ids=output_token_ids,
        position=position,
        eos_token_ids=seq.eos_token_ids,
        allowed=None if seq.constraint is None else seq.constraint.allowed(),
    )


def batch_row(item: ScheduledSequence) -> BatchRow:
    """What a scheduled sequence adds to a batch."""
    token_ids = item.seq.token_ids[item.start : item.end]
    if item.draft_token_ids:
        token_ids += item.draft_token_ids
    row = BatchRow(token_ids, item.start, item.block_table, 1 + len(item.draft_token_ids) if item.samples else 0)
    prompt = item.seq.prompt_logprobs
    return row if prompt is None else row._replace(scored=prompt.wanted(item.start, item.end))


def no_hook(layer: int) -> None:
    """Nobody wants to know."""

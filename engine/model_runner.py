"""From a schedule to sampled tokens: build the batch, run the model, sample."""

from collections.abc import Callable
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from engine.attention.interface import AttentionBackend
from engine.batch import Batch, BatchRow, build_batch
from engine.sampler import Sampler, SampleRow
from engine.scheduler import Schedule, ScheduledSequence
from engine.sequence import Sequence, TokenSample
from runtime.errors import KvferryError

LayerHook: TypeAlias = Callable[[int], None]
RowResult: TypeAlias = TokenSample | KvferryError


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


class ModelRunner:
    """Runs schedules. Owner thread only."""

    def __init__(self, model: Model, attention: AttentionBackend, sampler: Sampler, block_size: int) -> None:
        """`block_size`: tokens a block of the pool that `attention` reads and writes."""
        self._model = model
        self._attention = attention
        self._sampler = sampler
        self._block_size = block_size

    @torch.inference_mode()
    def run(self, schedule: Schedule, on_layer: LayerHook | None = None) -> dict[str, RowResult]:
        """Compute a schedule that is not empty: KV of all its tokens into the pool, one result a sampling sequence.

        A sequence that cannot be sampled (NaN logits) has a KvferryError as its result and harms no other.
        `on_layer(l)` is called when the KV of layer l is in the pool and final, before the layer's attention.
        Exceptions of the model or the hook pass through.
        """
        items = schedule.items
        batch = build_batch([_batch_row(item) for item in items], self._block_size)
        hidden = self._model.forward(batch, self._attention, on_layer or _no_hook)
        if not batch.logits_order:
            return {}
        # Finished by now, whatever the hook cancelled: rows of cancelled sequences are sampled and then ignored.
        logits = self._model.logits(hidden[batch.logits_rows])
        sampled = [items[i].seq for i in batch.logits_order]
        results = self._sampler.sample(logits, [_sample_row(seq) for seq in sampled])
        return {seq.seq_id: result for seq, result in zip(sampled, results, strict=True)}


def _batch_row(item: ScheduledSequence) -> BatchRow:
    return BatchRow(item.seq.token_ids[item.start : item.end], item.start, item.block_table, item.samples)


def _sample_row(seq: Sequence) -> SampleRow:
    return SampleRow(
        sampling=seq.sampling,
        prompt_token_ids=seq.prompt_token_ids,
        output_token_ids=seq.output_token_ids,
        position=seq.num_tokens,
        eos_token_ids=seq.eos_token_ids,
    )


def _no_hook(layer: int) -> None:
    """Nobody wants to know."""

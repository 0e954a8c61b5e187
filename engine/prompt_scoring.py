"""From the hidden states of a step to log probabilities of the prompt tokens in it, for sequences that want them."""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from torch import Tensor

from engine.batch import Batch
from engine.prompt_logprobs import PromptLogprobs, PromptToken
from engine.sampler import logprobs_of
from engine.scheduler import ScheduledSequence
from runtime.errors import KvferryError

# Logits of so many positions exist at a time: a chunk of 2,048 tokens over 128k words would be a gigabyte.
SLICE_ROWS: Final = 64


def scored_slices(batch: Batch) -> Iterator[Tensor]:
    """The batch's `scored_rows` in the pieces whose logits are computed at a time; the same on every rank."""
    rows = batch.scored_rows
    return (rows[first : first + SLICE_ROWS] for first in range(0, len(rows), SLICE_ROWS))


def score_prompts(
    logits_of: Callable[[Tensor], Tensor], hidden: Tensor, batch: Batch, items: Sequence[ScheduledSequence]
) -> dict[str, KvferryError]:
    """Give each sequence of `items`, from which the batch was built, the positions of its prompt that it wants.

    `logits_of`: hidden states [R, hidden] to fp32 logits [R, vocab], called once a slice. `hidden`: [T, hidden].
    Returns, by sequence, why a prompt cannot be scored (INTERNAL: its logits hold a NaN or +inf); others go on.
    """
    failed: dict[str, KvferryError] = {}
    entries = list(_entries(batch, items))
    done = 0
    for rows in scored_slices(batch):
        logits = logits_of(hidden[rows]).cpu().numpy()
        for raw, (seq_id, prompt, position) in zip(logits, entries[done : done + len(rows)], strict=True):
            if seq_id in failed:
                continue
            token_id = prompt.token_behind(position)
            try:
                logprob, top = logprobs_of(raw, token_id, prompt.num_alternatives)
            except KvferryError as error:
                failed[seq_id] = error
                continue
            rank = 1 + int((raw > raw[token_id]).sum())
            prompt.add(PromptToken(position + 1, token_id, logprob, rank, top))
        done += len(rows)
    return failed


def _entries(batch: Batch, items: Sequence[ScheduledSequence]) -> Iterator[tuple[str, PromptLogprobs, int]]:
    """Whose each of `scored_rows` is, in their order."""
    for index in batch.row_order:
        item = items[index]
        prompt = item.seq.prompt_logprobs
        if prompt is not None:
            for position in prompt.wanted(item.start, item.end):
                yield item.seq.seq_id, prompt, position

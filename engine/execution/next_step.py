"""The batch of the decode step that probably follows, laid out while the device computes the one before it.

Expected: each sequence that is sampled now, and does not end by its length, goes on by one token, in the same order.
If the next schedule is exactly that, only the token ids are missing, and the blocks that sequences grew into. If it is
not (one ended, came, was preempted, held, cancelled, or guesses ahead), what was laid out is thrown away.
"""

from array import array
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch

from engine.batch import Batch, BatchRow, build_batch
from engine.scheduler import Schedule, ScheduledSequence
from engine.sequence import Sequence

_UNKNOWN: Final = -1


@dataclass(frozen=True, slots=True, eq=False)
class NextStep:
    """A batch on the host without token ids. `is_complete`: nothing else is missing."""

    batch: Batch
    is_complete: bool
    keeps_order: bool  # logits j of the step before belong to row j of this batch
    seqs: tuple[Sequence, ...]
    block_tables: tuple[SequenceOf[int], ...]

    def matches(self, schedule: Schedule) -> bool:
        """Whether the schedule is what was expected."""
        if len(schedule.items) != len(self.seqs):
            return False
        batch = self.batch
        return all(
            _is_expected(schedule.items[i], self.seqs[i], self.block_tables[i], start)
            for i, start in zip(batch.row_order, batch.starts, strict=True)
        )

    def filled(self, schedule: Schedule, block_size: int) -> Batch:
        """The batch of a schedule that matches, with its token ids and all blocks. May change `batch`."""
        batch = self.batch
        items = [schedule.items[i] for i in batch.row_order]
        batch.token_ids[:] = torch.tensor([item.seq.token_ids[item.start] for item in items])
        if self.is_complete:
            return batch
        # Views: what is written here is in the batch.
        tables, slots, blocks = (part.numpy() for part in (batch.block_tables, batch.slot_mapping, batch.slot_blocks))
        for row in np.flatnonzero(blocks == _UNKNOWN).tolist():
            index, offset = divmod(batch.starts[row], block_size)
            tables[row, index] = blocks[row] = items[row].block_table[index]
            slots[row] = blocks[row] * block_size + offset
        return replace(batch, opened_blocks=batch.slot_blocks[batch.slot_offsets == 0])


def expect_next(schedule: Schedule, block_size: int, logits_order: SequenceOf[int]) -> NextStep | None:
    """What follows a step, by its schedule, whose tokens are not known yet; `logits_order`: of the step's batch.

    None when nothing can be said: a prompt is not computed to its end, sequences guess ahead, or nothing goes on.
    """
    if not all(item.samples and not item.draft_token_ids for item in schedule.items):
        return None
    going_on = [i for i, item in enumerate(schedule.items) if item.seq.num_tokens + 1 < item.seq.max_total_tokens]
    if not going_on:
        return None
    items = [schedule.items[i] for i in going_on]
    batch = build_batch([_row(item, block_size) for item in items], block_size)
    return NextStep(
        batch=batch,
        is_complete=bool((batch.slot_blocks != _UNKNOWN).all()),
        keeps_order=tuple(logits_order) == tuple(going_on[i] for i in batch.row_order),
        seqs=tuple(item.seq for item in items),
        block_tables=tuple(item.block_table for item in items),
    )


def _row(item: ScheduledSequence, block_size: int) -> BatchRow:
    """One token behind those of the step; its block may not be there yet."""
    table, start = item.block_table, item.end
    if len(table) * block_size <= start:
        table = array("i", table)
        table.append(_UNKNOWN)
    return BatchRow((0,), start, table)


def _is_expected(item: ScheduledSequence, seq: Sequence, block_table: SequenceOf[int], start: int) -> bool:
    # A sequence that lost its blocks and got others has another table, as an object.
    return (
        item.seq is seq
        and item.start == start
        and item.num_new_tokens == 1
        and item.samples
        and item.block_table is block_table
    )

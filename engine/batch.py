"""The input of one step: the tokens of all scheduled sequences laid end to end.

rows:        | a | b | c c c c c | d d |        single-token rows first, shortest context first
query_start:   0   1   2           7     9      row i owns [query_start[i], query_start[i + 1])
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_NOTHING: Final = torch.empty(0, dtype=torch.int64)


class BatchRow(NamedTuple):
    """What one sequence adds to a step: `token_ids` at positions start, start + 1, ...; its whole block table (an
    array of type "i" is taken over fastest); after how many of its last tokens the logits are wanted to sample; and
    behind which positions they are wanted to score the prompt."""

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    wants_logits: int = 1
    scored: range = range(0)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One step's tensors on the CPU. T tokens, S rows, R logits, Q positions of prompts to score. Not changed after it
    is built.

    `row_order[i]` is the index, in the list given to `build_batch`, of row i. The first `num_single_rows` rows
    have exactly one token each. The KV of a row's tokens is valid up to its start; the model stores the rest.
    """

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T], index of the token within its sequence
    slot_mapping: Tensor  # int64 [T], block_id * block_size + offset
    slot_blocks: Tensor  # int64 [T], slot_mapping // block_size
    slot_offsets: Tensor  # int64 [T], slot_mapping % block_size
    block_tables: Tensor  # int32 [S, most blocks a row's context needs]; short rows repeat their first block
    context_lens: Tensor  # int32 [S], start + tokens of the row
    query_start: Tensor  # int32 [S + 1]
    logits_rows: Tensor  # int64 [R], indices of the tokens behind which logits are wanted, ascending
    scored_rows: Tensor  # int64 [Q], indices of the tokens behind which they are wanted to score prompts, ascending
    opened_blocks: Tensor  # int64 [N], blocks whose first slot is written by this step and whose last is not
    row_order: tuple[int, ...]
    logits_order: tuple[int, ...]  # logits j belong to the row that was given as number logits_order[j]
    starts: tuple[int, ...]  # per row, as Python numbers: no tensor has to be read back to plan a step
    query_lens: tuple[int, ...]
    num_single_rows: int

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.token_ids.shape[0]

    @property
    def num_rows(self) -> int:
        """S."""
        return len(self.starts)


def build_batch(rows: Sequence[BatchRow], block_size: int) -> Batch:
    """Lay out one step. Raises ValueError for a row without tokens, with a block table that is too short, or that
    wants logits behind tokens that it does not have."""
    if not rows:
        raise ValueError("a batch needs at least one row")
    for row in rows:
        _check(row, block_size)
    # Single tokens first, shortest context first; rows that are equal in this stay in the order given.
    keys = [(len(row.token_ids) > 1, row.start) for row in rows]
    order = sorted(range(len(rows)), key=keys.__getitem__)
    ordered = [rows[i] for i in order]
    starts = [row.start for row in ordered]
    lens = [len(row.token_ids) for row in ordered]
    ends = [start + length for start, length in zip(starts, lens, strict=True)]
    query_start = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(lens, out=query_start[1:])
    token_ids = np.array([token for row in ordered for token in row.token_ids], dtype=np.int64)
    positions, rows_of_tokens = np.array(starts), np.arange(len(rows))
    if len(token_ids) > len(rows):
        # Row i's tokens are at query_start[i] + 0, 1, ... of the batch and at starts[i] + 0, 1, ... of their sequence.
        positions = np.arange(len(token_ids)) + np.repeat(positions - query_start[:-1], lens)
        rows_of_tokens = np.repeat(rows_of_tokens, lens)
    tables = _pad_tables([row.block_table for row in ordered], [-(-end // block_size) for end in ends])
    block_indices, slot_offsets = np.divmod(positions, block_size)
    slot_blocks = tables[rows_of_tokens, block_indices].astype(np.int64)
    wanted = [i for i, row in zip(order, ordered, strict=True) for _ in range(row.wants_logits)]
    after = query_start[1:].tolist()
    return Batch(
        token_ids=torch.from_numpy(token_ids),
        positions=torch.from_numpy(positions),
        slot_mapping=torch.from_numpy(slot_blocks * block_size + slot_offsets),
        slot_blocks=torch.from_numpy(slot_blocks),
        slot_offsets=torch.from_numpy(slot_offsets),
        block_tables=torch.from_numpy(tables),
        context_lens=torch.from_numpy(np.array(ends, dtype=np.int32)),
        query_start=torch.from_numpy(query_start),
        logits_rows=torch.from_numpy(
            np.array(
                [
                    token
                    for row, end in zip(ordered, after, strict=True)
                    for token in range(end - row.wants_logits, end)
                ],
                dtype=np.int64,
            )
        ),
        scored_rows=_scored_rows(ordered, after),
        opened_blocks=torch.from_numpy(_opened_blocks(ordered, ends, block_size)),
        row_order=tuple(order),
        logits_order=tuple(wanted),
        starts=tuple(starts),
        query_lens=tuple(lens),
        num_single_rows=lens.count(1),
    )


def _check(row: BatchRow, block_size: int) -> None:
    token_ids, start, block_table, wants_logits, scored = row
    num_tokens = len(token_ids)
    if not num_tokens or len(block_table) * block_size < start + num_tokens:
        raise ValueError(f"a row with {num_tokens} tokens from {start} has {len(block_table)} blocks")
    if not 0 <= wants_logits <= num_tokens:
        raise ValueError(f"a row with {num_tokens} tokens cannot have {wants_logits} logits")
    if scored and not start <= scored.start < scored.stop <= start + num_tokens:
        raise ValueError(f"a row with {num_tokens} tokens from {start} does not have the positions {scored}")


def _pad_tables(block_tables: Sequence[Sequence[int]], num_blocks: Sequence[int]) -> NDArray[np.int32]:
    """int32 [S, most blocks], row i cut to num_blocks[i]. The padding repeats the row's own first block: reading it is
    always harmless."""
    width = max(num_blocks)
    # Arrays of machine numbers are joined without a look at each block id.
    joined = array("i")
    for table, count in zip(block_tables, num_blocks, strict=True):
        block_ids = table if isinstance(table, array) else array("i", table)
        joined += block_ids[:count]
        if count < width:
            joined += block_ids[:1] * (width - count)
    return np.frombuffer(joined, dtype=np.int32).reshape(len(block_tables), width)


def _scored_rows(rows: Sequence[BatchRow], afters: Sequence[int]) -> Tensor:
    """`afters`: one past the last token of each row, in the batch."""
    if not any(row.scored for row in rows):
        return _NOTHING
    scored: list[int] = []
    for row, after in zip(rows, afters, strict=True):
        if row.scored:
            first = after - len(row.token_ids) - row.start
            scored.extend(range(first + row.scored.start, first + row.scored.stop))
    return torch.tensor(scored)


def _opened_blocks(rows: Sequence[BatchRow], ends: Sequence[int], block_size: int) -> NDArray[np.int64]:
    opened = []
    for row, end in zip(rows, ends, strict=True):
        last, num_filled = divmod(end, block_size)
        if num_filled and row.start <= last * block_size:
            opened.append(row.block_table[last])
    return np.array(opened, dtype=np.int64)

"""The input of one step: the tokens of all scheduled sequences laid end to end.

rows:        | a | b | c c c c c | d d |        single-token rows first, shortest context first
query_start:   0   1   2           7     9      row i owns [query_start[i], query_start[i + 1])
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class BatchRow:
    """What one sequence adds to a step: `token_ids` at positions start, start + 1, ...; its whole block table;
    and whether the logits after its last token are wanted."""

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    wants_logits: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One step's tensors on the CPU. T tokens, S rows, R logits. Not changed after it is built.

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
    logits_rows: Tensor  # int64 [R], the token index of each wanted row's last token
    opened_blocks: Tensor  # int64 [N], blocks whose first slot is written by this step and whose last is not
    row_order: tuple[int, ...]
    logits_order: tuple[int, ...]  # entry j belongs to the row that was given as number logits_order[j]
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
    """Lay out one step. Raises ValueError for a row without tokens or with a block table that is too short."""
    if not rows:
        raise ValueError("a batch needs at least one row")
    for row in rows:
        if not row.token_ids or len(row.block_table) * block_size < row.start + len(row.token_ids):
            raise ValueError(
                f"a row with {len(row.token_ids)} tokens from {row.start} has {len(row.block_table)} blocks"
            )
    order = sorted(range(len(rows)), key=lambda i: (len(rows[i].token_ids) > 1, rows[i].start))
    ordered = [rows[i] for i in order]
    query_lens = tuple(len(row.token_ids) for row in ordered)
    query_start = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    positions = np.concatenate([np.arange(row.start, row.start + len(row.token_ids)) for row in ordered])
    tables = _pad_tables(ordered, block_size)
    row_of_token = np.repeat(np.arange(len(rows)), query_lens)
    slot_blocks = tables[row_of_token, positions // block_size].astype(np.int64)
    slot_offsets = positions % block_size
    wanted = [i for i, row in enumerate(ordered) if row.wants_logits]
    return Batch(
        token_ids=torch.from_numpy(np.concatenate([np.asarray(row.token_ids, dtype=np.int64) for row in ordered])),
        positions=torch.from_numpy(positions),
        slot_mapping=torch.from_numpy(slot_blocks * block_size + slot_offsets),
        slot_blocks=torch.from_numpy(slot_blocks),
        slot_offsets=torch.from_numpy(slot_offsets),
        block_tables=torch.from_numpy(tables),
        context_lens=torch.tensor([row.start + len(row.token_ids) for row in ordered], dtype=torch.int32),
        query_start=torch.from_numpy(query_start),
        logits_rows=torch.from_numpy(query_start[1:][wanted].astype(np.int64) - 1),
        opened_blocks=torch.tensor(_opened_blocks(ordered, block_size), dtype=torch.int64),
        row_order=tuple(order),
        logits_order=tuple(order[i] for i in wanted),
        starts=tuple(row.start for row in ordered),
        query_lens=query_lens,
        num_single_rows=sum(1 for length in query_lens if length == 1),
    )


def _pad_tables(rows: Sequence[BatchRow], block_size: int) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
    """int32 [S, most blocks]. The padding repeats the row's own first block: reading it is always harmless."""
    needed = [-(-(row.start + len(row.token_ids)) // block_size) for row in rows]
    tables = np.empty((len(rows), max(needed)), dtype=np.int32)
    for table, row, num_blocks in zip(tables, rows, needed, strict=True):
        table[:num_blocks] = row.block_table[:num_blocks]
        table[num_blocks:] = row.block_table[0]
    return tables


def _opened_blocks(rows: Sequence[BatchRow], block_size: int) -> list[int]:
    opened = []
    for row in rows:
        end = row.start + len(row.token_ids)
        last = end // block_size
        if end % block_size and row.start <= last * block_size:
            opened.append(row.block_table[last])
    return opened

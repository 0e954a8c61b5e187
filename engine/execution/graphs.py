"""Decode steps that were captured once for each of a few batch sizes, and are replayed with new numbers.

A batch of n single tokens takes the smallest size that is not below n. Its rows are the first; the others are padding:
slot -1 (nothing is written), a context of one token (something harmless is read), and logits that nobody looks at.

    buffers, made once      ids | positions | slots      int64 [most rows]
                            context lengths              int32 [most rows]
                            block tables                 int32 [most rows, blocks of the longest context]
    a captured step         reads the first rows of these, whatever is in them; returns logits

All sizes share the buffers, so a batch is *loaded* with three small copies, and may be loaded while the step before it
still runs: the copies are queued behind that. Attention under graphs reads no other field of a batch.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.batch import Batch
from engine.execution.device import Device
from engine.execution.staging import Staging


@dataclass(frozen=True, slots=True)
class GraphShape:
    """Bounds of all batches that may come."""

    max_rows: int
    max_context_tokens: int
    block_size: int

    @property
    def table_width(self) -> int:
        """Blocks of the longest context."""
        return -(-self.max_context_tokens // self.block_size)


def padded_sizes(max_rows: int) -> tuple[int, ...]:
    """1, 2, 4, then multiples of 8, and `max_rows` itself: few rows are padded where a row costs much."""
    return (*(size for size in (1, 2, 4, *range(8, max_rows, 8)) if size < max_rows), max_rows)


class GraphPool:
    """Captured decode steps. Owner thread only."""

    def __init__(
        self,
        step: Callable[[Batch], Tensor],
        shape: GraphShape,
        device: Device,
        staging: Staging,
        capture: Callable[[Callable[[], Tensor]], Callable[[], Tensor]],
    ) -> None:
        """`step(batch)`: logits [rows, vocab] of a batch of single tokens on the device, waiting for nothing.
        `capture`: see `Device.capture`; tests give another."""
        self._step = step
        self._shape = shape
        self._staging = staging
        self._capture = capture
        self._sizes = padded_sizes(shape.max_rows)
        self._replays: dict[int, Callable[[], Tensor]] = {}
        rows = shape.max_rows
        where = device.torch_device
        self._head = torch.zeros((3, rows), dtype=torch.int64, device=where)
        self._head[2] = -1
        self._context_lens = torch.ones(rows, dtype=torch.int32, device=where)
        self._tables = torch.zeros((rows, shape.table_width), dtype=torch.int32, device=where)
        self._query_start = torch.arange(rows + 1, dtype=torch.int32, device=where)
        self._logits_rows = torch.arange(rows, dtype=torch.int64, device=where)
        self._nothing = torch.empty(0, dtype=torch.int64, device=where)

    def capture_all(self) -> None:
        """Capture every size, the largest first: its memory serves the others. Writes nothing to the pool of KV."""
        for size in reversed(self._sizes):
            self._replay_of(size)

    def fits(self, batch: Batch) -> bool:
        """Whether a captured step computes this batch: single tokens only, each of which is sampled after."""
        rows = batch.num_rows
        return (
            batch.num_single_rows == rows == len(batch.logits_order)
            and rows <= self._shape.max_rows
            and batch.block_tables.shape[1] <= self._shape.table_width
            and not len(batch.scored_rows)
        )

    def load(self, batch: Batch) -> None:
        """Put a batch that `fits`, on the host, into the buffers; queued. What was loaded before is gone."""
        rows, size = batch.num_rows, self._size_of(batch)
        head = np.zeros((3, size), dtype=np.int64)
        head[2] = -1
        for row, tensor in zip(head, (batch.token_ids, batch.positions, batch.slot_mapping), strict=True):
            row[:rows] = tensor.numpy()
        lens = np.ones(size, dtype=np.int32)
        lens[:rows] = batch.context_lens.numpy()
        copies = self._staging.upload([torch.from_numpy(head), torch.from_numpy(lens), batch.block_tables])
        self._head[:, :size] = copies[0]
        self._context_lens[:size] = copies[1]
        self._tables[:rows, : batch.block_tables.shape[1]] = copies[2]

    def replay(self, batch: Batch, token_ids: Tensor | None = None) -> Tensor:
        """Logits [rows, vocab] of the batch that was loaded last; queued. They are valid until the next replay.

        `token_ids`: int64 [rows] on the device, in place of those loaded.
        """
        if token_ids is not None:
            self._head[0, : batch.num_rows] = token_ids
        return self._replay_of(self._size_of(batch))()[: batch.num_rows]

    def _size_of(self, batch: Batch) -> int:
        return next(size for size in self._sizes if size >= batch.num_rows)

    def _replay_of(self, size: int) -> Callable[[], Tensor]:
        replay = self._replays.get(size)
        if replay is None:
            batch = self._static_batch(size)
            replay = self._replays[size] = self._capture(lambda: self._step(batch))
        return replay

    def _static_batch(self, size: int) -> Batch:
        rows = tuple(range(size))
        return Batch(
            token_ids=self._head[0, :size],
            positions=self._head[1, :size],
            slot_mapping=self._head[2, :size],
            slot_blocks=self._nothing,
            slot_offsets=self._nothing,
            block_tables=self._tables[:size],
            context_lens=self._context_lens[:size],
            query_start=self._query_start[: size + 1],
            logits_rows=self._logits_rows[:size],
            scored_rows=self._nothing,
            opened_blocks=self._nothing,
            row_order=rows,
            logits_order=rows,
            # The longest that may ever be: tables of rotations, say, must reach so far before they are captured.
            starts=(self._shape.max_context_tokens - 1,) * size,
            query_lens=(1,) * size,
            num_single_rows=size,
        )

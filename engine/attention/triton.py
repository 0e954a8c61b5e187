"""Attention on CUDA: the kernels of `engine.kernels` behind the interface that models are written in."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.attention.interface import LayerAttention
from engine.batch import Batch
from engine.kernels.decode_attention import (
    DecodeRows,
    DecodeScratch,
    decode_attention,
    decode_scratch,
    plan_decode,
)
from engine.kernels.prefill_attention import ChunkRows, prefill_attention
from engine.kernels.store_kv import rotate_and_store_kv, store_kv
from kv_cache.layout import KVCacheLayout


class TritonAttention:
    """AttentionBackend over a pool on a CUDA device, of any KV dtype. Everything is queued on the current stream and
    nothing is read back, so a step may be captured in a CUDA graph; the batch's tensors are on the pool's device.

    Rows with one token are decoded, longer ones are chunks. In padded rows slots are -1 and contexts 1 token long.
    """

    def __init__(self, pool: Tensor, layout: KVCacheLayout, layers: Sequence[LayerAttention]) -> None:
        """`pool`: uint8 [bytes], contiguous, aligned to 16 bytes, of whole blocks. `layers`: one entry for each layer.

        Raises ValueError for another number of layers; a pool that is not as described is refused by the kernels.
        """
        if len(layers) != layout.num_layers:
            raise ValueError(f"{len(layers)} layers of attention for a pool of {layout.num_layers}")
        self._pool = pool
        self._layout = layout
        self._layers = tuple(layers)
        self._step: tuple[Batch, int] | None = None
        self._decode_rows: dict[int | None, DecodeRows] = {}
        # By rows and q heads. None is given back when a larger one is made: a captured graph may still write to it.
        self._scratch: dict[tuple[int, int], DecodeScratch] = {}

    def store(self, layer: int, k: Tensor, v: Tensor, batch: Batch) -> None:
        """See AttentionBackend. Raises ValueError for tensors that do not fit the pool."""
        store_kv(self._pool, self._layout, layer, k, v, batch.slot_mapping)

    def rotate_and_store(self, layer: int, qk: Tensor, v: Tensor, rotation: Tensor, batch: Batch) -> None:
        """See AttentionBackend. Raises ValueError for tensors that do not fit the pool."""
        rotate_and_store_kv(self._pool, self._layout, layer, qk, v, rotation, batch.slot_mapping)

    def attend(self, layer: int, q: Tensor, batch: Batch) -> Tensor:
        """See AttentionBackend. Raises ValueError for tensors that do not fit the pool."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        singles = batch.num_single_rows
        if singles:
            self._decode(layer, q[:singles], batch, out[:singles])
        if batch.num_rows > singles:
            rows = ChunkRows(batch.block_tables[singles:], batch.context_lens[singles:], batch.query_start[singles:])
            num_tokens = batch.num_tokens - singles
            prefill_attention(self._pool, self._layout, layer, q, rows, num_tokens, self._layers[layer], out)
        return out.flatten(1)

    def _decode(self, layer: int, q: Tensor, batch: Batch, out: Tensor) -> None:
        num_rows, num_q_heads = q.shape[:2]
        # A batch that is captured has its tensors overwritten between steps, so what was planned for it holds only
        # while the layers go up.
        if self._step is None or self._step[0] is not batch or layer <= self._step[1]:
            self._decode_rows.clear()
        self._step = (batch, layer)
        spec = self._layers[layer]
        rows = self._decode_rows.get(spec.window)
        if rows is None:
            tables, lens = batch.block_tables[:num_rows], batch.context_lens[:num_rows]
            rows = self._decode_rows[spec.window] = plan_decode(tables, lens, spec.window, self._layout)
        # A power of two, so that few sizes are ever made.
        room = 1 << (num_rows - 1).bit_length()
        scratch = self._scratch.get((room, num_q_heads))
        if scratch is None:
            scratch = decode_scratch(room, num_q_heads, self._layout, q.device)
            self._scratch[room, num_q_heads] = scratch
        decode_attention(self._pool, self._layout, layer, q, rows, spec, scratch, out)

"""Attention by the textbook that reads nothing but tensors of a batch, as one on a GPU does: a batch may be padded, and
its tensors may be overwritten between steps."""

from itertools import pairwise

import torch
from torch import Tensor

from engine.batch import Batch
from engine.paged_cache import PagedCache
from tests.support.toy_model import dense_attention


class PaddedAttention:
    """AttentionBackend. Rows with slot -1 write nothing. Without windows and soft-caps."""

    def __init__(self, cache: PagedCache) -> None:
        self._cache = cache

    def store(self, layer: int, k: Tensor, v: Tensor, batch: Batch) -> None:
        """See AttentionBackend."""
        real = batch.slot_mapping >= 0
        slots = batch.slot_mapping[real]
        blocks, offsets = slots // self._cache.layout.block_size, slots % self._cache.layout.block_size
        for pages, values in ((self._cache.k(layer), k), (self._cache.v(layer), v)):
            pages[blocks[offsets == 0]] = 0
            pages[blocks, :, offsets] = values[real]

    def rotate_and_store(self, layer: int, qk: Tensor, v: Tensor, rotation: Tensor, batch: Batch) -> None:
        """See AttentionBackend."""
        turns = torch.view_as_complex(rotation.view(len(rotation), 1, -1, 2))
        torch.view_as_complex(qk.view(*qk.shape[:2], -1, 2)).mul_(turns)
        self.store(layer, qk[:, -self._cache.num_kv_heads :], v, batch)

    def attend(self, layer: int, q: Tensor, batch: Batch) -> Tensor:
        """See AttentionBackend."""
        out = torch.empty_like(q)
        bounds = batch.query_start.tolist()
        for row, (first, end) in enumerate(pairwise(bounds)):
            length = int(batch.context_lens[row])
            table = batch.block_tables[row, : self._cache.layout.blocks_for(length)]
            keys, values = (
                pages[table].transpose(1, 2).flatten(0, 1)[:length]
                for pages in (self._cache.k(layer), self._cache.v(layer))
            )
            out[first:end] = dense_attention(q[first:end], keys, values, start=length - (end - first))
        return out.flatten(1)

"""A model whose numbers are exact: its logits are the same in every batch, bit by bit, and its KV can be read.

K of a token holds the token and its position. Attention reads both back from the pool for the whole context, so logits
depend on every slot that should have been read. The most likely token depends on the last two alone, in a short circle:
such text repeats itself, as text that is worth guessing does.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from engine.attention.interface import AttentionBackend, LayerAttention
from engine.attention.torch_paged import TorchAttention
from engine.batch import Batch
from engine.paged_cache import PagedCache
from kv_cache.layout import KVCacheLayout, KVDtype

LEDGER_VOCAB = 9
_SUMS = 997
_HEAD_DIM = 4


class LedgerModel:
    """One layer, one head."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self._tints = torch.rand((_SUMS, LEDGER_VOCAB), generator=generator)
        self.attention = (LayerAttention(1.0),)

    def layout(self, block_size: int) -> KVCacheLayout:
        """Of a pool for this model."""
        return KVCacheLayout("ledger", "1", 1, 1, _HEAD_DIM, block_size, KVDtype.FP32)

    def backend(self, cache: PagedCache) -> "LedgerAttention":
        """The attention that this model needs."""
        return LedgerAttention(cache)

    def forward(self, batch: Batch, attention: AttentionBackend, on_layer: Callable[[int], None]) -> Tensor:
        """[T, 3]: the token, the one before it, and a sum over its context."""
        entries = torch.zeros((batch.num_tokens, 1, _HEAD_DIM))
        entries[:, 0, 0] = batch.token_ids
        entries[:, 0, 1] = batch.positions
        attention.store(0, entries, entries, batch)
        on_layer(0)
        return attention.attend(0, entries, batch)

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, LEDGER_VOCAB]."""
        last, before, total = hidden.long().unbind(dim=1)
        logits = self._tints[total % _SUMS].clone()
        logits[torch.arange(len(hidden)), 1 + (last + before) % 4] += 3.0
        return logits


class LedgerAttention:
    """AttentionBackend that reads what the pool says of each token's context, and checks that it is a context."""

    def __init__(self, cache: PagedCache) -> None:
        self._cache = cache
        self._inner = TorchAttention(cache, (LayerAttention(1.0),))

    def store(self, layer: int, k: Tensor, v: Tensor, batch: Batch) -> None:
        """See AttentionBackend."""
        self._inner.store(layer, k, v, batch)

    def rotate_and_store(self, layer: int, qk: Tensor, v: Tensor, rotation: Tensor, batch: Batch) -> None:
        """Not for this model."""
        raise AssertionError("a ledger does not turn")

    def attend(self, layer: int, q: Tensor, batch: Batch) -> Tensor:
        """[T, 3], see `LedgerModel.forward`."""
        rows = []
        for row, (start, length) in enumerate(zip(batch.starts, batch.query_lens, strict=True)):
            token_ids = self._context(batch.block_tables[row], start + length)
            before = torch.cat((torch.zeros(1), token_ids[:-1]))
            weights = torch.arange(len(token_ids)) * 7 % 13 + 1
            rows.append(torch.stack((token_ids, before, (token_ids * weights).cumsum(0)), dim=1)[start:])
        return torch.cat(rows)

    def _context(self, block_table: Tensor, length: int) -> Tensor:
        entries = self._cache.k(layer=0)[block_table.long(), 0].flatten(0, 1)[:length]
        assert torch.equal(entries[:, 1], torch.arange(length).float()), "a slot that is not of this context was read"
        return entries[:, 0]


def stored_tokens(cache: PagedCache, block_id: int) -> list[int]:
    """Which tokens the KV in a full block is of."""
    tokens: Iterable[float] = cache.k(0)[block_id, 0, :, 0].tolist()
    return [int(token) for token in tokens]

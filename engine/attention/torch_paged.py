"""Attention in plain torch: context gathered from the pool, then multiplied. The reference, and the way without a
C compiler."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine.attention.interface import LayerAttention
from engine.attention.quantised import quantised
from engine.batch import Batch
from engine.paged_cache import PagedCache

# Tokens gathered at once for single-token rows: small enough that what is gathered is still in the CPU's cache when
# it is multiplied, large enough that the number of calls does not matter.
_GROUP_TOKENS = 2048


@dataclass(frozen=True, slots=True, eq=False)
class _SingleRows:
    """Single-token rows of similar context length, read together."""

    tokens: slice
    num_rows: int
    tile_index: Tensor
    hidden: Tensor  # bool [num_rows, 1, 1, L]: behind the context, or before the window


@dataclass(frozen=True, slots=True, eq=False)
class _Chunk:
    """Several tokens of one sequence."""

    tokens: slice
    context_len: int
    tile_index: Tensor
    mask: Tensor | None  # bool [tokens, context_len], True = look at it; None = plain causal, nothing before the chunk


class TorchAttention:
    """AttentionBackend with fp32 accumulation."""

    def __init__(self, cache: PagedCache, layers: Sequence[LayerAttention]) -> None:
        """`layers`: one entry for each layer of the pool."""
        self._cache = cache
        self._layers = tuple(layers)
        self._planned_for: Batch | None = None
        # By window: one plan serves all layers that look back equally far.
        self._plans: dict[int | None, tuple[list[_SingleRows], list[_Chunk]]] = {}

    def store(self, layer: int, k: Tensor, v: Tensor, batch: Batch) -> None:
        """See AttentionBackend."""
        cache = self._cache
        if not cache.layout.dtype.has_scales:
            _write(cache.k(layer), k.to(cache.dtype), batch)
            _write(cache.v(layer), v.to(cache.dtype), batch)
            return
        for rows, pages, scale_pages in (
            (k, cache.k(layer), cache.k_scales(layer)),
            (v, cache.v(layer), cache.v_scales(layer)),
        ):
            codes, scales = quantised(rows, cache.dtype)
            _write(pages, codes, batch)
            _write(scale_pages, scales, batch)

    def rotate_and_store(self, layer: int, qk: Tensor, v: Tensor, rotation: Tensor, batch: Batch) -> None:
        """See AttentionBackend."""
        turns = torch.view_as_complex(rotation.view(len(rotation), 1, -1, 2))
        torch.view_as_complex(qk.view(*qk.shape[:2], -1, 2)).mul_(turns)
        self.store(layer, qk[:, -self._cache.num_kv_heads :], v, batch)

    def attend(self, layer: int, q: Tensor, batch: Batch) -> Tensor:
        """See AttentionBackend. Raises ValueError when the q heads are no multiple of the kv heads."""
        if q.shape[1] % self._cache.num_kv_heads:
            raise ValueError(f"{q.shape[1]} q heads over {self._cache.num_kv_heads} kv heads")
        if self._planned_for is not batch:
            self._plans.clear()
            self._planned_for = batch
        window = self._layers[layer].window
        if window not in self._plans:
            self._plans[window] = (self._plan_single_rows(batch, window), self._plan_chunks(batch, window))
        out = torch.empty_like(q)
        single_rows, chunks = self._plans[window]
        for rows in single_rows:
            out[rows.tokens] = self._attend_single_rows(layer, q[rows.tokens], rows)
        for chunk in chunks:
            out[chunk.tokens] = self._attend_chunk(layer, q[chunk.tokens], chunk)
        return out.flatten(1)

    def _attend_single_rows(self, layer: int, q: Tensor, rows: _SingleRows) -> Tensor:
        """q [S, num_q_heads, head_dim] -> the same shape."""
        keys, values = self._gather(layer, rows.tile_index, rows.num_rows)
        # [S * kv heads, group, head_dim]
        queries = (q.float() * self._layers[layer].scale).view(len(keys), -1, q.shape[-1])
        scores = torch.bmm(queries, keys.transpose(1, 2)).view(rows.num_rows, -1, queries.shape[1], keys.shape[1])
        scores = _capped(scores, self._layers[layer].soft_cap)
        # Filling, not adding -inf, also hides a NaN behind the context.
        scores.masked_fill_(rows.hidden, -torch.inf)
        weights = scores.softmax(dim=-1).view(len(keys), queries.shape[1], -1)
        return torch.bmm(weights, values).view_as(q)

    def _attend_chunk(self, layer: int, q: Tensor, chunk: _Chunk) -> Tensor:
        """q [n, num_q_heads, head_dim] -> the same shape."""
        keys, values = self._gather(layer, chunk.tile_index, 1)
        num_tokens, num_q_heads, head_dim = q.shape
        group = num_q_heads // len(keys)
        # kv heads are the batch and the q heads of each its heads: K and V are broadcast, never repeated in memory.
        queries = q.float().view(num_tokens, len(keys), group, head_dim).permute(1, 2, 0, 3)
        keys = keys[:, None, : chunk.context_len].expand(-1, group, -1, -1)
        values = values[:, None, : chunk.context_len].expand(-1, group, -1, -1)
        if self._layers[layer].soft_cap is None:
            out = scaled_dot_product_attention(
                queries,
                keys,
                values,
                attn_mask=chunk.mask,
                is_causal=chunk.mask is None,
                scale=self._layers[layer].scale,
            )
        else:
            out = self._attend_capped(layer, queries, keys, values, chunk.mask)
        return out.permute(2, 0, 1, 3).reshape_as(q)

    def _attend_capped(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """What scaled_dot_product_attention cannot do. Shapes: [kv heads, group, tokens, head_dim]."""
        scores = torch.matmul(queries * self._layers[layer].scale, keys.transpose(-1, -2))
        scores = _capped(scores, self._layers[layer].soft_cap)
        if mask is None:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril_()
        return torch.matmul(scores.masked_fill_(~mask, -torch.inf).softmax(dim=-1), values)

    def _gather(self, layer: int, tile_index: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
        keys, values = self._cache.gather(layer, tile_index, num_rows)
        return keys.float(), values.float()

    def _plan_single_rows(self, batch: Batch, window: int | None) -> list[_SingleRows]:
        """Cut the single-token rows, sorted by context length, into groups that waste little on padding."""
        size = self._cache.layout.block_size
        blocks = [start // size + 1 for start in batch.starts[: batch.num_single_rows]]
        groups: list[_SingleRows] = []
        low = 0
        for high in range(1, len(blocks) + 1):
            if high < len(blocks) and _may_join(blocks, low, high, size):
                continue
            width = blocks[high - 1]
            context_lens = batch.context_lens[low:high, None, None, None]
            index = torch.arange(width * size)
            hidden = index >= context_lens
            if window is not None:
                hidden |= index < context_lens - window
            groups.append(
                _SingleRows(
                    tokens=slice(low, high),
                    num_rows=high - low,
                    tile_index=self._cache.tile_index(batch.block_tables[low:high, :width]),
                    hidden=hidden,
                )
            )
            low = high
        return groups

    def _plan_chunks(self, batch: Batch, window: int | None) -> list[_Chunk]:
        chunks: list[_Chunk] = []
        first = batch.num_single_rows
        for row in range(batch.num_single_rows, batch.num_rows):
            start, length = batch.starts[row], batch.query_lens[row]
            context_len = start + length
            table = batch.block_tables[row : row + 1, : self._cache.layout.blocks_for(context_len)]
            mask = None
            if start or (window is not None and window < context_len):
                mask = torch.ones(length, context_len, dtype=torch.bool).tril_(diagonal=start)
                if window is not None:
                    mask.triu_(diagonal=start - window + 1)
            chunks.append(_Chunk(slice(first, first + length), context_len, self._cache.tile_index(table), mask))
            first += length
        return chunks


def _may_join(blocks: list[int], low: int, high: int, block_size: int) -> bool:
    """Whether row `high` may be read together with rows low..high-1 (`blocks`: blocks a row, ascending)."""
    width = blocks[high]
    return width <= 2 * blocks[low] + 2 and (high + 1 - low) * width * block_size <= _GROUP_TOKENS


def _write(pages: Tensor, values: Tensor, batch: Batch) -> None:
    """values [T, num_kv_heads, ...] into their slots of pages [num_blocks, num_kv_heads, block_size, ...]."""
    if len(batch.opened_blocks):
        pages[batch.opened_blocks] = 0
    pages[batch.slot_blocks, :, batch.slot_offsets] = values


def _capped(scores: Tensor, soft_cap: float | None) -> Tensor:
    return scores if soft_cap is None else (scores / soft_cap).tanh_().mul_(soft_cap)

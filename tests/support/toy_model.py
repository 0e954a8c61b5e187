"""A tiny seeded attention model that uses an attention backend, and the same model without any cache."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.attention.interface import AttentionBackend, LayerAttention
from engine.attention.torch_paged import TorchAttention
from engine.batch import Batch
from engine.paged_cache import PagedCache
from kv_cache.layout import KVCacheLayout, KVDtype

VOCAB_SIZE = 61


class ToyModel:
    """Two layers of attention over embeddings that know their position. Sharp attention: every block matters."""

    def __init__(self, *, num_q_heads: int = 4, num_kv_heads: int = 2, head_dim: int = 8, seed: int = 7) -> None:
        draw = torch.Generator().manual_seed(seed)
        hidden = 24

        def weight(*shape: int, scale: float) -> Tensor:
            return torch.randn(shape, generator=draw) * scale

        self.num_layers = 2
        self.num_q_heads, self.num_kv_heads, self.head_dim = num_q_heads, num_kv_heads, head_dim
        self.nan_token_ids: frozenset[int] = frozenset()
        self._embed = weight(VOCAB_SIZE, hidden, scale=1.0)
        self._position = weight(512, hidden, scale=0.5)
        width = (num_q_heads + 2 * num_kv_heads) * head_dim
        self._qkv = [weight(hidden, width, scale=0.45) for _ in range(self.num_layers)]
        self._out = [weight(num_q_heads * head_dim, hidden, scale=0.4) for _ in range(self.num_layers)]
        self._head = weight(hidden, VOCAB_SIZE, scale=0.4)

    def layout(self, block_size: int, dtype: KVDtype = KVDtype.FP32) -> KVCacheLayout:
        """Of a pool for this model."""
        return KVCacheLayout("toy", "1", self.num_layers, self.num_kv_heads, self.head_dim, block_size, dtype)

    @property
    def attention(self) -> tuple[LayerAttention, ...]:
        """How each layer looks back."""
        return (LayerAttention(self.head_dim**-0.5),) * self.num_layers

    def backend(self, cache: PagedCache) -> TorchAttention:
        """Attention over a pool for this model."""
        return TorchAttention(cache, self.attention)

    def forward(self, batch: Batch, attention: AttentionBackend, on_layer: Callable[[int], None]) -> Tensor:
        """Hidden states [T, hidden]. Tokens in `nan_token_ids` make their own sequence's state NaN."""
        x = self._embed[batch.token_ids] + self._position[batch.positions]
        for token_id in self.nan_token_ids:
            x[batch.token_ids == token_id] = torch.nan
        for layer in range(self.num_layers):
            q, k, v = self._project(layer, x)
            attention.store(layer, k, v, batch)
            on_layer(layer)
            x = x + attention.attend(layer, q, batch) @ self._out[layer]
        return _normed(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 [R, vocab]."""
        return hidden @ self._head

    def dense_logits(self, token_ids: Sequence[int]) -> Tensor:
        """Logits [n, vocab] after every token of one sequence, computed at once and without a cache."""
        n = len(token_ids)
        x = self._embed[torch.tensor(token_ids)] + self._position[:n]
        for layer in range(self.num_layers):
            q, k, v = self._project(layer, x)
            x = x + dense_attention(q, k, v).flatten(1) @ self._out[layer]
        return _normed(x) @ self._head

    def _project(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads = (_normed(x) @ self._qkv[layer]).view(len(x), -1, self.head_dim)
        q_end, k_end = self.num_q_heads, self.num_q_heads + self.num_kv_heads
        return heads[:, :q_end], heads[:, q_end:k_end], heads[:, k_end:]


def _normed(x: Tensor) -> Tensor:
    return x / x.square().mean(dim=-1, keepdim=True).sqrt()


def dense_attention(q: Tensor, k: Tensor, v: Tensor, start: int = 0, look: LayerAttention | None = None) -> Tensor:
    """Causal attention by the textbook, in fp64: q [n, q_heads, d] at positions start, ...; k, v [L, kv_heads, d]."""
    look = look or LayerAttention(q.shape[-1] ** -0.5)
    group = q.shape[1] // k.shape[1]
    keys = k.double().repeat_interleave(group, dim=1)
    values = v.double().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * look.scale
    if look.soft_cap is not None:
        scores = look.soft_cap * (scores / look.soft_cap).tanh()
    distance = start + torch.arange(len(q))[:, None] - torch.arange(len(k))[None, :]
    visible = (distance >= 0) & (distance < (look.window or len(k)))
    weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)

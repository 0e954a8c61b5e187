"""What a model needs of attention, whoever computes it.

The new tokens of a step are stored first, then everything is read through block tables: chunks of prompts, cached
prefixes and single tokens are one case. Heads are in the order of a prepared model (`engine.tensor_map`): the two
numbers that rotary embedding turns together are neighbours.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.batch import Batch


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """How one layer looks back.

    `scale` multiplies q . k. `window`: a token sees itself and the `window - 1` tokens before it; None = all of them.
    `soft_cap` c: scores (scaled) become c * tanh(score / c) before the softmax; None = they stay as they are.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None


class AttentionBackend(Protocol):
    """KV of a step into the pool, attention out of it. Owner thread only; in each layer one call to one of the two
    `store`s, then one to `attend`. Tensors are on the device of the pool; T is the number of tokens in the batch."""

    def store(self, layer: int, k: Tensor, v: Tensor, batch: Batch) -> None:
        """Write K and V (each [T, num_kv_heads, head_dim], any float dtype) of the batch's tokens into their slots.

        Slots of a block behind the last token written are zero: nothing a former owner left there can be read or sent.
        """
        ...

    def rotate_and_store(self, layer: int, qk: Tensor, v: Tensor, rotation: Tensor, batch: Batch) -> None:
        """Turn qk [T, num_q_heads + num_kv_heads, head_dim] in place, then `store` its K and v.

        v: [T, num_kv_heads, head_dim]. rotation: fp32 [T, head_dim], contiguous: cos and sin of each pair's angle, side
        by side. qk and v may be views into one wider matrix: heads are contiguous, tokens a constant stride apart.
        """
        ...

    def attend(self, layer: int, q: Tensor, batch: Batch) -> Tensor:
        """Causal attention of q [T, num_q_heads, head_dim] (rotated, not scaled) over each row's context.

        Returns [T, num_q_heads * head_dim] in q's dtype, contiguous; it may be overwritten by the next call.
        """
        ...

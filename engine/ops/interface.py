"""The operations that models are written in, whoever computes them.

A decoder is a row of these and of an AttentionBackend; the device, the dtype of weights and activations, and how a
model is split over ranks are decided by the implementation alone.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """A projection y = x @ weight.T + bias. weight [N, K] in any weight dtype, contiguous; `scales` fp32 [N] (one an
    output) exist exactly for int8; `bias` fp32 [N] or None."""

    weight: Tensor
    bias: Tensor | None = None
    scales: Tensor | None = None


class Gate(Enum):
    """What a gated MLP does to its gate."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"


class Ops(Protocol):
    """Activations x are [T, ...], contiguous in their last dimension, all in one dtype: fp32 on CPU. One thread at a
    time. Results may be overwritten by the next call of the same method unless they were given in."""

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """Rows of table [vocab, hidden] (any weight dtype) for int64 ids [T]: a fresh [T, hidden] of activations."""
        ...

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        """[T, K] -> [T, N]. Split over ranks: each rank has, and returns, its own outputs."""
        ...

    def add_linear(self, x: Tensor, y: Tensor, linear: Linear) -> None:
        """x [T, N] += linear(y [T, K]), in place. Split over ranks: each has its own inputs, all get the whole sum."""
        ...

    def logits(self, x: Tensor, linear: Linear) -> Tensor:
        """fp32 [R, vocab] of hidden states [R, hidden], whole on the rank that samples."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in a new tensor.

        weight: fp32, of a shape that x can be multiplied with: [d], or [heads, d] for x [T, heads, d] (heads
        contiguous, tokens a constant stride apart).
        """
        ...

    def gated(self, gate_up: Tensor, gate: Gate) -> Tensor:
        """gate(first half) * second half: [T, 2 * n] -> [T, n]. May overwrite its input."""
        ...

"""What a layer does to each token by itself: one gated MLP, or a few of many.

T is the number of tokens in a batch, n the width of an MLP.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.model_config import ExpertsConfig
from engine.ops.interface import Gate, Linear, Ops


class FeedForward(Protocol):
    """The part of a layer behind its attention."""

    def add_to(self, x: Tensor, normed: Tensor, ops: Ops) -> None:
        """x [T, hidden] += f(normed [T, hidden]), in place. `normed` is not changed, and read before any other call
        of `ops.rms_norm`."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class GatedMlp:
    """down(gate(x @ gate) * (x @ up))."""

    gate_up: Linear  # [2 * n, hidden]
    down: Linear  # [hidden, n]
    gate: Gate

    def add_to(self, x: Tensor, normed: Tensor, ops: Ops) -> None:
        """See FeedForward."""
        ops.add_linear(x, ops.gated(ops.linear(normed, self.gate_up), self.gate), self.down)


@dataclass(frozen=True, slots=True, eq=False)
class Experts:
    """A weighted sum of the MLPs that a router chooses for each token. Only chosen ones run."""

    router: Linear  # [num_experts, hidden], whole on every rank
    mlps: Sequence[GatedMlp]
    config: ExpertsConfig

    def add_to(self, x: Tensor, normed: Tensor, ops: Ops) -> None:
        """See FeedForward. A token's experts are added in the order of their numbers, whatever else is in the batch."""
        weights, chosen = self._route(ops.linear(normed, self.router))
        # The T * k (token, expert) pairs by expert, so that each expert multiplies one block of rows.
        pairs = chosen.flatten()
        order = pairs.argsort(stable=True)
        tokens = order // self.config.experts_per_token
        inputs = normed[tokens]
        outputs = torch.zeros_like(inputs)
        first = 0
        for expert, rows in enumerate(pairs.bincount(minlength=self.config.num_experts).tolist()):
            if rows:
                self.mlps[expert].add_to(outputs[first : first + rows], inputs[first : first + rows], ops)
            first += rows
        outputs.mul_(weights.flatten()[order].unsqueeze(1))
        x.index_add_(0, tokens, outputs)

    def _route(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Of scores [T, num_experts]: weights fp32 and experts int64, each [T, experts_per_token]."""
        weights, chosen = scores.float().softmax(dim=-1).topk(self.config.experts_per_token, dim=-1)
        if self.config.normalise:
            weights /= weights.sum(dim=-1, keepdim=True)
        return weights, chosen

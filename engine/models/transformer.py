"""The decoder that all native families share, on flattened tokens and a paged KV cache.

Small models on a CPU spend much of a step between operations, not in them. So each layer is written in as few
operations as possible: fused projections (see engine.tensor_map), rotation and storing in one, residual sums inside the
matrix products, and no modules in between.

T is the number of tokens in a batch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import add

import torch
from torch import Tensor

from engine.attention.interface import AttentionBackend
from engine.batch import Batch
from engine.model_config import ModelConfig
from engine.models.feed_forward import Experts, FeedForward, GatedMlp
from engine.models.rotary import RotaryTable
from engine.ops.interface import Linear, Ops


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer."""

    input_norm: Tensor  # [hidden]
    qkv: Linear  # [(q_heads + 2 * kv_heads) * head_dim, hidden]
    qk_norm: Tensor | None  # [q_heads + kv_heads, head_dim]
    attention_out: Linear  # [hidden, q_heads * head_dim]
    attention_out_norm: Tensor | None  # [hidden]
    mlp_norm: Tensor  # [hidden]
    mlp: FeedForward
    mlp_out_norm: Tensor | None  # [hidden]


class Transformer:
    """A decoder-only model. Holds no state of sequences; used by one thread at a time, best under inference_mode."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor], ops: Ops) -> None:
        """`weights` are those that `tensor_map.prepared_tensors(config)` lists. They are used in place."""
        self.config = config
        self._ops = ops
        self._embed = weights["embed.weight"]
        self._layers = [_layer(config, weights, index) for index in range(config.num_layers)]
        self._final_norm = weights["final_norm.weight"]
        self._lm_head = _linear(weights, "embed" if config.tied_embeddings else "lm_head")
        self._rotary = RotaryTable(config.rope, config.head_dim)
        self._window_rotary = RotaryTable(config.window_rope, config.head_dim) if config.window_rope else None
        self._windowed = tuple(layer.window is not None for layer in config.attention)
        self._qk_heads = config.num_q_heads + config.num_kv_heads

    def forward(self, batch: Batch, attention: AttentionBackend, on_layer: Callable[[int], None]) -> Tensor:
        """Hidden states [T, hidden] after the last norm.

        In each layer the K and V of all T tokens are stored, then `on_layer(layer)` is called: from then on they are
        final. Attention follows.
        """
        ops, eps = self._ops, self.config.rms_norm_eps
        x = ops.embed(batch.token_ids, self._embed)
        if self.config.embedding_scale != 1.0:
            x.mul_(self.config.embedding_scale)
        longest = max(map(add, batch.starts, batch.query_lens))
        rotation = window_rotation = self._rotary.rows(batch.positions, longest)
        if self._window_rotary is not None:
            window_rotation = self._window_rotary.rows(batch.positions, longest)
        for index, layer in enumerate(self._layers):
            qk, v = self._project(layer, x)
            turns = window_rotation if self._windowed[index] else rotation
            attention.rotate_and_store(index, qk, v, turns, batch)
            on_layer(index)
            attended = attention.attend(index, qk[:, : self.config.num_q_heads], batch)
            branch = _branch(x, layer.attention_out_norm)
            ops.add_linear(branch, attended, layer.attention_out)
            if layer.attention_out_norm is not None:
                x += ops.rms_norm(branch, layer.attention_out_norm, eps)
            branch = _branch(x, layer.mlp_out_norm)
            layer.mlp.add_to(branch, ops.rms_norm(x, layer.mlp_norm, eps), ops)
            if layer.mlp_out_norm is not None:
                x += ops.rms_norm(branch, layer.mlp_out_norm, eps)
        return ops.rms_norm(x, self._final_norm, eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, vocab] for rows [R, hidden] of what `forward` returned."""
        logits = self._ops.logits(hidden, self._lm_head)
        cap = self.config.logits_soft_cap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def _project(self, layer: Layer, x: Tensor) -> tuple[Tensor, Tensor]:
        """q and k side by side [T, q_heads + kv_heads, head_dim], not rotated yet, and v [T, kv_heads, head_dim]."""
        ops, config = self._ops, self.config
        qkv = ops.linear(ops.rms_norm(x, layer.input_norm, config.rms_norm_eps), layer.qkv)
        heads = qkv.view(len(qkv), -1, config.head_dim)
        qk, v = heads[:, : self._qk_heads], heads[:, self._qk_heads :]
        if layer.qk_norm is not None:
            qk = ops.rms_norm(qk, layer.qk_norm, config.rms_norm_eps)
        return qk, v


def _branch(x: Tensor, norm: Tensor | None) -> Tensor:
    """Where a sublayer adds its result: to the residual itself, or to zeros that are normed first."""
    return x if norm is None else torch.zeros_like(x)


def _layer(config: ModelConfig, weights: Mapping[str, Tensor], index: int) -> Layer:
    prefix = f"layers.{index}."
    qk_norm = None
    if config.qk_norm:
        q = weights[f"{prefix}q_norm.weight"].expand(config.num_q_heads, -1)
        k = weights[f"{prefix}k_norm.weight"].expand(config.num_kv_heads, -1)
        qk_norm = torch.cat((q, k))
    return Layer(
        input_norm=weights[f"{prefix}input_norm.weight"],
        qkv=_linear(weights, f"{prefix}qkv"),
        qk_norm=qk_norm,
        attention_out=_linear(weights, f"{prefix}attention_out"),
        attention_out_norm=weights.get(f"{prefix}attention_out_norm.weight"),
        mlp_norm=weights[f"{prefix}mlp_norm.weight"],
        mlp=_feed_forward(config, weights, index),
        mlp_out_norm=weights.get(f"{prefix}mlp_out_norm.weight"),
    )


def _feed_forward(config: ModelConfig, weights: Mapping[str, Tensor], index: int) -> FeedForward:
    def mlp(prefix: str) -> GatedMlp:
        return GatedMlp(_linear(weights, f"{prefix}gate_up"), _linear(weights, f"{prefix}down"), config.gate)

    prefix, experts = f"layers.{index}.", config.experts
    if experts is None or index not in experts.layers:
        return mlp(prefix)
    mlps = [mlp(f"{prefix}experts.{number}.") for number in range(experts.num_experts)]
    return Experts(_linear(weights, f"{prefix}router"), mlps, experts)


def _linear(weights: Mapping[str, Tensor], name: str) -> Linear:
    return Linear(weights[f"{name}.weight"], weights.get(f"{name}.bias"), weights.get(f"{name}.scales"))

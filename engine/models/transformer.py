"""The decoder that Llama, Qwen2 and Qwen3 share, on flattened tokens and a paged KV cache.

Small models on a CPU spend much of a step between operations, not in them. So each layer is written in as few
operations as possible: fused projections (see engine.tensor_map), rotary embedding as one complex product in place,
residual sums inside the matrix products, and no modules in between.

All tensors are fp32. T is the number of tokens in a batch.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from engine.attention import AttentionBackend
from engine.batch import Batch
from engine.model_config import ModelConfig
from engine.models.rotary import RotaryTable


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension.

    With d elements the divisor is hypot(|x|, sqrt(d * eps)) / sqrt(d): four operations where the textbook form takes
    six, and two and a half to six times as fast as torch's own.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        """`weight` has any shape that x can be multiplied with; its last dimension is normalised."""
        size = weight.shape[-1]
        self._scaled_weight = weight * math.sqrt(size)
        self._floor = torch.tensor(math.sqrt(size * eps))

    def __call__(self, x: Tensor) -> Tensor:
        """A new tensor of x's shape [..., d]."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(self._floor)
        return torch.div(x, length).mul_(self._scaled_weight)


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer. Products that add to the residual stream keep theirs transposed, as addmm wants it."""

    input_norm: RMSNorm
    qkv: Tensor  # [(q_heads + 2 * kv_heads) * head_dim, hidden]
    qkv_bias: Tensor | None
    qk_norm: RMSNorm | None  # weight [q_heads + kv_heads, head_dim]
    attention_out: Tensor  # [q_heads * head_dim, hidden]
    attention_out_bias: Tensor | None
    mlp_norm: RMSNorm
    gate_up: Tensor  # [2 * intermediate, hidden]
    gate_up_bias: Tensor | None
    down: Tensor  # [intermediate, hidden]
    down_bias: Tensor | None


class Transformer:
    """A decoder-only model. Holds no state of sequences; used by one thread at a time, best under inference_mode."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor]) -> None:
        """`weights` are those that `tensor_map.prepared_tensors(config)` lists, fp32. They are used in place."""
        self.config = config
        self._embed = weights["embed.weight"]
        self._layers = [_layer(config, weights, f"layers.{index}.") for index in range(config.num_layers)]
        self._final_norm = RMSNorm(weights["final_norm.weight"], config.rms_norm_eps)
        self._lm_head = weights["embed.weight" if config.tied_embeddings else "lm_head.weight"]
        self._rotary = RotaryTable(config.rope, config.head_dim)
        self._qk_width = (config.num_q_heads + config.num_kv_heads) * config.head_dim

    def forward(self, batch: Batch, attention: AttentionBackend, on_layer: Callable[[int], None]) -> Tensor:
        """Hidden states [T, hidden] after the last norm.

        In each layer the K and V of all T tokens are stored, then `on_layer(layer)` is called: from then on they are
        final. Attention follows.
        """
        x = functional.embedding(batch.token_ids, self._embed)
        rotation = self._rotary.rows(batch.positions).unsqueeze(1)
        for index, layer in enumerate(self._layers):
            q, k, v = self._project(layer, x, rotation)
            attention.store(index, k, v, batch)
            on_layer(index)
            _add_product(x, attention.attend(index, q, batch), layer.attention_out, layer.attention_out_bias)
            _add_product(x, _gated(layer, layer.mlp_norm(x)), layer.down, layer.down_bias)
        return self._final_norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, vocab] for rows [R, hidden] of what `forward` returned."""
        return functional.linear(hidden, self._lm_head)

    def _project(self, layer: Layer, x: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [T, q_heads, head_dim], k and v [T, kv_heads, head_dim] for this layer, q and k rotated."""
        config = self.config
        qkv = functional.linear(layer.input_norm(x), layer.qkv, layer.qkv_bias)
        qk = qkv[:, : self._qk_width].view(-1, config.num_q_heads + config.num_kv_heads, config.head_dim)
        if layer.qk_norm is not None:
            qk = layer.qk_norm(qk)
        torch.view_as_complex(qk.view(*qk.shape[:2], -1, 2)).mul_(rotation)
        v = qkv[:, self._qk_width :].view(-1, config.num_kv_heads, config.head_dim)
        return qk[:, : config.num_q_heads], qk[:, config.num_q_heads :], v


def _gated(layer: Layer, x: Tensor) -> Tensor:
    """silu(gate) * up, [T, intermediate]."""
    gate, up = functional.linear(x, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
    return functional.silu(gate, inplace=True).mul_(up)


def _add_product(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """x += y @ weight + bias, in place."""
    x.addmm_(y, weight)
    if bias is not None:
        x.add_(bias)


def _layer(config: ModelConfig, weights: Mapping[str, Tensor], prefix: str) -> Layer:
    qk_norm = None
    if config.qk_norm:
        q = weights[f"{prefix}q_norm.weight"].expand(config.num_q_heads, -1)
        k = weights[f"{prefix}k_norm.weight"].expand(config.num_kv_heads, -1)
        qk_norm = RMSNorm(torch.cat((q, k)), config.rms_norm_eps)
    return Layer(
        input_norm=RMSNorm(weights[f"{prefix}input_norm.weight"], config.rms_norm_eps),
        qkv=weights[f"{prefix}qkv.weight"],
        qkv_bias=weights[f"{prefix}qkv.bias"] if config.qkv_bias else None,
        qk_norm=qk_norm,
        attention_out=weights[f"{prefix}attention_out.weight"].t(),
        attention_out_bias=weights[f"{prefix}attention_out.bias"] if config.attention_out_bias else None,
        mlp_norm=RMSNorm(weights[f"{prefix}mlp_norm.weight"], config.rms_norm_eps),
        gate_up=weights[f"{prefix}gate_up.weight"],
        gate_up_bias=weights[f"{prefix}gate_up.bias"] if config.mlp_bias else None,
        down=weights[f"{prefix}down.weight"].t(),
        down_bias=weights[f"{prefix}down.bias"] if config.mlp_bias else None,
    )

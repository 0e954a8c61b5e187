"""Which tensors a prepared model has, and which tensors of a checkpoint each is made from.

kvferry fuses the projections that read the same input (q, k, v; gate, up), because one wide product is cheaper than
three narrow ones. It also reorders the rows of q and k so that the two numbers that rotary embedding turns together
are neighbours, which makes the rotation one complex multiplication:

    checkpoint, a head's rows:  a0 a1 a2 a3 b0 b1 b2 b3     (ai, bi) turn by the angle of frequency i
    prepared:                   a0 b0 a1 b1 a2 b2 a3 b3

q and k are reordered alike, so their products, and with them the logits, do not change. The K in the cache does:
PREPARED_FORMAT is part of a model's revision, and two workers that disagree on the order refuse each other.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from engine.model_config import ModelConfig, unusable

PREPARED_FORMAT = 1


@dataclass(frozen=True, slots=True)
class SourcePart:
    """A tensor of the checkpoint, by the name transformers gives it. `rotary` rows are to be paired per head."""

    name: str
    shape: tuple[int, ...]
    rotary: bool = False


@dataclass(frozen=True, slots=True)
class PreparedTensor:
    """A tensor of the prepared file: its parts, one below the other."""

    name: str
    parts: tuple[SourcePart, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the fused tensor."""
        return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])

    @property
    def num_elements(self) -> int:
        """Product of the shape."""
        return prod(self.shape)


def prepared_tensors(config: ModelConfig) -> tuple[PreparedTensor, ...]:
    """All tensors of a prepared model, in file order, which is the order in which a forward pass reads them."""
    vocab = (config.vocab_size, config.hidden_size)
    tensors = [_single("embed.weight", "model.embed_tokens.weight", *vocab)]
    for layer in range(config.num_layers):
        tensors += _layer_tensors(config, f"layers.{layer}.", f"model.layers.{layer}.")
    tensors.append(_single("final_norm.weight", "model.norm.weight", config.hidden_size))
    if not config.tied_embeddings:
        tensors.append(_single("lm_head.weight", "lm_head.weight", *vocab))
    return tuple(tensors)


def fuse(tensor: PreparedTensor, head_dim: int, read: Callable[[str], Tensor]) -> Tensor:
    """One prepared tensor, fp32 and contiguous, from its parts as `read(name)` gives them.

    Raises KvferryError for a part of another shape or type, and for numbers that are not finite.
    """
    fused = torch.empty(tensor.shape, dtype=torch.float32)
    row = 0
    for part in tensor.parts:
        value = read(part.name)
        if tuple(value.shape) != part.shape:
            raise unusable(f"{part.name} has shape {list(value.shape)}, but config.json asks for {list(part.shape)}")
        if value.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise unusable(f"{part.name} is {value.dtype}: only fp32, fp16 and bf16 weights are supported")
        target = fused[row : row + part.shape[0]]
        target.copy_(pair_rotary_rows(value, head_dim) if part.rotary else value)
        row += part.shape[0]
    if not torch.isfinite(fused).all():
        raise unusable(f"{tensor.name} has numbers that are not finite: the checkpoint is damaged")
    return fused


def split(tensor: PreparedTensor, head_dim: int, fused: Tensor) -> dict[str, Tensor]:
    """The inverse of `fuse`: the checkpoint's tensors by name, in transformers' order of rows. For comparisons."""
    parts: dict[str, Tensor] = {}
    row = 0
    for part in tensor.parts:
        value = fused[row : row + part.shape[0]]
        parts[part.name] = unpair_rotary_rows(value, head_dim) if part.rotary else value
        row += part.shape[0]
    return parts


def pair_rotary_rows(rows: Tensor, head_dim: int) -> Tensor:
    """Halves to neighbours: [heads * head_dim, ...] in transformers' order -> the same shape in the prepared order."""
    return rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def unpair_rotary_rows(rows: Tensor, head_dim: int) -> Tensor:
    """Neighbours to halves: the inverse of `pair_rotary_rows`."""
    return rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _layer_tensors(config: ModelConfig, to: str, source: str) -> list[PreparedTensor]:
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_rows, kv_rows = config.num_q_heads * head_dim, config.num_kv_heads * head_dim
    attention, mlp = f"{source}self_attn.", f"{source}mlp."
    qkv = (("q_proj", q_rows, True), ("k_proj", kv_rows, True), ("v_proj", kv_rows, False))
    tensors = [
        _single(f"{to}input_norm.weight", f"{source}input_layernorm.weight", hidden),
        PreparedTensor(
            f"{to}qkv.weight",
            tuple(SourcePart(f"{attention}{name}.weight", (rows, hidden), rotary) for name, rows, rotary in qkv),
        ),
    ]
    if config.qkv_bias:
        parts = tuple(SourcePart(f"{attention}{name}.bias", (rows,), rotary) for name, rows, rotary in qkv)
        tensors.append(PreparedTensor(f"{to}qkv.bias", parts))
    if config.qk_norm:
        for name in ("q_norm", "k_norm"):
            part = SourcePart(f"{attention}{name}.weight", (head_dim,), rotary=True)
            tensors.append(PreparedTensor(f"{to}{name}.weight", (part,)))
    tensors.append(_single(f"{to}attention_out.weight", f"{attention}o_proj.weight", hidden, q_rows))
    if config.attention_out_bias:
        tensors.append(_single(f"{to}attention_out.bias", f"{attention}o_proj.bias", hidden))
    tensors.append(_single(f"{to}mlp_norm.weight", f"{source}post_attention_layernorm.weight", hidden))
    gate_up = tuple(SourcePart(f"{mlp}{name}.weight", (inner, hidden)) for name in ("gate_proj", "up_proj"))
    tensors.append(PreparedTensor(f"{to}gate_up.weight", gate_up))
    if config.mlp_bias:
        biases = tuple(SourcePart(f"{mlp}{name}.bias", (inner,)) for name in ("gate_proj", "up_proj"))
        tensors.append(PreparedTensor(f"{to}gate_up.bias", biases))
    tensors.append(_single(f"{to}down.weight", f"{mlp}down_proj.weight", hidden, inner))
    if config.mlp_bias:
        tensors.append(_single(f"{to}down.bias", f"{mlp}down_proj.bias", hidden))
    return tensors


def _single(name: str, source: str, *shape: int) -> PreparedTensor:
    return PreparedTensor(name, (SourcePart(source, shape),))

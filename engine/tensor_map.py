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
    """A tensor of the checkpoint, by the name transformers gives it. `rotary` rows are to be paired per head; `offset`
    is added to every number."""

    name: str
    shape: tuple[int, ...]
    rotary: bool = False
    offset: float = 0.0


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
    model = f"{config.checkpoint_prefix}model."
    tensors = [_single("embed.weight", f"{model}embed_tokens.weight", *vocab)]
    for layer in range(config.num_layers):
        tensors += _attention_tensors(config, f"layers.{layer}.", f"{model}layers.{layer}.")
        tensors += _mlp_tensors(config, layer, f"layers.{layer}.", f"{model}layers.{layer}.")
    tensors.append(_norm(config, "final_norm", f"{model}norm"))
    if not config.tied_embeddings:
        tensors.append(_single("lm_head.weight", f"{config.checkpoint_prefix}lm_head.weight", *vocab))
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
        if part.offset:
            target.add_(part.offset)
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
        if part.offset:
            value = value - part.offset
        parts[part.name] = unpair_rotary_rows(value, head_dim) if part.rotary else value
        row += part.shape[0]
    return parts


def pair_rotary_rows(rows: Tensor, head_dim: int) -> Tensor:
    """Halves to neighbours: [heads * head_dim, ...] in transformers' order -> the same shape in the prepared order."""
    return rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def unpair_rotary_rows(rows: Tensor, head_dim: int) -> Tensor:
    """Neighbours to halves: the inverse of `pair_rotary_rows`."""
    return rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _attention_tensors(config: ModelConfig, to: str, source: str) -> list[PreparedTensor]:
    hidden, head_dim = config.hidden_size, config.head_dim
    q_rows, kv_rows = config.num_q_heads * head_dim, config.num_kv_heads * head_dim
    attention = f"{source}self_attn."
    qkv = (("q_proj", q_rows, True), ("k_proj", kv_rows, True), ("v_proj", kv_rows, False))
    tensors = [
        _norm(config, f"{to}input_norm", f"{source}input_layernorm"),
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
            part = SourcePart(f"{attention}{name}.weight", (head_dim,), rotary=True, offset=config.norm_offset)
            tensors.append(PreparedTensor(f"{to}{name}.weight", (part,)))
    tensors.append(_single(f"{to}attention_out.weight", f"{attention}o_proj.weight", hidden, q_rows))
    if config.attention_out_bias:
        tensors.append(_single(f"{to}attention_out.bias", f"{attention}o_proj.bias", hidden))
    return tensors


def _mlp_tensors(config: ModelConfig, layer: int, to: str, source: str) -> list[PreparedTensor]:
    # With norms on both sides, what others call post_attention_layernorm is the one behind the attention.
    before = "pre_feedforward_layernorm" if config.out_norms else "post_attention_layernorm"
    tensors = []
    if config.out_norms:
        tensors.append(_norm(config, f"{to}attention_out_norm", f"{source}post_attention_layernorm"))
    tensors.append(_norm(config, f"{to}mlp_norm", f"{source}{before}"))
    experts = config.experts
    if experts is not None and layer in experts.layers:
        tensors.append(
            _single(f"{to}router.weight", f"{source}mlp.gate.weight", experts.num_experts, config.hidden_size)
        )
        for expert in range(experts.num_experts):
            name = f"experts.{expert}."
            tensors += _gated_tensors(config, experts.intermediate_size, f"{to}{name}", f"{source}mlp.{name}")
    else:
        tensors += _gated_tensors(config, config.intermediate_size, to, f"{source}mlp.")
    if config.out_norms:
        tensors.append(_norm(config, f"{to}mlp_out_norm", f"{source}post_feedforward_layernorm"))
    return tensors


def _gated_tensors(config: ModelConfig, inner: int, to: str, source: str) -> list[PreparedTensor]:
    """Of one gated MLP."""
    hidden = config.hidden_size
    gate_up = tuple(SourcePart(f"{source}{name}.weight", (inner, hidden)) for name in ("gate_proj", "up_proj"))
    tensors = [PreparedTensor(f"{to}gate_up.weight", gate_up)]
    if config.mlp_bias:
        biases = tuple(SourcePart(f"{source}{name}.bias", (inner,)) for name in ("gate_proj", "up_proj"))
        tensors.append(PreparedTensor(f"{to}gate_up.bias", biases))
    tensors.append(_single(f"{to}down.weight", f"{source}down_proj.weight", hidden, inner))
    if config.mlp_bias:
        tensors.append(_single(f"{to}down.bias", f"{source}down_proj.bias", hidden))
    return tensors


def _norm(config: ModelConfig, to: str, source: str) -> PreparedTensor:
    part = SourcePart(f"{source}.weight", (config.hidden_size,), offset=config.norm_offset)
    return PreparedTensor(f"{to}.weight", (part,))


def _single(name: str, source: str, *shape: int) -> PreparedTensor:
    return PreparedTensor(name, (SourcePart(source, shape),))

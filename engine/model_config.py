"""What a model is, in our words: the shape that pools and doors need, and what the native decoder computes.

`engine.families` makes these from a `config.json` as transformers writes it.
"""

import json
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from engine.attention.interface import LayerAttention
from engine.ops.interface import Gate
from kvferry_rpc.common_pb2 import ErrorCode
from runtime.errors import KvferryError

_MAX_JSON_BYTES = 16 * 1024 * 1024


class RopeKind(Enum):
    """How rotary frequencies are scaled to reach beyond the context of the pre-training."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding. `factor` is used by LINEAR and LLAMA3, the fields after it by LLAMA3 alone."""

    theta: float = 10000.0
    kind: RopeKind = RopeKind.DEFAULT
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_tokens: int = 8192


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Gated MLPs of which each token uses a few, chosen by a softmax over a router's scores.

    `normalise`: the weights of those chosen are scaled to a sum of 1. `layers`: the layers that have experts; the
    others have one MLP.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    normalise: bool
    layers: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What a pool, an attention backend and the door need to know of any model, whoever computes it.

    All counts are positive; `num_q_heads` is a multiple of `num_kv_heads`; `attention` has one entry a layer.
    """

    family: str  # `model_type` of config.json
    vocab_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    max_context_tokens: int
    attention: tuple[LayerAttention, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(ModelShape):
    """A model that the native decoder (`engine.models.transformer`) computes. The defaults are those of Llama."""

    hidden_size: int
    intermediate_size: int
    rms_norm_eps: float
    rope: RopeConfig
    # What layers with a window turn by instead of `rope`, where that differs.
    window_rope: RopeConfig | None = None
    tied_embeddings: bool = False
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    # A norm also behind the attention and behind the MLP, before each is added to the residual.
    out_norms: bool = False
    # Added to every norm's weight when the model is prepared: Gemma keeps the distance from 1.
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    gate: Gate = Gate.SILU
    # c: logits become c * tanh(logits / c).
    logits_soft_cap: float | None = None
    experts: ExpertsConfig | None = None
    # Where the decoder stands among the tensors of a checkpoint that holds more than one.
    checkpoint_prefix: str = ""


def unusable(message: str) -> KvferryError:
    """The error for a model that cannot be served: INVALID_REQUEST on the field `model`."""
    return KvferryError(ErrorCode.INVALID_REQUEST, message, field="model")


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises KvferryError when it is missing, over 16 MiB, or not a JSON object."""
    try:
        size_bytes = path.stat().st_size
        if size_bytes > _MAX_JSON_BYTES:
            raise unusable(f"{path} has {size_bytes} bytes, too many for a JSON settings file")
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise unusable(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise unusable(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise unusable(f"{path} holds a JSON {type(value).__name__}, not an object")
    return value

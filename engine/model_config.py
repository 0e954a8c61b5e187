"""What a model is, read from `config.json` as transformers writes it: old and new spellings, checked, in our words.

A configuration that asks for something the native decoder does not compute is refused here, with its reason. Ignoring
one unknown switch would still produce text, only not the model's text.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from engine.attention.interface import LayerAttention
from kvferry_rpc.common_pb2 import ErrorCode
from runtime.errors import KvferryError

_MAX_JSON_BYTES = 16 * 1024 * 1024
_MAX_DIMENSION = 1 << 24
_CAUSAL_LM = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


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
class ModelConfig:
    """Shape of a decoder-only model. All counts are positive; `num_q_heads` is a multiple of `num_kv_heads`."""

    family: str  # "llama", "qwen2" or "qwen3"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    max_context_tokens: int
    rms_norm_eps: float
    rope: RopeConfig
    tied_embeddings: bool = False
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    @property
    def attention(self) -> tuple[LayerAttention, ...]:
        """How each layer looks back."""
        return (LayerAttention(self.head_dim**-0.5),) * self.num_layers


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


def parse_model_config(config: Mapping[str, Any]) -> ModelConfig:
    """Check and translate the content of a `config.json`.

    Raises KvferryError (INVALID_REQUEST) naming the entry that is missing, senseless or not supported.
    """
    family = _family(config)
    _refuse_unsupported(config, family)
    hidden_size = _count(config, "hidden_size")
    num_q_heads = _count(config, "num_attention_heads")
    num_kv_heads = _count(config, "num_key_value_heads", num_q_heads)
    if num_q_heads % num_kv_heads:
        raise unusable(f"config.json: {num_q_heads} attention heads are no multiple of {num_kv_heads} key-value heads")
    # Qwen3 fixes its head size; the others derive it from the hidden size unless the file says otherwise.
    head_dim = _count(config, "head_dim", 128 if family == "qwen3" else hidden_size // num_q_heads)
    if head_dim % 2:
        raise unusable(f"config.json: head_dim is {head_dim}, but rotary embedding turns pairs and needs an even one")
    attention_bias = family != "qwen2" and _flag(config, "attention_bias")
    max_context_tokens = _count(config, "max_position_embeddings")
    return ModelConfig(
        family=family,
        vocab_size=_count(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_count(config, "intermediate_size"),
        num_layers=_count(config, "num_hidden_layers"),
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_context_tokens=max_context_tokens,
        rms_norm_eps=_positive(config, "rms_norm_eps", 1e-6),
        rope=_rope(config, max_context_tokens),
        tied_embeddings=_flag(config, "tie_word_embeddings"),
        qkv_bias=family == "qwen2" or attention_bias,
        attention_out_bias=attention_bias,
        mlp_bias=family == "llama" and _flag(config, "mlp_bias"),
        qk_norm=family == "qwen3",
    )


def parse_eos_token_ids(
    generation_config: Mapping[str, Any], config: Mapping[str, Any], vocab_size: int
) -> frozenset[int]:
    """Tokens that end an answer: those of `generation_config.json` if it names any, else those of `config.json`.

    This is transformers' rule, and equal text needs equal ends. Empty when neither file names one.
    Raises KvferryError for something that is no token of the vocabulary.
    """
    value = generation_config.get("eos_token_id")
    if value is None:
        value = config.get("eos_token_id")
    tokens = [] if value is None else value if isinstance(value, list) else [value]
    for token in tokens:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            raise unusable(f"eos_token_id {token!r} is no token of the vocabulary of {vocab_size}")
    return frozenset(tokens)


def _family(config: Mapping[str, Any]) -> str:
    known = ", ".join(_CAUSAL_LM.values())
    family = config.get("model_type")
    if family == "mistral":
        raise unusable(f"mistral models (sliding-window attention) are not supported; supported: {known}")
    if not isinstance(family, str) or family not in _CAUSAL_LM:
        raise unusable(f"model_type {family!r} is not supported; supported: {known}")
    architectures = config.get("architectures")
    if architectures and architectures != [_CAUSAL_LM[family]]:
        raise unusable(f"architectures {architectures!r} cannot generate text; expected [{_CAUSAL_LM[family]!r}]")
    return family


def _refuse_unsupported(config: Mapping[str, Any], family: str) -> None:
    if config.get("quantization_config"):
        raise unusable("config.json has a quantization_config: quantised safetensors are not supported")
    # The Qwen families write a window size even where their switch for it is off.
    slides = _flag(config, "use_sliding_window", family == "llama" and config.get("sliding_window") is not None)
    layer_types = config.get("layer_types") or []
    if slides or any(kind != "full_attention" for kind in layer_types):
        raise unusable("sliding-window attention is not supported: the cache keeps, and attention reads, all tokens")
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise unusable(f"hidden_act {activation!r} is not supported; supported: 'silu'")


def _rope(config: Mapping[str, Any], max_context_tokens: int) -> RopeConfig:
    # transformers 5 writes one `rope_parameters`; before, `rope_theta` stood beside an optional `rope_scaling`.
    values = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(values, dict) or any(isinstance(value, dict) for value in values.values()):
        raise unusable(f"config.json: rope parameters must be one flat object for all layers, not {values!r}")
    name = values.get("rope_type", values.get("type", "default"))
    kinds = {kind.value: kind for kind in RopeKind}
    if not isinstance(name, str) or name not in kinds:
        raise unusable(f"rotary embedding of type {name!r} is not supported; supported: {', '.join(kinds)}")
    if values.get("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0) != 1.0:
        raise unusable("partial rotary embedding (partial_rotary_factor) is not supported")
    theta = _positive(values, "rope_theta", _positive(config, "rope_theta", 10000.0))
    kind = kinds[name]
    if kind is RopeKind.DEFAULT:
        return RopeConfig(theta)
    if kind is RopeKind.LINEAR:
        return RopeConfig(theta, kind, _positive(values, "factor"))
    original = "original_max_position_embeddings"
    rope = RopeConfig(
        theta=theta,
        kind=kind,
        factor=_positive(values, "factor"),
        low_freq_factor=_positive(values, "low_freq_factor"),
        high_freq_factor=_positive(values, "high_freq_factor"),
        # Some checkpoints keep this one beside the rope parameters; transformers then prefers it.
        original_context_tokens=_count(
            config if config.get(original) is not None else values, original, max_context_tokens
        ),
    )
    if rope.high_freq_factor <= rope.low_freq_factor:
        raise unusable("config.json: llama3 rope needs high_freq_factor above low_freq_factor")
    return rope


def _count(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MAX_DIMENSION:
        raise unusable(f"config.json: {key} must be a whole number from 1 to {_MAX_DIMENSION}, not {value!r}")
    return value


def _positive(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise unusable(f"config.json: {key} must be a positive number, not {value!r}")
    return float(value)


def _flag(config: Mapping[str, Any], key: str, default: bool = False) -> bool:
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, bool):
        raise unusable(f"config.json: {key} must be true or false, not {value!r}")
    return value

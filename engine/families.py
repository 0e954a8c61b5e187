"""The native families: a `config.json` as transformers writes it, in old and new spellings, becomes a ModelConfig.

A configuration that asks for something the native decoder does not compute is refused here, with its reason. Ignoring
one unknown switch would still produce text, only not the model's text. A family is a row of `_FAMILIES` and the
function that the row names, which says how it differs from a plain Llama.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine.attention.interface import LayerAttention
from engine.config_fields import count, flag, positive, rope, rope_of, windows
from engine.model_config import ExpertsConfig, ModelConfig, RopeConfig, unusable
from engine.ops.interface import Gate

# `Any`: JSON is checked entry by entry as it is read.
_Json = Mapping[str, Any]

_MAX_LAYERS = 4096

# What transformers assumes of a Gemma 3 that does not say so; the published multi-modal checkpoints leave these out.
_GEMMA3_DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True, slots=True)
class _Family:
    """`architecture` is the class in transformers whose checkpoints are read."""

    architecture: str
    parse: Callable[[_Json], ModelConfig]


def parse_model_config(config: _Json) -> ModelConfig:
    """Check and translate the content of a `config.json`.

    Raises KvferryError (INVALID_REQUEST) naming the entry that is missing, senseless or not supported.
    """
    name = config.get("model_type")
    if not isinstance(name, str) or name not in _FAMILIES:
        known = ", ".join(family.architecture for family in _FAMILIES.values())
        raise unusable(f"model_type {name!r} is not supported; supported: {known}")
    family = _FAMILIES[name]
    architectures = config.get("architectures")
    if architectures and architectures != [family.architecture]:
        raise unusable(f"architectures {architectures!r} cannot generate text; expected [{family.architecture!r}]")
    if config.get("quantization_config"):
        raise unusable("config.json has a quantization_config: quantised safetensors are not supported")
    return family.parse(config)


def parse_eos_token_ids(generation_config: _Json, config: _Json, vocab_size: int) -> frozenset[int]:
    """Tokens that end an answer: those of `generation_config.json` if it names any, else those of `config.json`, where
    those of the text part count in a model of several.

    This is transformers' rule, and equal text needs equal ends. Empty when neither file names one.
    Raises KvferryError for something that is no token of the vocabulary.
    """
    value = generation_config.get("eos_token_id")
    text = config.get("text_config")
    for place in (config, text if isinstance(text, dict) else {}):
        if value is None:
            value = place.get("eos_token_id")
    tokens = [] if value is None else value if isinstance(value, list) else [value]
    for token in tokens:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            raise unusable(f"eos_token_id {token!r} is no token of the vocabulary of {vocab_size}")
    return frozenset(tokens)


def _llama(config: _Json) -> ModelConfig:
    model = _plain(config, "llama")
    if config.get("sliding_window") is not None or flag(config, "use_sliding_window"):
        raise unusable("a Llama with a sliding window is not supported: transformers ignores it, others do not")
    bias = flag(config, "attention_bias")
    return replace(
        _windowed(model, config, None, []),
        qkv_bias=bias,
        attention_out_bias=bias,
        mlp_bias=flag(config, "mlp_bias"),
    )


def _mistral(config: _Json) -> ModelConfig:
    model = _plain(config, "mistral")
    if config.get("layer_types") is not None:
        raise unusable("layer_types of a Mistral are not supported: transformers ignores them, others do not")
    return _windowed(model, config, _window(config), [True] * model.num_layers)


def _qwen2(config: _Json) -> ModelConfig:
    return replace(_qwen_windows(_plain(config, "qwen2"), config), qkv_bias=True)


def _qwen3(config: _Json) -> ModelConfig:
    bias = flag(config, "attention_bias")
    # Qwen3 fixes its head size; the others derive it from the hidden size unless the file says otherwise.
    model = _qwen_windows(_plain(config, "qwen3", head_dim=128), config)
    return replace(model, qk_norm=True, qkv_bias=bias, attention_out_bias=bias)


def _qwen3_moe(config: _Json) -> ModelConfig:
    bias = flag(config, "attention_bias")
    model = _plain(config, "qwen3_moe")
    window = _window(config) if flag(config, "use_sliding_window") else None
    model = _windowed(model, config, window, [True] * model.num_layers)
    return replace(model, qk_norm=True, qkv_bias=bias, attention_out_bias=bias, experts=_experts(config, model))


def _gemma3_text(config: _Json) -> ModelConfig:
    config = {**_GEMMA3_DEFAULTS, **config}
    if flag(config, "use_bidirectional_attention"):
        raise unusable("use_bidirectional_attention is not supported: such a model does not generate text")
    if config.get("attn_logit_softcapping") is not None:
        raise unusable("attn_logit_softcapping of a Gemma 3 is not supported: transformers ignores it, others do not")
    context = count(config, "max_position_embeddings")
    everywhere, in_windows = _gemma3_ropes(config, context)
    model = _plain(config, "gemma3_text", everywhere, activation=("hidden_activation", "gelu_pytorch_tanh"))
    pattern = count(config, "sliding_window_pattern", count(config, "_sliding_window_pattern", 6))
    sliding = [(layer + 1) % pattern != 0 for layer in range(model.num_layers)]
    bias = flag(config, "attention_bias")
    return replace(
        _windowed(model, config, _window(config), sliding, positive(config, "query_pre_attn_scalar") ** -0.5),
        window_rope=in_windows,
        qk_norm=True,
        qkv_bias=bias,
        attention_out_bias=bias,
        out_norms=True,
        norm_offset=1.0,
        embedding_scale=math.sqrt(model.hidden_size),
        gate=Gate.GELU_TANH,
        logits_soft_cap=_optional(config, "final_logit_softcapping"),
    )


def _gemma3(config: _Json) -> ModelConfig:
    """The decoder inside a checkpoint that also has an image encoder, which is left out."""
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise unusable("config.json: a gemma3 model needs a text_config")
    if "tie_word_embeddings" in config:
        text = {"tie_word_embeddings": config["tie_word_embeddings"], **text}
    return replace(_gemma3_text(text), family="gemma3", checkpoint_prefix="language_model.")


_FAMILIES = {
    "llama": _Family("LlamaForCausalLM", _llama),
    "mistral": _Family("MistralForCausalLM", _mistral),
    "qwen2": _Family("Qwen2ForCausalLM", _qwen2),
    "qwen3": _Family("Qwen3ForCausalLM", _qwen3),
    "qwen3_moe": _Family("Qwen3MoeForCausalLM", _qwen3_moe),
    "gemma3_text": _Family("Gemma3ForCausalLM", _gemma3_text),
    "gemma3": _Family("Gemma3ForConditionalGeneration", _gemma3),
}


def _plain(
    config: _Json,
    family: str,
    turns: RopeConfig | None = None,
    *,
    head_dim: int | None = None,
    activation: tuple[str, str] = ("hidden_act", "silu"),
) -> ModelConfig:
    """A Llama without biases. `turns` None reads the rope entries; `head_dim` None is hidden size over heads."""
    key, value = activation
    if config.get(key, value) != value:
        raise unusable(f"{key} {config[key]!r} is not supported; supported: {value!r}")
    hidden_size, num_q_heads = count(config, "hidden_size"), count(config, "num_attention_heads")
    num_kv_heads = count(config, "num_key_value_heads", num_q_heads)
    if num_q_heads % num_kv_heads:
        raise unusable(f"config.json: {num_q_heads} attention heads are no multiple of {num_kv_heads} key-value heads")
    head_dim = count(config, "head_dim", head_dim or hidden_size // num_q_heads)
    if head_dim % 2:
        raise unusable(f"config.json: head_dim is {head_dim}, but rotary embedding turns pairs and needs an even one")
    max_context_tokens = count(config, "max_position_embeddings")
    num_layers = count(config, "num_hidden_layers")
    if num_layers > _MAX_LAYERS:
        raise unusable(f"config.json: num_hidden_layers is {num_layers}, more than {_MAX_LAYERS}")
    return ModelConfig(
        family=family,
        vocab_size=count(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=count(config, "intermediate_size"),
        num_layers=num_layers,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_context_tokens=max_context_tokens,
        rms_norm_eps=positive(config, "rms_norm_eps", 1e-6),
        rope=turns or rope(config, max_context_tokens),
        attention=(LayerAttention(head_dim**-0.5),) * num_layers,
        tied_embeddings=flag(config, "tie_word_embeddings"),
    )


def _windowed(
    model: ModelConfig, config: _Json, window: int | None, implied: list[bool], scale: float | None = None
) -> ModelConfig:
    """The model with the windows that its config asks for; see `windows`. `scale` None keeps the usual one."""
    scale = scale or model.head_dim**-0.5
    spans = windows(config, model.num_layers, window, implied or [False] * model.num_layers)
    return replace(model, attention=tuple(LayerAttention(scale, span) for span in spans))


def _qwen_windows(model: ModelConfig, config: _Json) -> ModelConfig:
    # The Qwen families write a window size even where their switch for it is off.
    window = _window(config) if flag(config, "use_sliding_window") else None
    first = config.get("max_window_layers", 28)
    if not isinstance(first, int) or first < 0:
        raise unusable(f"config.json: max_window_layers must be a whole number, not {first!r}")
    return _windowed(model, config, window, [layer >= first for layer in range(model.num_layers)])


def _window(config: _Json) -> int | None:
    return None if config.get("sliding_window") is None else count(config, "sliding_window")


def _optional(config: _Json, key: str) -> float | None:
    return None if config.get(key) is None else positive(config, key)


def _gemma3_ropes(config: _Json, max_context_tokens: int) -> tuple[RopeConfig, RopeConfig]:
    """Of the layers that see everything, and of those with a window."""
    nested = config.get("rope_parameters") or {}
    if not isinstance(nested, dict):
        raise unusable(f"config.json: rope parameters of a Gemma 3 must be one object a kind of layer, not {nested!r}")
    ropes = []
    for kind, key, theta in (("full_attention", "rope_theta", 1e6), ("sliding_attention", "rope_local_base_freq", 1e4)):
        values = nested.get(kind) or {}
        if kind == "full_attention" and not values:
            # Before transformers 5: scaled for these layers alone.
            values = config.get("rope_scaling") or {}
        if not isinstance(values, dict):
            raise unusable(f"config.json: rope parameters of {kind} must be an object, not {values!r}")
        ropes.append(rope_of(config, values, positive(config, key, theta), max_context_tokens))
    return ropes[0], ropes[1]


def _experts(config: _Json, model: ModelConfig) -> ExpertsConfig | None:
    """None when no layer has experts."""
    num_experts = count(config, "num_experts", count(config, "num_local_experts", 128))
    chosen = count(config, "num_experts_per_tok", 8)
    if chosen > num_experts:
        raise unusable(f"config.json: {chosen} experts a token (num_experts_per_tok), but only {num_experts} in all")
    step = count(config, "decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise unusable(f"config.json: mlp_only_layers must be a list of layers, not {dense!r}")
    layers = frozenset(layer for layer in range(model.num_layers) if (layer + 1) % step == 0 and layer not in dense)
    if not layers:
        return None
    return ExpertsConfig(
        num_experts=num_experts,
        experts_per_token=chosen,
        intermediate_size=count(config, "moe_intermediate_size", 768),
        normalise=flag(config, "norm_topk_prob"),
        layers=layers,
    )

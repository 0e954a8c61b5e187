"""Tiny random checkpoints, made by transformers from a seed, for the families and variants the engine serves."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

_SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_GEMMA3: dict[str, Any] = {
    "head_dim": 16,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 13,
    "query_pre_attn_scalar": 24,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 3000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}
_MOE: dict[str, Any] = {"head_dim": 16, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_WINDOWS: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 13}

# The classes and the settings that differ from _SHAPE. Windows are shorter than the contexts of the tests.
VARIANTS: dict[str, tuple[type[PreTrainedModel], type[Any], dict[str, Any]]] = {
    "llama_gqa": (LlamaForCausalLM, LlamaConfig, {}),
    "llama_tied": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    "llama_mha": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 6}),
    "llama_mqa": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 1}),
    "llama_head_dim": (LlamaForCausalLM, LlamaConfig, {"head_dim": 20}),
    "llama_biases": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama_theta": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}}),
    "llama_linear_rope": (
        LlamaForCausalLM,
        LlamaConfig,
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "llama3_rope": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": _LLAMA3_ROPE}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen2_tied": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16}),
    "qwen3_biases": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16, "attention_bias": True}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 13, "head_dim": 16}),
    "mistral_no_window": (MistralForCausalLM, MistralConfig, {"sliding_window": None}),
    "qwen2_windows": (Qwen2ForCausalLM, Qwen2Config, {**_WINDOWS, "max_window_layers": 1}),
    "qwen3_windows": (
        Qwen3ForCausalLM,
        Qwen3Config,
        {**_WINDOWS, "head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, _GEMMA3),
    "gemma3_scaled_and_capped": (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        {
            **_GEMMA3,
            "final_logit_softcapping": 5.0,
            "rope_parameters": {
                **_GEMMA3["rope_parameters"],
                "full_attention": {"rope_type": "linear", "rope_theta": 3000.0, "factor": 8.0},
            },
        },
    ),
    "qwen3_moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig, {**_MOE, "norm_topk_prob": True}),
    "qwen3_moe_mixed": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {**_MOE, **_WINDOWS, "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    ),
}


def make_model(variant: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A model of a native family, random as `randomise` makes it."""
    model_class, config_class, values = VARIANTS[variant]
    return randomise(model_class(config_class(**{**_SHAPE, **values, **overrides})), seed)


def randomise(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """Every parameter becomes random, biases and norms included, so that none can be left out unnoticed."""
    generator = torch.Generator().manual_seed(seed)
    usual_norm = 0.0 if model.config.model_type.startswith("gemma") else 1.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(usual_norm + 0.3 * noise if "norm" in name else 0.2 * noise)
    return model.eval()


def save_checkpoint(directory: Path, model: PreTrainedModel, **options: Any) -> Path:
    """Save as transformers does, with a tokenizer beside it. `options` go to save_pretrained."""
    model.save_pretrained(directory, **options)
    write_tokenizer(directory, model.config.vocab_size)
    return directory


def write_tokenizer(directory: Path, vocab_size: int) -> None:
    """A tokenizer whose token n is the word `wn`."""
    vocabulary = {f"w{token}": token for token in range(vocab_size)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"},
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": "w1", "eos_token": "w2"}))


def edit_json(path: Path, **changes: Any) -> None:
    """Set entries of a JSON object in a file; None removes one."""
    value = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: entry for key, entry in value.items() if entry is not None}))

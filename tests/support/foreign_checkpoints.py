"""Tiny random checkpoints of architectures that have no native code here."""

from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.support.tiny_checkpoints import randomise, save_checkpoint

_SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# Settings that differ from _SHAPE. Windows are shorter than the contexts of the tests.
FOREIGN: dict[str, dict[str, Any]] = {
    "gpt_neox": {},
    "phi3": {},
    "olmo2": {},
    "starcoder2": {"sliding_window": 13},
    "gemma2": {
        "head_dim": 16,
        "query_pre_attn_scalar": 20,
        "sliding_window": 13,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 5.0,
    },
    "mixtral": {"num_local_experts": 4},
}


def make_foreign(model_type: str, **overrides: Any) -> PreTrainedModel:
    """A random model of any architecture of transformers that can be built from the settings above."""
    settings = {**_SHAPE, **FOREIGN.get(model_type, {}), **overrides}
    return randomise(AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings)))


def save_foreign(directory: Path, model_type: str, **overrides: Any) -> Path:
    """`make_foreign` as a checkpoint with a tokenizer."""
    return save_checkpoint(directory, make_foreign(model_type, **overrides))

"""A GGUF file, read with the `gguf` package: metadata, tensors brought back to fp32 one by one, and the tokenizer.

Only the tokenizer goes through transformers, which knows how to rebuild it. For the weights its loader would need
another dependency (accelerate) and hold the whole model in memory twice.
"""

import json
from collections.abc import Set
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from engine.checkpoint import write_tokenizer_settings
from engine.model_config import read_json_object, unusable
from engine.prepared_model import TOKENIZER_CONFIG_NAME, TOKENIZER_NAME
from engine.tensor_map import unpair_rotary_rows
from runtime.errors import KvferryError

_FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_OUTER_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GgufFile:
    """An open GGUF file in transformers' words (see checkpoint.ModelReader). Read by one thread."""

    def __init__(self, path: Path) -> None:
        """Parse the header (seconds, for a big vocabulary).

        Raises KvferryError for a damaged file or an unsupported model, and when the `gguf` extra is not installed.
        """
        self._path = path
        self._gguf = _import_gguf()
        try:
            self._reader = self._gguf.GGUFReader(path)
        except Exception as error:  # the parser trusts its input, so a damaged file can raise anything
            raise unusable(f"{path} is no readable GGUF file: {error}") from error
        self._tensors = {_checkpoint_name(tensor.name): tensor for tensor in self._reader.tensors}
        self.config_json = self._read_config()
        self.generation_config_json: dict[str, Any] = {
            key: self.config_json[key] for key in ("bos_token_id", "eos_token_id") if key in self.config_json
        }
        if "rope_freqs.weight" in self._tensors:
            raise unusable(f"{path} scales its rotary frequencies one by one: use the model's safetensors instead")

    @property
    def tensor_names(self) -> Set[str]:
        """Names as in a checkpoint; a tensor that is not known keeps its GGUF name."""
        return self._tensors.keys()

    def read(self, name: str) -> Tensor:
        """One tensor as fp32. Raises KvferryError for an unknown quantisation or a truncated file."""
        tensor = self._tensors[name]
        try:
            value = torch.from_numpy(self._gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        except Exception as error:
            raise unusable(f"cannot read {tensor.name} ({tensor.tensor_type.name}) of {self._path}: {error}") from error
        if self.config_json["model_type"] == "llama" and (".q_proj." in name or ".k_proj." in name):
            # llama.cpp keeps the rows of these two in pairs, for Llama only.
            return unpair_rotary_rows(value, self.config_json["head_dim"])
        return value

    def write_tokenizer(self, target: Path) -> None:
        """Rebuild the tokenizer with transformers and save it. Raises KvferryError where that is not possible."""
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise _extra_is_missing() from error
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                self._path.parent, gguf_file=self._path.name, local_files_only=True
            )
            tokenizer.save_pretrained(target)
        except ImportError as error:
            raise _extra_is_missing() from error
        except Exception as error:  # what transformers raises for a vocabulary it cannot rebuild is not documented
            raise unusable(f"cannot rebuild the tokenizer of {self._path}: {error}") from error
        if not (target / TOKENIZER_NAME).is_file():
            raise unusable(f"{self._path} has a tokenizer that cannot be written as {TOKENIZER_NAME}")
        settings = read_json_object(target / TOKENIZER_CONFIG_NAME)
        # How this process loaded it is no property of the tokenizer.
        write_tokenizer_settings(
            target, {key: value for key, value in settings.items() if key not in ("is_local", "local_files_only")}
        )

    def _read_config(self) -> dict[str, Any]:
        family = self._field("general.architecture")
        if family not in _FAMILIES:
            raise unusable(f"{self._path} holds a {family!r} model; supported: {', '.join(_FAMILIES)}")
        heads = self._field(f"{family}.attention.head_count")
        hidden_size = self._field(f"{family}.embedding_length")
        if not isinstance(heads, int) or not isinstance(hidden_size, int) or heads < 1:
            raise unusable(f"{self._path} does not say how many heads or how wide a hidden state it has")
        head_dim = self._field(f"{family}.attention.key_length", hidden_size // heads)
        same = ("attention.value_length", "rope.dimension_count")
        if any(self._field(f"{family}.{key}", head_dim) != head_dim for key in same):
            raise unusable(f"{self._path}: keys, values and rotary embedding of different sizes are not supported")
        if self._field(f"{family}.attention.sliding_window"):
            raise unusable(f"{self._path} asks for sliding-window attention, but not on which layers")
        embedding = self._tensors.get("model.embed_tokens.weight")
        if embedding is None:
            raise unusable(f"{self._path} lacks token_embd.weight")
        config = {
            "architectures": [_FAMILIES[family]],
            "model_type": family,
            "vocab_size": int(embedding.shape[1]),
            "hidden_size": hidden_size,
            "intermediate_size": self._field(f"{family}.feed_forward_length"),
            "num_hidden_layers": self._field(f"{family}.block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._field(f"{family}.attention.head_count_kv", heads),
            "head_dim": head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self._field(f"{family}.context_length"),
            "rms_norm_eps": self._field(f"{family}.attention.layer_norm_rms_epsilon"),
            "rope_parameters": self._rope(family),
            "tie_word_embeddings": "lm_head.weight" not in self._tensors,
            "attention_bias": family == "llama" and "model.layers.0.self_attn.q_proj.bias" in self._tensors,
            "bos_token_id": self._field("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self._field("tokenizer.ggml.eos_token_id"),
            "dtype": "float32",
        }
        return {key: value for key, value in config.items() if value is not None}

    def _rope(self, family: str) -> dict[str, Any]:
        rope = {"rope_type": "default", "rope_theta": self._field(f"{family}.rope.freq_base", 10000.0)}
        scaling = self._field(f"{family}.rope.scaling.type", "none")
        if scaling != "none":
            rope |= {"rope_type": scaling, "factor": self._field(f"{family}.rope.scaling.factor")}
        return rope

    def _field(self, key: str, default: Any = None) -> Any:
        field = self._reader.get_field(key)
        if field is None:
            return default
        try:
            return json.loads(json.dumps(field.contents(), default=float))
        except Exception as error:  # as above: damaged metadata can raise anything
            raise unusable(f"cannot read {key} of {self._path}: {error}") from error


def _checkpoint_name(name: str) -> str:
    module, dot, kind = name.rpartition(".")
    if module in _OUTER_NAMES:
        return _OUTER_NAMES[module] + dot + kind
    match module.split("."):
        case ["blk", layer, part] if part in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[part]}{dot}{kind}"
    return name


def _import_gguf() -> ModuleType:
    try:
        import gguf
    except ImportError as error:
        raise _extra_is_missing() from error
    return gguf


def _extra_is_missing() -> KvferryError:
    return unusable("reading GGUF files needs the packages gguf and transformers: pip install 'kvferry[gguf]'")

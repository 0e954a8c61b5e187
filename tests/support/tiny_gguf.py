"""Tiny models as GGUF files, written the way llama.cpp's converter writes them."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from transformers import PreTrainedModel

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def write_gguf(path: Path, model: PreTrainedModel, **metadata: Any) -> Path:
    """Write `model` (Llama, Qwen2 or Qwen3), fp32, with a byte-level vocabulary.

    `metadata` adds entries: strings, floats or ints, with "__" for "." and the architecture left out.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, config.model_type)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if config.model_type != "qwen2":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    for key, value in metadata.items():
        name = f"{config.model_type}.{key.replace('__', '.')}"
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)]
        add(name, value)
    _add_tokenizer(writer, config.vocab_size)
    for name, parameter in model.state_dict().items():
        if name != "lm_head.weight" or not config.tie_word_embeddings:
            heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(
                name.split(".")[-2]
            )
            values = parameter.numpy()
            writer.add_tensor(
                _gguf_name(name), _permute(values, heads) if heads and config.model_type == "llama" else values
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _permute(values: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))


def _gguf_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module in _NAMES:
        return f"{_NAMES[module]}.{kind}"
    _, _, layer, part = module.split(".", 3)
    return f"blk.{layer}.{_NAMES[part]}.{kind}"


def _add_tokenizer(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    tokens = ["<unk>", "<start>", "<end>", *(chr(33 + number) for number in range(vocab_size - 4)), "ab"]
    kinds = [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (vocab_size - 3)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)

"""A prepared model in the forms that other engines read: a Hugging Face directory and a GGUF file, both fp32.

The tokens of the GGUF file are named "t0;", "t1;", ...: the benchmark speaks in token ids only, llama.cpp's completions
give text, and such a text tells which tokens it is made of. None of them ends a text but the last of the vocabulary.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import gguf
import torch
from safetensors.torch import save_file
from torch import Tensor

from bench.common.harness import BenchmarkError
from engine.model_config import ModelConfig, RopeKind
from engine.prepared_model import CONFIG_NAME, PreparedModel, checkpoint_tensors
from engine.tensor_map import pair_rotary_rows
from engine.weight_dtypes import WeightDtype

_HUGGING_FACE = "fp32-safetensors"
_GGUF = "fp32.gguf"
_FORMAT = 1  # Of what is written here: exports of another one are made again.

_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_INNER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@dataclass(frozen=True, slots=True)
class ExportedModel:
    """Where the two forms are."""

    hugging_face: Path
    gguf: Path


def export(model: PreparedModel, cache_dir: Path) -> ExportedModel:
    """Write both forms below `cache_dir`, unless they are there. Raises BenchmarkError for another model than an fp32
    Llama without scaled rotary embedding: llama.cpp would want it in another layout."""
    plain = model.config.family == "llama" and model.config.rope.kind is RopeKind.DEFAULT
    if not plain or model.weight_dtype is not WeightDtype.FP32:
        raise BenchmarkError(f"{model.name} is not a plain Llama in fp32: only such a model is exported")
    target = cache_dir / f"exported-{_FORMAT}-{model.name}-{model.revision[:16]}"
    exported = ExportedModel(target / _HUGGING_FACE, target / _GGUF)
    target.mkdir(parents=True, exist_ok=True)
    if not exported.hugging_face.is_dir():
        _whole(exported.hugging_face, lambda path: _write_hugging_face(model, path))
    if not exported.gguf.is_file():
        _whole(exported.gguf, lambda path: _write_gguf(model, path))
    return exported


def _whole(target: Path, write: Callable[[Path], None]) -> None:
    """Write under another name first, so that what is there is complete."""
    part = target.with_name(f"{target.name}.part")
    if part.is_dir():
        shutil.rmtree(part)
    write(part)
    part.rename(target)


def _write_hugging_face(model: PreparedModel, path: Path) -> None:
    path.mkdir()
    for file in model.path.glob("*.json"):
        shutil.copyfile(file, path / file.name)
    config = (model.path / CONFIG_NAME).read_text(encoding="utf-8").replace('"bfloat16"', '"float32"')
    (path / CONFIG_NAME).write_text(config, encoding="utf-8")
    tensors = {name: tensor.contiguous() for name, tensor in checkpoint_tensors(model).items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def _write_gguf(model: PreparedModel, path: Path) -> None:
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_context_tokens)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_q_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    _add_tokens(writer, config.vocab_size)
    for name, tensor in checkpoint_tensors(model).items():
        writer.add_tensor(_gguf_name(name), _gguf_rows(name, tensor, config).contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokens(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([f"t{token};" for token in range(vocab_size)])
    writer.add_token_types([gguf.TokenType.NORMAL] * vocab_size)
    writer.add_token_merges(["t 0"])
    writer.add_bos_token_id(vocab_size - 1)
    writer.add_eos_token_id(vocab_size - 1)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{{ messages[0]['content'] }}")


def _gguf_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module in _OUTER:
        return f"{_OUTER[module]}.{kind}"
    _, _, layer, part = module.split(".", 3)
    return f"blk.{layer}.{_INNER[part]}.{kind}"


def _gguf_rows(name: str, tensor: Tensor, config: ModelConfig) -> Tensor:
    """llama.cpp's Llama turns neighbours, as kvferry does; the checkpoint has halves."""
    rotary = name.split(".")[-2] in ("q_proj", "k_proj")
    return (pair_rotary_rows(tensor, config.head_dim) if rotary else tensor).to(torch.float32)

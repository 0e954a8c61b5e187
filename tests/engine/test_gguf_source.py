"""GGUF files: the same weights, config and tokenizer as the checkpoint they were made from."""

import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from engine.gguf_source import GgufFile
from engine.prepare import prepare_model
from engine.prepared_model import PreparedModel, checkpoint_tensors
from runtime.errors import KvferryError
from tests.support.tiny_checkpoints import make_model, save_checkpoint
from tests.support.tiny_gguf import CHAT_TEMPLATE, write_gguf


def _prepare(path: Path) -> PreparedModel:
    return prepare_model(path, path.parent / "cache", lambda *_: None)


@pytest.mark.parametrize("variant", ["llama_gqa", "llama_tied", "llama_head_dim", "llama_theta", "qwen2", "qwen3"])
def test_a_gguf_file_gives_what_its_checkpoint_gives(tmp_path: Path, variant: str) -> None:
    model = make_model(variant)
    from_gguf = _prepare(write_gguf(tmp_path / "tiny.gguf", model))
    from_directory = _prepare(save_checkpoint(tmp_path / "tiny", model))
    assert from_gguf.weights_path.read_bytes() == from_directory.weights_path.read_bytes()
    assert from_gguf.eos_token_ids == {2}
    # GGUF keeps settings as fp32.
    assert from_gguf.config.rms_norm_eps == float(np.float32(from_directory.config.rms_norm_eps))
    for name in from_directory.config.__slots__:
        if name != "rms_norm_eps":
            assert getattr(from_gguf.config, name) == getattr(from_directory.config, name), name


def test_the_tokenizer_and_the_chat_template_come_along(tmp_path: Path) -> None:
    model = _prepare(write_gguf(tmp_path / "tiny.gguf", make_model("llama_gqa")))
    tokenizer = Tokenizer.from_file(str(model.tokenizer_path))
    assert tokenizer.encode("ab", add_special_tokens=False).ids == [95]
    assert tokenizer.encode("<end>", add_special_tokens=False).ids == [2]
    assert model.chat_template_path is not None
    assert model.chat_template_path.read_text() == CHAT_TEMPLATE
    settings = model.tokenizer_config_path.read_text()
    assert '"eos_token": "<end>"' in settings
    assert "local" not in settings


def test_quantised_tensors_are_brought_back_to_fp32(tmp_path: Path) -> None:
    path = tmp_path / "quantised.gguf"
    model = make_model("llama_gqa", hidden_size=64, num_attention_heads=8)
    source = write_gguf(tmp_path / "plain.gguf", model)
    _requantise(source, path, "blk.1.ffn_up.weight")
    original = model.state_dict()["model.layers.1.mlp.up_proj.weight"]
    tensors = checkpoint_tensors(_prepare(path))
    quantised = tensors["model.layers.1.mlp.up_proj.weight"]
    assert 1e-4 < float((quantised - original).abs().max()) < 1e-2
    assert torch.equal(
        tensors["model.layers.0.mlp.up_proj.weight"], model.state_dict()["model.layers.0.mlp.up_proj.weight"]
    )


def _requantise(source: Path, target: Path, name: str) -> None:
    """Copy a GGUF file with one tensor in Q8_0."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "llama")
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            inner = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
    for tensor in reader.tensors:
        if tensor.name == name:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quantize(np.asarray(tensor.data), kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_scaling_of_the_rotary_frequencies_is_read(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "tiny.gguf", make_model("llama_gqa"), rope__scaling__type="linear", rope__scaling__factor=4.0
    )
    assert _prepare(path).config.rope.factor == 4.0


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}, "rotary embedding of type 'yarn'"),
        ({"attention__sliding_window": 64}, "sliding-window attention"),
        ({"rope__dimension_count": 4}, "of different sizes are not supported"),
    ],
)
def test_unsupported_settings_are_refused(tmp_path: Path, metadata: dict[str, object], expected: str) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", make_model("llama_gqa"), **metadata)
    with pytest.raises(KvferryError, match=expected):
        _prepare(path)


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(path, "gemma2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(KvferryError, match="holds a 'gemma2' model; supported: llama, qwen2, qwen3"):
        GgufFile(path)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", make_model("llama_gqa"))
    whole = path.read_bytes()
    for content in (b"", b"GGUF", b"nonsense" * 100, whole[:1000], whole[: len(whole) // 2]):
        path.write_bytes(content)
        with pytest.raises(KvferryError, match="is no readable GGUF file"):
            _prepare(path)


@pytest.mark.parametrize("missing", ["gguf", "transformers"])
def test_a_missing_package_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", make_model("llama_gqa"))
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(KvferryError, match=r"pip install 'kvferry\[gguf\]'"):
        _prepare(path)

"""What a model would cost and who would compute it, without preparing it."""

from pathlib import Path

import pytest

from engine.model_survey import Way, survey_model
from engine.prepare import prepare_model
from kv_cache.layout import KVDtype
from runtime.errors import KvferryError
from tests.support.foreign_checkpoints import make_foreign, save_foreign
from tests.support.tiny_checkpoints import edit_json, make_model, save_checkpoint
from tests.support.tiny_gguf import write_gguf

_GIB = 1024**3


def test_a_native_model_is_surveyed_as_it_would_be_served(tmp_path: Path) -> None:
    model = make_model("gemma3")
    source = save_checkpoint(tmp_path / "m", model)
    survey = survey_model(source, 4 * _GIB)
    assert (survey.name, survey.way, survey.reason) == ("m", Way.NATIVE, "")
    assert survey.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert survey.weight_bytes["fp32"] == 4 * survey.num_parameters
    norms = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 1)
    assert survey.weight_bytes["bf16"] == 4 * norms + 2 * (survey.num_parameters - norms)
    assert survey.weight_bytes["int8"] > survey.num_parameters
    assert [layer.window for layer in survey.shape.attention] == [13, None, 13]
    prepared = prepare_model(source, tmp_path / "cache", lambda *_: None)
    assert survey_model(prepared.path, 4 * _GIB).shape == survey.shape
    assert not (tmp_path / "m" / "kvferry.json").exists()


def test_kv_costs_follow_from_the_layout_and_the_default_pool(tmp_path: Path) -> None:
    source = save_checkpoint(tmp_path / "m", make_model("qwen3"))
    costs = {cost.dtype: cost for cost in survey_model(source, 4 * _GIB).kv}
    assert list(costs) == [dtype.value for dtype in KVDtype]
    # 2 layers, K and V, 2 heads, 16 numbers of 4 bytes.
    assert costs["fp32"].bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert costs["fp32"].tokens_in_default_pool == _GIB // 512
    assert survey_model(source, None).kv[0].tokens_in_default_pool == _GIB // 2 // 512
    assert costs["int8"].bytes_per_token < costs["bf16"].bytes_per_token < costs["fp32"].bytes_per_token


def test_a_model_for_transformers_is_surveyed_with_the_reason(tmp_path: Path) -> None:
    model = make_foreign("olmo2")
    survey = survey_model(save_checkpoint(tmp_path / "m", model), _GIB)
    assert survey.way is Way.TRANSFORMERS
    assert "model_type 'olmo2' is not supported" in survey.reason
    assert survey.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert survey.weight_bytes == {"fp32": 4 * survey.num_parameters}


def test_a_gguf_file_is_surveyed(tmp_path: Path) -> None:
    survey = survey_model(write_gguf(tmp_path / "tiny.gguf", make_model("llama_gqa")), _GIB)
    assert (survey.way, survey.shape.num_layers) == (Way.NATIVE, 2)


def test_a_model_that_cannot_be_served_is_refused_with_both_reasons(tmp_path: Path) -> None:
    source = save_foreign(tmp_path / "m", "olmo2")
    edit_json(source / "config.json", sliding_window=8)
    with pytest.raises(KvferryError, match=r"'olmo2' is not supported.*cannot stand in: olmo2 asks for the windows"):
        survey_model(source, _GIB)
    (source / "model.safetensors").write_bytes(b"none")
    with pytest.raises(KvferryError, match="no readable safetensors"):
        survey_model(source, _GIB)
    extra = save_checkpoint(tmp_path / "extra", make_model("llama_biases"))
    edit_json(extra / "config.json", attention_bias=False)
    with pytest.raises(KvferryError, match="has no use for"):
        survey_model(extra, _GIB)

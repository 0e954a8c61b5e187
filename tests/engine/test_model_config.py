"""config.json in, ModelConfig out; everything the decoder does not compute is refused with its reason."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model_config import (
    ModelConfig,
    RopeConfig,
    RopeKind,
    parse_eos_token_ids,
    parse_model_config,
    read_json_object,
)
from kvferry_rpc.common_pb2 import ErrorCode
from runtime.errors import KvferryError

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}


def _refusal(config: dict[str, Any]) -> str:
    with pytest.raises(KvferryError) as caught:
        parse_model_config(config)
    assert caught.value.code == ErrorCode.INVALID_REQUEST
    assert caught.value.field == "model"
    return caught.value.message


def test_a_llama_config_is_read() -> None:
    assert parse_model_config(_LLAMA) == ModelConfig(
        family="llama",
        vocab_size=100,
        hidden_size=64,
        intermediate_size=96,
        num_layers=3,
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_context_tokens=512,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=10000.0),
    )


def test_missing_kv_heads_mean_as_many_as_query_heads() -> None:
    assert parse_model_config({**_LLAMA, "num_key_value_heads": None}).num_kv_heads == 4


def test_families_differ_in_biases_and_norms() -> None:
    qwen2 = parse_model_config({**_LLAMA, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]})
    assert (qwen2.qkv_bias, qwen2.attention_out_bias, qwen2.qk_norm) == (True, False, False)
    qwen3 = parse_model_config({**_LLAMA, "model_type": "qwen3", "architectures": None})
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 128)
    llama = parse_model_config({**_LLAMA, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True})
    assert (llama.qkv_bias, llama.attention_out_bias, llama.mlp_bias, llama.tied_embeddings) == (True,) * 4


def test_old_and_new_spellings_of_rope_mean_the_same() -> None:
    old = parse_model_config({**_LLAMA, "rope_theta": 5e5, "rope_scaling": _LLAMA3_ROPE})
    new = parse_model_config({**_LLAMA, "rope_parameters": {**_LLAMA3_ROPE, "rope_theta": 5e5}})
    assert old.rope == new.rope == RopeConfig(5e5, RopeKind.LLAMA3, 8.0, 1.0, 4.0, 256)
    linear = parse_model_config({**_LLAMA, "rope_scaling": {"type": "linear", "factor": 2}})
    assert linear.rope == RopeConfig(10000.0, RopeKind.LINEAR, 2.0)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model_type": "mistral"}, "mistral models (sliding-window attention) are not supported"),
        ({"model_type": "mixtral"}, "model_type 'mixtral' is not supported"),
        ({"model_type": None}, "model_type None is not supported"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "cannot generate text"),
        ({"model_type": "qwen2", "architectures": None, "use_sliding_window": True}, "sliding-window attention"),
        ({"sliding_window": 4096}, "sliding-window attention"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window attention"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised safetensors are not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "type 'yarn' is not supported"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "type 'dynamic' is not supported"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "one flat object"),
        ({"rope_parameters": [1]}, "one flat object"),
        ({"rope_scaling": {"type": "linear"}}, "factor must be a positive number"),
        ({"rope_scaling": {**_LLAMA3_ROPE, "high_freq_factor": 1.0}}, "high_freq_factor above low_freq_factor"),
        ({"partial_rotary_factor": 0.5}, "partial rotary"),
        ({"num_key_value_heads": 3}, "4 attention heads are no multiple of 3"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"hidden_size": "64"}, "hidden_size must be a whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a whole number"),
        ({"vocab_size": None}, "vocab_size must be a whole number"),
        ({"vocab_size": True}, "vocab_size must be a whole number"),
        ({"vocab_size": 1 << 40}, "vocab_size must be a whole number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], expected: str) -> None:
    assert expected in _refusal({**_LLAMA, **changes})


def test_a_window_size_that_is_switched_off_is_no_sliding_window() -> None:
    config = {**_LLAMA, "model_type": "qwen2", "architectures": None, "sliding_window": 4096}
    assert parse_model_config(config).family == "qwen2"
    assert parse_model_config({**config, "use_sliding_window": False}).family == "qwen2"


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
_KEYS = [
    *_LLAMA,
    "head_dim",
    "hidden_act",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "layer_types",
    "sliding_window",
    "use_sliding_window",
    "tie_word_embeddings",
    "attention_bias",
    "partial_rotary_factor",
]


@settings(deadline=None, max_examples=200)
@given(changes=st.dictionaries(st.sampled_from(_KEYS), _JSON, max_size=4))
def test_any_entry_of_any_type_is_read_or_refused_never_a_crash(changes: dict[str, Any]) -> None:
    try:
        config = parse_model_config({**_LLAMA, **changes})
    except KvferryError:
        return
    assert config.num_q_heads % config.num_kv_heads == 0
    assert config.head_dim % 2 == 0


def test_end_tokens_come_from_the_generation_config_and_else_from_the_config() -> None:
    assert parse_eos_token_ids({"eos_token_id": [2, 7]}, {"eos_token_id": 3}, 10) == {2, 7}
    assert parse_eos_token_ids({"eos_token_id": 4}, {"eos_token_id": 3}, 10) == {4}
    assert parse_eos_token_ids({}, {"eos_token_id": 3}, 10) == {3}
    assert parse_eos_token_ids({}, {"eos_token_id": None}, 10) == frozenset()


@pytest.mark.parametrize("value", [10, -1, "2", [2, None], True, 2.0])
def test_an_end_token_outside_the_vocabulary_is_refused(value: Any) -> None:
    with pytest.raises(KvferryError, match="is no token of the vocabulary of 10"):
        parse_eos_token_ids({"eos_token_id": value}, {}, 10)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"[1]", "holds a JSON list"),
        (b"{", "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b"[" * 100000, "not valid"),
    ],
)
def test_a_settings_file_that_is_no_json_object_is_refused(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(KvferryError, match=expected):
        read_json_object(path)


def test_a_missing_or_oversized_settings_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KvferryError, match="No such file"):
        read_json_object(tmp_path / "config.json")
    (tmp_path / "config.json").write_text(json.dumps({"x": "y" * (17 * 1024 * 1024)}))
    with pytest.raises(KvferryError, match="too many for a JSON settings file"):
        read_json_object(tmp_path / "config.json")

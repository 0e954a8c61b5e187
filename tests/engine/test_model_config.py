"""config.json in, ModelConfig out; everything the decoder does not compute is refused with its reason."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.interface import LayerAttention
from engine.families import parse_eos_token_ids, parse_model_config
from engine.model_config import ExpertsConfig, ModelConfig, RopeConfig, RopeKind, read_json_object
from engine.ops.interface import Gate
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
        attention=(LayerAttention(0.25),) * 3,
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
        ({"model_type": "mixtral"}, "model_type 'mixtral' is not supported"),
        ({"model_type": None}, "model_type None is not supported"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "cannot generate text"),
        ({"sliding_window": 4096}, "a Llama with a sliding window"),
        ({"use_sliding_window": True}, "a Llama with a sliding window"),
        ({"layer_types": ["full_attention"]}, "layer_types must be a list of 3, one a layer"),
        ({"layer_types": "full_attention"}, "layer_types must be a list of 3, one a layer"),
        ({"layer_types": ["full_attention", "full_attention", "mamba"]}, "layers of type 'mamba'"),
        ({"layer_types": ["full_attention", [], {}]}, "layers of type [] are not supported"),
        ({"layer_types": ["full_attention"] * 2 + ["sliding_attention"]}, "sliding_window is not set or off"),
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
        ({"num_hidden_layers": 1 << 20}, "num_hidden_layers is 1048576, more than 4096"),
        ({"vocab_size": None}, "vocab_size must be a whole number"),
        ({"vocab_size": True}, "vocab_size must be a whole number"),
        ({"vocab_size": 1 << 40}, "vocab_size must be a whole number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], expected: str) -> None:
    assert expected in _refusal({**_LLAMA, **changes})


def _config(family: str, **changes: Any) -> ModelConfig:
    return parse_model_config({**_LLAMA, "model_type": family, "architectures": None, **changes})


def _windows(config: ModelConfig) -> list[int | None]:
    return [layer.window for layer in config.attention]


def test_a_window_size_that_is_switched_off_is_no_sliding_window() -> None:
    for switch in ({}, {"use_sliding_window": False}):
        assert _windows(_config("qwen2", sliding_window=64, **switch)) == [None] * 3
        assert _windows(_config("qwen3_moe", sliding_window=64, **switch)) == [None] * 3
    assert _windows(_config("mistral", sliding_window=None)) == [None] * 3


def test_each_family_spells_its_windows_in_its_own_way() -> None:
    on = {"sliding_window": 64, "use_sliding_window": True}
    assert _windows(_config("qwen2", **on)) == [None] * 3  # from layer 28 on, unless told otherwise
    assert _windows(_config("qwen2", **on, max_window_layers=1)) == [None, 64, 64]
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert _windows(_config("qwen3", **on, layer_types=kinds, max_window_layers=0)) == [64, None, 64]
    assert _windows(_config("qwen3_moe", **on)) == [64] * 3
    assert _windows(_config("mistral", sliding_window=64)) == [64] * 3
    gemma = _config("gemma3_text", num_hidden_layers=7, sliding_window=64)
    assert _windows(gemma) == [64] * 5 + [None, 64]
    assert _windows(_config("gemma3_text", sliding_window=64, sliding_window_pattern=2)) == [64, None, 64]


def test_gemma_3_is_read_from_old_and_new_spellings_and_from_inside_a_multi_modal_model() -> None:
    old = {"rope_theta": 2e6, "rope_local_base_freq": 5e3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    new = {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
        }
    }
    text = _config("gemma3_text", **new, query_pre_attn_scalar=64, final_logit_softcapping=30)
    assert (text.rope, text.window_rope) == (RopeConfig(2e6, RopeKind.LINEAR, 8.0), RopeConfig(5e3))
    assert (text.attention[0].scale, text.embedding_scale, text.norm_offset) == (0.125, 8.0, 1.0)
    assert (text.gate, text.logits_soft_cap, text.tied_embeddings) == (Gate.GELU_TANH, 30.0, True)
    assert (text.qk_norm, text.out_norms, text.head_dim) == (True, True, 256)
    assert _config("gemma3_text", **old).rope == text.rope
    assert _config("gemma3_text", **old).window_rope == text.window_rope
    inner = {key: value for key, value in _LLAMA.items() if key not in ("architectures", "model_type")}
    whole = parse_model_config({"model_type": "gemma3", "text_config": {**inner, **new}})
    assert (whole.family, whole.checkpoint_prefix, whole.rope) == ("gemma3", "language_model.", text.rope)
    bare = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 6, "sliding_window": 1024}
    published = parse_model_config({"model_type": "gemma3", "text_config": bare})
    assert (published.num_q_heads, published.num_kv_heads, published.head_dim) == (8, 4, 256)
    assert _windows(published) == [1024] * 5 + [None]
    assert (published.rope.theta, published.window_rope) == (1e6, RopeConfig(1e4))


def test_experts_stand_where_the_config_puts_them() -> None:
    model = _config("qwen3_moe", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True)
    assert model.experts == ExpertsConfig(8, 2, 24, True, frozenset({0, 1, 2}))
    assert _config("qwen3_moe", num_local_experts=16).experts == ExpertsConfig(16, 8, 768, False, frozenset({0, 1, 2}))
    assert _config("qwen3_moe", decoder_sparse_step=2).experts == ExpertsConfig(128, 8, 768, False, frozenset({1}))
    assert _config("qwen3_moe", mlp_only_layers=[0, 1, 2]).experts is None


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("mistral", {"layer_types": ["full_attention"] * 3}, "layer_types of a Mistral"),
        ("qwen2", {"max_window_layers": "all"}, "max_window_layers must be a whole number"),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 5}, "5 experts a token"),
        ("qwen3_moe", {"mlp_only_layers": 3}, "mlp_only_layers must be a list"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping of a Gemma 3"),
        ("gemma3_text", {"hidden_activation": "silu"}, "hidden_activation 'silu' is not supported"),
        ("gemma3_text", {"rope_parameters": {"full_attention": 3}}, "rope parameters of full_attention"),
        ("gemma3_text", {"rope_parameters": [3]}, "one object a kind of layer"),
        ("gemma3", {}, "needs a text_config"),
    ],
)
def test_what_a_family_does_not_compute_is_refused(family: str, changes: dict[str, Any], expected: str) -> None:
    assert expected in _refusal({**_LLAMA, "model_type": family, "architectures": None, **changes})


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
    "max_window_layers",
    "mlp_only_layers",
    "num_experts",
    "query_pre_attn_scalar",
    "sliding_window_pattern",
    "tie_word_embeddings",
    "attention_bias",
    "partial_rotary_factor",
]


_TYPES = ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma3_text"]


@settings(deadline=None, max_examples=120)
@given(family=st.sampled_from(_TYPES), changes=st.dictionaries(st.sampled_from(_KEYS), _JSON, max_size=4))
def test_any_entry_of_any_type_is_read_or_refused_never_a_crash(family: str, changes: dict[str, Any]) -> None:
    try:
        config = parse_model_config({**_LLAMA, "model_type": family, "architectures": None, **changes})
    except KvferryError:
        return
    assert config.num_q_heads % config.num_kv_heads == 0
    assert config.head_dim % 2 == 0


def test_end_tokens_come_from_the_generation_config_and_else_from_the_config() -> None:
    assert parse_eos_token_ids({"eos_token_id": [2, 7]}, {"eos_token_id": 3}, 10) == {2, 7}
    assert parse_eos_token_ids({"eos_token_id": 4}, {"eos_token_id": 3}, 10) == {4}
    assert parse_eos_token_ids({}, {"eos_token_id": 3}, 10) == {3}
    assert parse_eos_token_ids({}, {"eos_token_id": None}, 10) == frozenset()
    assert parse_eos_token_ids({}, {"text_config": {"eos_token_id": 5}}, 10) == {5}
    assert parse_eos_token_ids({}, {"text_config": 5}, 10) == frozenset()


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

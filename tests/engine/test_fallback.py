"""Models without native code, computed by transformers over the paged pool: the same tokens, or a refusal with its
reason."""

import json
import mmap
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPTNeoXConfig, GPTNeoXForCausalLM

from engine.attention.interface import LayerAttention
from engine.build import build_engine, plan_engine
from engine.models import load_model
from engine.models.fallback import FallbackModel, compare_with_plain, load_fallback
from engine.models.fallback_probe import probe_shape
from engine.models.transformers_attention import ATTENTION_NAME
from engine.ops.torch_ops import TorchOps
from engine.options import EngineOptions
from engine.prepare import prepare_model
from engine.prepared_model import PreparedModel, open_prepared
from engine.sequence import SamplingParams, Sequence
from kv_cache.layout import KVCacheLayout, KVDtype, LayoutVerdict
from runtime.errors import KvferryError
from tests.support.foreign_checkpoints import FOREIGN, make_foreign, save_foreign
from tests.support.tiny_checkpoints import edit_json, make_model, save_checkpoint

_PROMPT = [int(token) for token in torch.randint(3, 96, (40,), generator=torch.Generator().manual_seed(9))]


def _prepare(source: Path) -> PreparedModel:
    return prepare_model(source, source.parent / "cache", lambda *_: None)


def _refusal(source: Path) -> str:
    with pytest.raises(KvferryError) as caught:
        _prepare(source)
    assert [path for path in (source.parent / "cache").glob("*") if path.suffix != ".lock"] == []
    return caught.value.message


@pytest.mark.parametrize("model_type", FOREIGN)
def test_chunked_and_mixed_sequences_have_the_tokens_of_transformers(tmp_path: Path, model_type: str) -> None:
    model = make_foreign(model_type)
    source = save_checkpoint(tmp_path / "source", model)
    options = EngineOptions(
        model=str(source), cache_dir=tmp_path / "cache", block_size=8, num_blocks=24, token_budget=17, max_num_seqs=4
    )
    plan = plan_engine(options, available_bytes=None)
    engine = build_engine(options, plan, memoryview(mmap.mmap(-1, plan.pool_bytes)), prefill_only=False)
    sampling = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, prompt_logprobs=0)
    seqs = [Sequence(str(n), _PROMPT[:n], sampling, max_context_tokens=100) for n in (40, 5, 17)]
    for seq in seqs:
        engine.add(seq)
    scored: dict[str, list[float]] = {seq.seq_id: [] for seq in seqs}
    while engine.has_work:
        schedule = engine.schedule()
        for output in engine.publish(schedule, engine.run(schedule)):
            scored[output.seq.seq_id] += [token.logprob for token in output.prompt_logprobs]
        engine.check_integrity()
    model.generation_config.eos_token_id = None
    for seq in seqs:
        prompt = torch.tensor([seq.prompt_token_ids])
        expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=12)
        assert list(seq.output_token_ids) == expected[0, prompt.shape[1] :].tolist()
        with torch.inference_mode():
            logprobs = model(prompt).logits[0, :-1].log_softmax(-1).gather(1, prompt[0, 1:, None])[:, 0]
        assert scored[seq.seq_id] == pytest.approx(logprobs.tolist(), abs=1e-3)


def test_a_model_without_native_code_cannot_be_split(tmp_path: Path) -> None:
    source = save_foreign(tmp_path / "source", "olmo2")
    options = EngineOptions(model=str(source), cache_dir=tmp_path / "cache", tensor_parallel=2)
    with pytest.raises(KvferryError, match="runs through transformers and cannot be split"):
        plan_engine(options, available_bytes=None)


def test_a_probe_sees_how_layers_look_back(tmp_path: Path) -> None:
    shape = probe_shape(save_foreign(tmp_path / "m", "gemma2"))
    assert shape.attention == (LayerAttention(20**-0.5, 13, 2.0), LayerAttention(20**-0.5, None, 2.0))
    assert (shape.family, shape.num_layers, shape.num_q_heads, shape.num_kv_heads) == ("gemma2", 2, 6, 2)
    assert (shape.head_dim, shape.vocab_size, shape.max_context_tokens) == (16, 96, 256)


def test_a_prepared_directory_holds_the_checkpoint_and_opens_without_transformers(tmp_path: Path) -> None:
    source = save_foreign(tmp_path / "source", "olmo2")
    model = _prepare(source)
    assert (model.path / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    facts = json.loads((model.path / "kvferry.json").read_text())
    assert facts["transformers"]["shape"]["family"] == "olmo2"
    assert open_prepared(model.path) == model
    with pytest.raises(KvferryError, match="has no native code"):
        _ = model.config
    (model.path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(KvferryError, match="missing or damaged"):
        open_prepared(model.path)


def test_a_native_and_a_fallback_worker_of_one_checkpoint_refuse_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_native(config: object) -> None:
        raise KvferryError(1, "not native today")  # type: ignore[arg-type]

    def layout(model: PreparedModel) -> KVCacheLayout:
        shape = model.shape
        return KVCacheLayout(
            model_id=model.name,
            model_revision=model.revision,
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            block_size=8,
            dtype=KVDtype.FP32,
        )

    source = save_checkpoint(tmp_path / "source", make_model("llama_gqa"))
    native = prepare_model(source, tmp_path / "native", lambda *_: None)
    monkeypatch.setattr("engine.prepare.parse_model_config", not_native)
    fallback = prepare_model(source, tmp_path / "fallback", lambda *_: None)
    assert fallback.shape == replace(probe_shape(source), family="llama")
    match = layout(native).compare(layout(fallback))
    assert match.verdict is LayoutVerdict.REFUSED
    assert "model_revision" in str(match)


def test_a_rope_that_the_native_code_lacks_goes_through_transformers(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    model = _prepare(save_checkpoint(tmp_path / "source", make_model("llama_gqa", rope_parameters=yarn)))
    assert isinstance(load_model(model, TorchOps()), FallbackModel)


@pytest.mark.parametrize(
    ("model_type", "settings", "reason"),
    [
        ("bloom", {}, "asks for attention 0 times"),
        ("falcon", {}, "attentions of its own"),
        ("jamba", {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2}, "asks for attention 1 times"),
        ("deepseek_v3", {"moe_intermediate_size": 16, "n_routed_experts": 8}, "keys of 192 numbers and values of 128"),
        ("gpt_oss", {"num_local_experts": 4, "head_dim": 16}, "attention with s_aux"),
        ("llama4_text", {"attention_chunk_size": 16}, "within chunks"),
        ("olmo2", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "longest sequence"),
    ],
)
def test_what_cannot_run_on_the_pool_is_refused_with_the_reason(
    tmp_path: Path, model_type: str, settings: dict[str, Any], reason: str
) -> None:
    # The weights are never looked at.
    (tmp_path / "config.json").write_text(json.dumps({**make_config(model_type, settings)}))
    with pytest.raises(KvferryError, match=reason):
        probe_shape(tmp_path)


def make_config(model_type: str, settings: dict[str, Any]) -> dict[str, Any]:
    shape = {"vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0}
    return {"model_type": model_type, **shape, **heads, **settings}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "no_such_model"}, "transformers cannot read config.json"),
        ({"model_type": "t5"}, "has an encoder"),
        ({"architectures": ["Olmo2ForSequenceClassification"]}, "cannot generate text"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised safetensors are not supported"),
        ({"sliding_window": 8}, "asks for the windows"),
        ({"num_hidden_layers": "two"}, "transformers cannot read config.json"),
    ],
)
def test_a_config_that_transformers_would_get_wrong_is_refused(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    source = save_foreign(tmp_path / "source", "olmo2")
    edit_json(source / "config.json", **changes)
    message = _refusal(source)
    assert reason in message
    assert "; transformers cannot stand in: " in message


def test_weights_that_are_missing_or_too_many_are_refused(tmp_path: Path) -> None:
    source = save_foreign(tmp_path / "source", "olmo2")
    tensors = load_file(source / "model.safetensors")
    norm = tensors.pop("model.norm.weight")
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    assert "has missing tensors: model.norm.weight" in _refusal(source)
    tensors |= {"model.norm.weight": norm, "model.extra.weight": norm.clone()}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    assert "has unexpected tensors: model.extra.weight" in _refusal(source)
    (source / "model.safetensors").write_bytes(b"no weights")
    assert "is no readable safetensors file" in _refusal(source)


def test_another_shape_than_when_it_was_prepared_is_refused(tmp_path: Path) -> None:
    source = save_foreign(tmp_path / "source", "olmo2")
    shape = probe_shape(source)
    with pytest.raises(KvferryError, match="but the installed transformers makes it"):
        load_fallback(source, replace(shape, attention=(LayerAttention(1.0),) * 2))


class _Forgetful(GPTNeoXForCausalLM):
    """Does not heed positions, as long as it is not alone in a batch."""

    def forward(self, position_ids: Any = None, **options: Any) -> Any:
        return super().forward(**options)


def test_a_model_that_ignores_positions_is_found_out(tmp_path: Path) -> None:
    source = save_foreign(tmp_path / "source", "gpt_neox")
    shape = probe_shape(source)
    config = GPTNeoXConfig.from_pretrained(source)
    network = _Forgetful.from_pretrained(source, config=config, attn_implementation=ATTENTION_NAME)
    with pytest.raises(KvferryError, match="its attention cannot be replaced"):
        compare_with_plain(FallbackModel(network.eval(), shape))
    honest = AutoModelForCausalLM.from_pretrained(source, attn_implementation=ATTENTION_NAME)
    compare_with_plain(FallbackModel(honest.eval(), shape))


def test_without_transformers_the_refusal_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save_foreign(tmp_path / "source", "olmo2")
    monkeypatch.setitem(sys.modules, "transformers", None)
    message = _refusal(source)
    assert "model_type 'olmo2' is not supported" in message
    assert "pip install 'kvferry[fallback]'" in message

"""Preparing a model: once, whole or not at all, from every kind of source; refusals that help."""

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from engine import prepare
from engine.families import parse_model_config
from engine.prepare import prepare_model
from engine.prepared_model import PreparedModel, checkpoint_tensors, open_prepared
from engine.tensor_map import fuse, prepared_tensors
from engine.weights import map_weights
from kvferry_rpc.common_pb2 import ErrorCode
from runtime.errors import KvferryError
from tests.support.slow_prepare import prepare_halfway
from tests.support.tiny_checkpoints import VARIANTS, edit_json, make_model, save_checkpoint

_FILES = {
    "config.json",
    "generation_config.json",
    "kvferry.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "weights.safetensors",
}


def _nothing(stage: str, fraction: float) -> None:
    """No interest in progress."""


def _source(tmp_path: Path, variant: str = "llama_gqa", **options: Any) -> Path:
    return save_checkpoint(tmp_path / "source", make_model(variant), **options)


def _prepare(source: Path) -> PreparedModel:
    return prepare_model(source, source.parent / "cache", _nothing)


def _refusal(source: Path) -> KvferryError:
    """The error; nothing may be left in the cache but the lock."""
    with pytest.raises(KvferryError) as caught:
        _prepare(source)
    cache = source.parent / "cache"
    assert [path for path in cache.glob("*") if path.suffix != ".lock"] == []
    return caught.value


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_tensor_of_the_checkpoint_is_in_the_prepared_file(tmp_path: Path, variant: str) -> None:
    source = _source(tmp_path, variant)
    restored = checkpoint_tensors(_prepare(source))
    original = load_file(source / "model.safetensors")
    assert restored.keys() == original.keys()
    # Gemma's norms are prepared with 1 added, which rounds.
    tolerance = 2**-23 if variant.startswith("gemma3") else 0
    for name, tensor in original.items():
        torch.testing.assert_close(restored[name], tensor, atol=tolerance, rtol=0, msg=name)


@pytest.mark.parametrize("variant", ["llama_tied", "qwen3"])
def test_transformers_can_run_a_prepared_directory_for_comparison(tmp_path: Path, variant: str) -> None:
    model = _prepare(_source(tmp_path, variant))
    restored = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model.path))
    missing, unexpected = restored.load_state_dict(checkpoint_tensors(model), strict=False)
    assert set(missing) <= {"lm_head.weight"}
    assert unexpected == []
    tokens = torch.arange(3, 40)[None]
    with torch.inference_mode():
        assert torch.equal(restored.eval()(tokens).logits, make_model(variant)(tokens).logits)


def test_fused_tensors_have_the_names_and_shapes_of_the_format(tmp_path: Path) -> None:
    model = _prepare(_source(tmp_path, "qwen2_tied"))
    weights = map_weights(model.weights_path)
    assert weights["embed.weight"].shape == (96, 48)
    assert weights["layers.1.qkv.weight"].shape == (80, 48)
    assert weights["layers.1.qkv.bias"].shape == (80,)
    assert weights["layers.1.gate_up.weight"].shape == (160, 48)
    assert "lm_head.weight" not in weights
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}


def test_rows_that_rotary_embedding_turns_together_become_neighbours() -> None:
    config = parse_model_config(make_model("llama_gqa").config.to_dict())
    qkv = next(tensor for tensor in prepared_tensors(config) if tensor.name == "layers.0.qkv.weight")
    numbered = {part.name: torch.arange(part.shape[0]).float()[:, None].expand(part.shape) for part in qkv.parts}
    rows = fuse(qkv, config.head_dim, numbered.__getitem__)[:, 0].tolist()
    assert rows[:16] == [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]  # q, two heads of 8
    assert rows[48:56] == [0, 4, 1, 5, 2, 6, 3, 7]  # k
    assert rows[64:] == list(range(16))  # v


def test_the_prepared_directory_describes_itself(tmp_path: Path) -> None:
    source = _source(tmp_path)
    model = _prepare(source)
    assert {path.name for path in model.path.iterdir()} == _FILES
    assert (model.name, model.eos_token_ids, model.config.num_layers) == ("source", {2}, 2)
    assert model.path.parent == tmp_path / "cache"
    assert json.loads((model.path / "kvferry.json").read_text())["source"] == str(source)
    assert json.loads(model.tokenizer_path.read_text()) == json.loads((source / "tokenizer.json").read_text())
    assert model.chat_template_path is None
    assert open_prepared(model.path) == model


def test_a_prepared_directory_is_used_as_it_is(tmp_path: Path) -> None:
    model = _prepare(_source(tmp_path))
    assert prepare_model(model.path, tmp_path / "unused", _nothing) == model
    assert not (tmp_path / "unused").exists()


def test_the_second_time_nothing_is_converted(tmp_path: Path) -> None:
    source = _source(tmp_path)
    first = _prepare(source)
    inode = first.weights_path.stat().st_ino
    stages: list[str] = []
    again = prepare_model(source, tmp_path / "cache", lambda stage, _: stages.append(stage))
    assert again == first
    assert again.weights_path.stat().st_ino == inode
    assert set(stages) == {"reading the source", "ready"}


def test_a_changed_tokenizer_makes_a_new_directory_of_the_same_revision(tmp_path: Path) -> None:
    source = _source(tmp_path)
    first = _prepare(source)
    edit_json(source / "tokenizer_config.json", eos_token="w3")
    second = _prepare(source)
    assert second.path != first.path
    assert second.revision == first.revision


def test_progress_never_goes_back_and_ends_at_one(tmp_path: Path) -> None:
    fractions: list[float] = []
    prepare_model(_source(tmp_path), tmp_path / "cache", lambda _, fraction: fractions.append(fraction))
    assert fractions == sorted(fractions)
    assert fractions[0] >= 0
    assert fractions[-1] == 1.0
    assert len(set(fractions)) > 10


def test_a_sharded_checkpoint_gives_the_same_weights(tmp_path: Path) -> None:
    model = make_model("llama_gqa")
    whole = _prepare(save_checkpoint(tmp_path / "whole", model))
    sharded = save_checkpoint(tmp_path / "sharded", model, max_shard_size="20KB")
    assert len(list(sharded.glob("*.safetensors"))) > 3
    assert _prepare(sharded).weights_path.read_bytes() == whole.weights_path.read_bytes()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_becomes_fp32_exactly(tmp_path: Path, dtype: torch.dtype) -> None:
    source = save_checkpoint(tmp_path / "source", make_model("qwen3").to(dtype))
    restored = checkpoint_tensors(_prepare(source))
    for name, tensor in load_file(source / "model.safetensors").items():
        assert tensor.dtype == dtype
        assert torch.equal(restored[name], tensor.float())


def test_a_tied_checkpoint_may_carry_its_head_and_old_ones_their_frequencies(tmp_path: Path) -> None:
    source = _source(tmp_path, "llama_tied")
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, source / "model.safetensors")
    assert "lm_head.weight" not in map_weights(_prepare(source).weights_path)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ one }}\r\n", "{{ one }}\r\n"),
        ([{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}], "d"),
    ],
)
def test_a_chat_template_inside_the_tokenizer_config_moves_out(tmp_path: Path, template: object, expected: str) -> None:
    source = _source(tmp_path)
    edit_json(source / "tokenizer_config.json", chat_template=template)
    model = _prepare(source)
    assert model.chat_template_path is not None
    assert model.chat_template_path.read_bytes().decode() == expected
    assert json.loads(model.tokenizer_config_path.read_text()) == {"bos_token": "w1", "eos_token": "w2"}


def test_a_chat_template_file_wins_over_the_tokenizer_config(tmp_path: Path) -> None:
    source = _source(tmp_path)
    edit_json(source / "tokenizer_config.json", chat_template="inside")
    (source / "chat_template.jinja").write_text("file")
    template = _prepare(source).chat_template_path
    assert template is not None
    assert template.read_text() == "file"


def test_a_source_without_optional_files_is_served(tmp_path: Path) -> None:
    source = _source(tmp_path)
    (source / "generation_config.json").unlink()
    (source / "tokenizer_config.json").unlink()
    model = _prepare(source)
    assert model.eos_token_ids == {2}
    assert {path.name for path in model.path.iterdir()} == _FILES


def _drop(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.__delitem__(name)


def _put(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (_drop("model.layers.1.mlp.up_proj.weight"), "lacks tensors .* model.layers.1.mlp.up_proj.weight"),
        (_drop("lm_head.weight"), "lacks tensors .* lm_head.weight"),
        (_put("model.norm.weight", torch.ones(47)), r"model.norm.weight has shape \[47\], but .* \[48\]"),
        (_put("model.norm.weight", torch.ones(48, dtype=torch.int8)), "only fp32, fp16 and bf16"),
        (_put("model.norm.weight", torch.full((48,), torch.nan)), "not finite"),
        (_put("model.layers.0.self_attn.q_proj.bias", torch.ones(48)), "no use for: model.layers.0.self_attn.q_proj"),
        (_put("model.layers.0.mlp.up_proj.weight_scale", torch.ones(1)), "quantised weights and adapters"),
        (_put("model.layers.2.mlp.up_proj.weight", torch.ones(1)), "no use for: model.layers.2"),
    ],
)
def test_a_checkpoint_that_does_not_fit_its_config_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], None], expected: str
) -> None:
    source = _source(tmp_path)
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, source / "model.safetensors")
    error = _refusal(source)
    assert error.code == ErrorCode.INVALID_REQUEST
    assert re.search(expected, error.message), error.message


def test_a_truncated_or_scrambled_checkpoint_is_refused(tmp_path: Path) -> None:
    source = _source(tmp_path)
    path = source / "model.safetensors"
    whole = path.read_bytes()
    for content in (whole[:-100], whole[:50], b"", b"\x80\x02}q\x00."):
        path.write_bytes(content)
        assert "no readable safetensors file" in _refusal(source).message


def test_an_index_that_promises_absent_tensors_is_refused(tmp_path: Path) -> None:
    source = _source(tmp_path, max_shard_size="20KB")
    index_path = source / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    first, *_, last = sorted(set(index["weight_map"].values()))
    index["weight_map"]["model.extra"] = first
    index_path.write_text(json.dumps(index))
    assert "lacks model.extra, which the index places there" in _refusal(source).message
    (source / last).unlink()
    assert "the checkpoint is incomplete" in _refusal(source).message


def test_bad_settings_and_tokenizers_are_refused(tmp_path: Path) -> None:
    for number, (file, content, expected) in enumerate(
        (
            ("config.json", "{", "not valid JSON"),
            ("generation_config.json", '{"eos_token_id": 96}', "no token of the vocabulary"),
            ("tokenizer.json", "{", "not valid JSON"),
            ("tokenizer_config.json", '{"chat_template": 3}', "neither a text nor a list"),
            ("tokenizer_config.json", '{"chat_template": [{"name": "tool"}]}', "neither a text nor a list"),
        )
    ):
        source = save_checkpoint(tmp_path / f"{number}" / "source", make_model("llama_gqa"))
        (source / file).write_text(content)
        assert expected in _refusal(source).message
    source = _source(tmp_path)
    (source / "tokenizer.json").unlink()
    assert "AutoTokenizer.from_pretrained" in _refusal(source).message


def test_a_cache_directory_that_cannot_be_written_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(KvferryError, match="cannot prepare source in") as caught:
        _prepare(_source(tmp_path))
    assert caught.value.code == ErrorCode.UNAVAILABLE
    assert caught.value.field == "cache_dir"


def test_a_full_disk_is_noticed_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "_SPARE_BYTES", 1 << 60)
    error = _refusal(_source(tmp_path))
    assert error.code == ErrorCode.UNAVAILABLE
    assert "make room" in error.message


def test_a_prepared_directory_of_another_format_or_damaged_is_refused(tmp_path: Path) -> None:
    model = _prepare(_source(tmp_path))
    edit_json(model.path / "kvferry.json", format=99)
    with pytest.raises(KvferryError, match="prepared in format 99"):
        open_prepared(model.path)
    edit_json(model.path / "kvferry.json", format=1, dtype="fp4")
    with pytest.raises(KvferryError, match=r"\(fp4\), but this kvferry reads format 1 \(fp32, bf16, fp16, int8\)"):
        open_prepared(model.path)
    edit_json(model.path / "kvferry.json", dtype="fp32")
    os.truncate(model.weights_path, 5000)
    with pytest.raises(KvferryError, match="is damaged"):
        open_prepared(model.path)
    model.tokenizer_path.unlink()
    with pytest.raises(KvferryError, match=r"has no tokenizer.json"):
        open_prepared(model.path)
    edit_json(model.path / "kvferry.json", revision=None)
    with pytest.raises(KvferryError, match="names no model or no revision"):
        open_prepared(model.path)


def test_a_damaged_cache_entry_is_made_again(tmp_path: Path) -> None:
    source = _source(tmp_path)
    model = _prepare(source)
    whole = model.weights_path.read_bytes()
    os.truncate(model.weights_path, 5000)
    assert _prepare(source) == model
    assert model.weights_path.read_bytes() == whole


def test_an_interrupted_conversion_leaves_nothing_that_could_be_opened(tmp_path: Path) -> None:
    source, cache = _source(tmp_path), tmp_path / "cache"
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=prepare_halfway, args=(source, cache, there))
    process.start()
    assert here.recv() == "half"
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    left = [path.name for path in cache.iterdir() if path.suffix != ".lock"]
    assert len(left) == 1
    assert left[0].endswith(".partial")
    assert not (cache / left[0] / "kvferry.json").exists()

    model = _prepare(source)
    assert {path.name for path in cache.iterdir() if path.suffix != ".lock"} == {model.path.name}


def test_processes_that_start_together_convert_once(tmp_path: Path) -> None:
    source, cache = _source(tmp_path), tmp_path / "cache"
    here, there = multiprocessing.Pipe()
    first = multiprocessing.get_context("spawn").Process(target=prepare_halfway, args=(source, cache, there))
    first.start()
    assert here.recv() == "half"
    stages: list[str] = []

    def progress(stage: str, fraction: float) -> None:
        if stage.startswith("waiting"):
            here.send(None)  # only now may the first one finish
        stages.append(stage)

    model = prepare_model(source, cache, progress)
    assert here.recv() == model.path
    first.join()
    assert "waiting for another process that is preparing this model" in stages
    assert "converting weights" not in stages


def test_the_command_line_prints_progress_and_the_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = _source(tmp_path)
    arguments = [str(source), "--cache-dir", str(tmp_path / "cache")]
    assert prepare.main([*arguments, "--json"]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {event["event"] for event in events[:-1]} == {"progress"}
    assert events[-1]["event"] == "ready"
    assert open_prepared(Path(events[-1]["path"])).revision == events[-1]["revision"]
    assert prepare.main(arguments) == 0
    assert capsys.readouterr().out.splitlines()[-1] == events[-1]["path"]


def test_a_link_leads_to_what_was_prepared_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    link = tmp_path / "model"
    link.symlink_to(tmp_path / "what was there before")
    arguments = [str(_source(tmp_path)), "--cache-dir", str(tmp_path / "cache"), "--link", str(link)]
    assert prepare.main(arguments) == 0
    assert str(link.readlink()) == capsys.readouterr().out.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".model")] == []


def test_a_link_that_cannot_be_made_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(_source(tmp_path)), "--cache-dir", str(tmp_path / "cache")]
    assert prepare.main([*arguments, "--link", str(tmp_path / "nowhere" / "model"), "--json"]) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["code"] == "unavailable"


def test_the_command_line_reports_errors_and_fails(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "engine.prepare", str(tmp_path / "none"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert json.loads(done.stdout)["code"] == "unknown_model"
    assert done.stderr == ""

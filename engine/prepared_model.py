"""A model directory in kvferry's own form, ready to be mapped: what `prepare` leaves behind and workers open."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from engine.model_config import ModelConfig, parse_eos_token_ids, parse_model_config, read_json_object, unusable
from engine.tensor_map import PREPARED_FORMAT, prepared_tensors, split
from engine.weights import map_weights

MANIFEST_NAME = "kvferry.json"
WEIGHTS_NAME = "weights.safetensors"
CONFIG_NAME = "config.json"
GENERATION_CONFIG_NAME = "generation_config.json"
TOKENIZER_NAME = "tokenizer.json"
TOKENIZER_CONFIG_NAME = "tokenizer_config.json"
CHAT_TEMPLATE_NAME = "chat_template.jinja"


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A prepared directory. It is never changed once it exists, so any number of processes may have it open."""

    path: Path
    name: str  # the name under which the model is served
    revision: str  # hex digest of the source's weights and config: equal on all workers that may exchange KV
    config: ModelConfig
    eos_token_ids: frozenset[int]

    @property
    def weights_path(self) -> Path:
        """safetensors with the tensors of `tensor_map.prepared_tensors`, fp32."""
        return self.path / WEIGHTS_NAME

    @property
    def tokenizer_path(self) -> Path:
        """`tokenizer.json` as the tokenizers library reads it."""
        return self.path / TOKENIZER_NAME

    @property
    def tokenizer_config_path(self) -> Path:
        """Names of the special tokens; an empty object when the source has none. Without the chat template."""
        return self.path / TOKENIZER_CONFIG_NAME

    @property
    def chat_template_path(self) -> Path | None:
        """The Jinja chat template, or None for a model that has none."""
        path = self.path / CHAT_TEMPLATE_NAME
        return path if path.is_file() else None

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of each tensor in the weights file, in file order."""
        return {tensor.name: tensor.shape for tensor in prepared_tensors(self.config)}


def is_prepared(path: Path) -> bool:
    """Whether `path` is a directory that `prepare` made, judged by its manifest's presence alone."""
    return (path / MANIFEST_NAME).is_file()


def manifest(name: str, revision: str, source: str, weights_bytes: int) -> dict[str, Any]:
    """Content of the manifest that makes a directory a prepared one."""
    return {
        "format": PREPARED_FORMAT,
        "name": name,
        "revision": revision,
        "source": source,
        "dtype": "fp32",
        "weights_bytes": weights_bytes,
    }


def open_prepared(path: Path) -> PreparedModel:
    """Read and check a prepared directory; the weights are not read, only their size is compared.

    Raises KvferryError when it comes from another version of kvferry, or something is missing or damaged.
    """
    facts = read_json_object(path / MANIFEST_NAME)
    if facts.get("format") != PREPARED_FORMAT or facts.get("dtype") != "fp32":
        raise unusable(
            f"{path} was prepared in format {facts.get('format')!r} ({facts.get('dtype')}), but this kvferry "
            f"reads format {PREPARED_FORMAT} (fp32): prepare the model again from its source"
        )
    name, revision = facts.get("name"), facts.get("revision")
    if not isinstance(name, str) or not isinstance(revision, str) or not name or not revision:
        raise unusable(f"{path / MANIFEST_NAME} names no model or no revision")
    config_json = read_json_object(path / CONFIG_NAME)
    config = parse_model_config(config_json)
    model = PreparedModel(
        path=path,
        name=name,
        revision=revision,
        config=config,
        eos_token_ids=parse_eos_token_ids(
            read_json_object(path / GENERATION_CONFIG_NAME), config_json, config.vocab_size
        ),
    )
    for file in (model.weights_path, model.tokenizer_path, model.tokenizer_config_path):
        if not file.is_file():
            raise unusable(f"{path} has no {file.name}: prepare the model again from its source")
    if model.weights_path.stat().st_size != facts.get("weights_bytes"):
        raise unusable(f"{model.weights_path} is damaged: prepare the model again from its source")
    return model


def checkpoint_tensors(model: PreparedModel) -> dict[str, Tensor]:
    """The weights under transformers' names and in its order of rows, fp32: for comparing with transformers.

    q and k are copies, the others views of the mapped file. Raises KvferryError when the file is damaged.
    """
    weights = map_weights(model.weights_path)
    parts: dict[str, Tensor] = {}
    for tensor in prepared_tensors(model.config):
        parts |= split(tensor, model.config.head_dim, weights[tensor.name])
    return parts

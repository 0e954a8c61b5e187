"""A model directory in kvferry's own form, ready to be mapped: what `prepare` leaves behind and workers open."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from engine.fallback_manifest import is_fallback, read_fallback
from engine.families import parse_eos_token_ids, parse_model_config
from engine.model_config import ModelConfig, ModelShape, read_json_object, unusable
from engine.tensor_map import PREPARED_FORMAT, prepared_tensors, split
from engine.weight_dtypes import WeightDtype, stored_forms, widened
from engine.weights import TensorForm, map_weights

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
    shape: ModelShape  # a ModelConfig if the native decoder computes it
    eos_token_ids: frozenset[int]
    weight_dtype: WeightDtype = WeightDtype.FP32

    @property
    def config(self) -> ModelConfig:
        """What the native decoder needs. Raises KvferryError for a model that transformers computes."""
        if not isinstance(self.shape, ModelConfig):
            raise unusable(f"{self.name} ({self.shape.family}) has no native code: it runs through transformers")
        return self.shape

    @property
    def weights_path(self) -> Path:
        """safetensors with the tensors of `tensor_forms`."""
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

    def tensor_forms(self) -> dict[str, TensorForm]:
        """Each tensor of the weights file by name, in file order."""
        return stored_forms(prepared_tensors(self.config), self.weight_dtype)


def is_prepared(path: Path) -> bool:
    """Whether `path` is a directory that `prepare` made, judged by its manifest's presence alone."""
    return (path / MANIFEST_NAME).is_file()


def manifest(name: str, revision: str, source: str, dtype: WeightDtype, weights_bytes: int) -> dict[str, Any]:
    """Content of the manifest that makes a directory a prepared one."""
    return {
        "format": PREPARED_FORMAT,
        "name": name,
        "revision": revision,
        "source": source,
        "dtype": dtype.value,
        "weights_bytes": weights_bytes,
    }


def open_prepared(path: Path) -> PreparedModel:
    """Read and check a prepared directory; the weights are not read, only their size is compared.

    Raises KvferryError when it comes from another version of kvferry, or something is missing or damaged.
    """
    facts = read_json_object(path / MANIFEST_NAME)
    name, revision = facts.get("name"), facts.get("revision")
    if not isinstance(name, str) or not isinstance(revision, str) or not name or not revision:
        raise unusable(f"{path / MANIFEST_NAME} names no model or no revision")
    for file in (TOKENIZER_NAME, TOKENIZER_CONFIG_NAME):
        if not (path / file).is_file():
            raise unusable(f"{path} has no {file}: prepare the model again from its source")
    config_json = read_json_object(path / CONFIG_NAME)
    dtype = WeightDtype.FP32
    shape: ModelShape
    if is_fallback(facts):
        shape = read_fallback(path, facts)
    else:
        shape, dtype = _read_native(path, facts, config_json)
    return PreparedModel(
        path=path,
        name=name,
        revision=revision,
        shape=shape,
        eos_token_ids=parse_eos_token_ids(
            read_json_object(path / GENERATION_CONFIG_NAME), config_json, shape.vocab_size
        ),
        weight_dtype=dtype,
    )


def _read_native(
    path: Path, facts: Mapping[str, Any], config_json: Mapping[str, Any]
) -> tuple[ModelConfig, WeightDtype]:
    known = [dtype.value for dtype in WeightDtype]
    if facts.get("format") != PREPARED_FORMAT or facts.get("dtype") not in known:
        raise unusable(
            f"{path} was prepared in format {facts.get('format')!r} ({facts.get('dtype')}), but this kvferry "
            f"reads format {PREPARED_FORMAT} ({', '.join(known)}): prepare the model again from its source"
        )
    weights = path / WEIGHTS_NAME
    if not weights.is_file():
        raise unusable(f"{path} has no {weights.name}: prepare the model again from its source")
    if weights.stat().st_size != facts.get("weights_bytes"):
        raise unusable(f"{weights} is damaged: prepare the model again from its source")
    return parse_model_config(config_json), WeightDtype(facts["dtype"])


def checkpoint_tensors(model: PreparedModel) -> dict[str, Tensor]:
    """The weights under transformers' names and in its order of rows, fp32: for comparing with transformers.

    q and k are copies, and so is all that is stored narrower; the others are views of the mapped file. Raises
    KvferryError when the file is damaged.
    """
    weights = map_weights(model.weights_path)
    parts: dict[str, Tensor] = {}
    for tensor in prepared_tensors(model.config):
        parts |= split(tensor, model.config.head_dim, widened(tensor.name, weights))
    return parts

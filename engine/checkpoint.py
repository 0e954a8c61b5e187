"""A safetensors checkpoint as transformers saves it, read one tensor at a time."""

import json
import shutil
from collections.abc import Iterator, Set
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.model_config import ModelConfig, read_json_object, unusable
from engine.model_source import weight_files
from engine.prepared_model import (
    CHAT_TEMPLATE_NAME,
    CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    TOKENIZER_CONFIG_NAME,
    TOKENIZER_NAME,
)
from engine.tensor_map import prepared_tensors
from engine.weights import summarise

_MAX_TOKENIZER_BYTES = 256 * 1024 * 1024
# Old checkpoints store the rotary frequencies, which follow from the configuration.
_DERIVED_SUFFIX = ".rotary_emb.inv_freq"


class ModelReader(Protocol):
    """A source that is open: what `prepare` needs of it. All methods raise KvferryError for a damaged source."""

    @property
    def config_json(self) -> dict[str, Any]:
        """Content of `config.json`, in transformers' words."""
        ...

    @property
    def generation_config_json(self) -> dict[str, Any]:
        """Content of `generation_config.json`; empty when there is none."""
        ...

    @property
    def tensor_names(self) -> Set[str]:
        """Names of all tensors, in transformers' words."""
        ...

    def read(self, name: str) -> Tensor:
        """One tensor, in transformers' order of rows, in the dtype of the source."""
        ...

    def write_tokenizer(self, target: Path) -> None:
        """Write tokenizer.json, tokenizer_config.json (without chat template) and, if any, chat_template.jinja."""
        ...


class Checkpoint:
    """A directory with one or many safetensors files. Made by `open_checkpoint`; read by one thread."""

    def __init__(self, path: Path, locations: dict[str, Any]) -> None:
        self._path = path
        self._locations = locations
        self.config_json = read_json_object(path / CONFIG_NAME)
        generation_config = path / GENERATION_CONFIG_NAME
        self.generation_config_json = read_json_object(generation_config) if generation_config.is_file() else {}

    @property
    def tensor_names(self) -> Set[str]:
        """Names of all tensors, over all files."""
        return self._locations.keys()

    def read(self, name: str) -> Tensor:
        """The tensor in the dtype of the file. Raises KvferryError when the file is damaged."""
        try:
            tensor: Tensor = self._locations[name].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise unusable(f"cannot read {name} of {self._path}: {error}") from error
        return tensor

    def write_tokenizer(self, target: Path) -> None:
        """Copy the tokenizer's files. Older ones keep the chat template in tokenizer_config.json: it moves out."""
        tokenizer = self._path / TOKENIZER_NAME
        if not tokenizer.is_file():
            raise unusable(
                f"{self._path} has no {TOKENIZER_NAME}; transformers can write it: "
                f"AutoTokenizer.from_pretrained({str(self._path)!r}).save_pretrained({str(self._path)!r})"
            )
        _check_json(tokenizer)
        shutil.copyfile(tokenizer, target / TOKENIZER_NAME)
        settings_path = self._path / TOKENIZER_CONFIG_NAME
        write_tokenizer_settings(target, read_json_object(settings_path) if settings_path.is_file() else {})
        template = self._path / CHAT_TEMPLATE_NAME
        if template.is_file():
            shutil.copyfile(template, target / CHAT_TEMPLATE_NAME)


@contextmanager
def open_checkpoint(directory: Path) -> Iterator[Checkpoint]:
    """Open all weight files of a directory. Raises KvferryError for missing or damaged ones."""
    with ExitStack() as stack:
        locations: dict[str, Any] = {}
        for file, promised in weight_files(directory).items():
            try:
                opened = stack.enter_context(safe_open(directory / file, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise unusable(f"{directory / file} is no readable safetensors file: {error}") from error
            names = list(opened.keys())
            absent = sorted(set(names if promised is None else promised) - set(names))
            if absent:
                raise unusable(f"{directory / file} lacks {summarise(absent)}, which the index places there")
            locations.update(dict.fromkeys(names, opened))
        yield Checkpoint(directory, locations)


def check_tensor_names(names: Set[str], config: ModelConfig, source: Path) -> None:
    """Raise KvferryError unless a source has exactly the tensors of its config.

    One tensor too many is refused as well: a bias or a scale that is left out changes every answer.
    """
    needed = {part.name for tensor in prepared_tensors(config) for part in tensor.parts}
    missing = sorted(needed - names)
    if missing:
        raise unusable(f"{source} lacks tensors that its config asks for: {summarise(missing)}")
    extra = {
        name
        for name in names - needed
        if name.startswith(config.checkpoint_prefix) and not name.endswith(_DERIVED_SUFFIX)
    }
    if config.tied_embeddings:
        extra.discard(f"{config.checkpoint_prefix}lm_head.weight")
    if extra:
        raise unusable(
            f"{source} has tensors that a {config.family} model of its config has no use for: "
            f"{summarise(sorted(extra))}; quantised weights and adapters are not supported"
        )


def write_tokenizer_settings(target: Path, settings: dict[str, Any]) -> None:
    """Write tokenizer_config.json, and the chat template that `settings` may hold to a file of its own.

    Raises KvferryError for a template that is neither a text nor a list with one called `default`.
    """
    settings = dict(settings)
    template = settings.pop("chat_template", None)
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default", template)
    if template is not None and not isinstance(template, str):
        raise unusable(f"{TOKENIZER_CONFIG_NAME}: chat_template is neither a text nor a list with one named 'default'")
    write_json(target / TOKENIZER_CONFIG_NAME, settings)
    if template is not None:
        (target / CHAT_TEMPLATE_NAME).write_text(template, encoding="utf-8", newline="")


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON object for people and programs to read."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _check_json(path: Path) -> None:
    if path.stat().st_size > _MAX_TOKENIZER_BYTES:
        raise unusable(f"{path} is too big for a tokenizer")
    try:
        json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise unusable(f"{path} is not valid JSON: {error}") from error

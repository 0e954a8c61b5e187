"""What a prepared directory says of a model that transformers computes: its shape and its weight files."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engine.attention.interface import LayerAttention
from engine.model_config import ModelShape, unusable

FALLBACK_FORMAT = 1
_ENTRY = "transformers"


def fallback_revision(revision: str) -> str:
    """The revision of a checkpoint whose K is in transformers' order: never equal to that of a native model."""
    return f"{revision}-transformers{FALLBACK_FORMAT}"


def fallback_manifest(
    *, name: str, revision: str, source: str, shape: ModelShape, weight_bytes: Mapping[str, int]
) -> dict[str, Any]:
    """Content of the manifest. `weight_bytes`: the size of each weight file."""
    return {
        "name": name,
        "revision": revision,
        "source": source,
        "dtype": "fp32",
        _ENTRY: {"format": FALLBACK_FORMAT, "shape": asdict(shape), "weight_bytes": dict(weight_bytes)},
    }


def is_fallback(facts: Mapping[str, Any]) -> bool:
    """Whether a manifest is that of a model that transformers computes."""
    return _ENTRY in facts


def read_fallback(path: Path, facts: Mapping[str, Any]) -> ModelShape:
    """The shape in the manifest `facts` of the directory `path`; the sizes of its weight files are compared.

    Raises KvferryError when another version of kvferry wrote it, or something is missing or damaged.
    """
    entry = facts[_ENTRY]
    if not isinstance(entry, dict) or entry.get("format") != FALLBACK_FORMAT:
        raise unusable(f"{path} was prepared for another version of kvferry: prepare the model again from its source")
    try:
        values = dict(entry["shape"])
        layers = tuple(LayerAttention(**layer) for layer in values.pop("attention"))
        shape = ModelShape(**values, attention=layers)
        weight_bytes = {str(name): int(size) for name, size in entry["weight_bytes"].items()}
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise unusable(f"{path} has a damaged manifest: prepare the model again from its source") from error
    for name, size in weight_bytes.items():
        file = path / name
        if not file.is_file() or file.stat().st_size != size:
            raise unusable(f"{file} is missing or damaged: prepare the model again from its source")
    return shape

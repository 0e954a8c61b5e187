"""What a model is and how it would be served, found out without preparing it: `kvferry doctor --model` shows this."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from math import prod
from pathlib import Path

from safetensors import SafetensorError, safe_open

from engine.checkpoint import ModelReader, check_tensor_names, open_checkpoint
from engine.families import parse_model_config
from engine.gguf_source import GgufFile
from engine.model_config import ModelConfig, ModelShape, unusable
from engine.model_source import ModelSource, SourceKind, resolve_source, weight_files
from engine.models.fallback_probe import probe_shape
from engine.options import DEFAULT_POOL_BYTES
from engine.prepared_model import open_prepared
from engine.tensor_map import prepared_tensors
from engine.weight_dtypes import WeightDtype, stored_forms
from kv_cache.layout import KVCacheLayout, KVDtype
from runtime.errors import KvferryError

_BLOCK_SIZE = 16


class Way(Enum):
    """Who computes a model."""

    NATIVE = "native"
    TRANSFORMERS = "transformers"


@dataclass(frozen=True, slots=True)
class KVCost:
    """What K and V cost in one element type. `bytes_per_token` counts scales and padding, over all layers."""

    dtype: str
    bytes_per_token: int
    tokens_in_default_pool: int


@dataclass(frozen=True, slots=True)
class ModelSurvey:
    """`reason`: why a model that transformers computes is not native; empty for others.

    `weight_bytes`: by the element type that the weights are served in.
    """

    name: str
    way: Way
    reason: str
    shape: ModelShape
    num_parameters: int
    weight_bytes: dict[str, int]
    kv: tuple[KVCost, ...]


def survey_model(source: str | Path, available_bytes: int | None) -> ModelSurvey:
    """Look at a model as `prepare_model` would, but write nothing and read no weights.

    `available_bytes`: free memory, of which the default pool takes a part, None = unknown. What needs the weights'
    numbers (that they are finite, that transformers gets the same logits over pages) shows when it is prepared.
    Raises KvferryError with the reason for a model that does not exist or cannot be served.
    """
    found = resolve_source(source)
    shape, reason = _shape(found)
    if isinstance(shape, ModelConfig):
        way, tensors = Way.NATIVE, prepared_tensors(shape)
        num_parameters = sum(tensor.num_elements for tensor in tensors)
        weight_bytes = {
            dtype.value: sum(form.num_bytes for form in stored_forms(tensors, dtype).values()) for dtype in WeightDtype
        }
    else:
        way, num_parameters = Way.TRANSFORMERS, sum(map(prod, _checkpoint_shapes(found.path)))
        weight_bytes = {WeightDtype.FP32.value: num_parameters * 4}
    return ModelSurvey(
        name=found.name,
        way=way,
        reason=reason,
        shape=shape,
        num_parameters=num_parameters,
        weight_bytes=weight_bytes,
        kv=tuple(_kv_cost(shape, dtype, available_bytes) for dtype in KVDtype),
    )


def _shape(source: ModelSource) -> tuple[ModelShape, str]:
    """The shape, and why it is not native."""
    if source.kind is SourceKind.PREPARED:
        shape = open_prepared(source.path).shape
        return shape, "" if isinstance(shape, ModelConfig) else f"{shape.family} has no native code"
    with _open(source) as reader:
        try:
            config = parse_model_config(reader.config_json)
        except KvferryError as error:
            if source.kind is SourceKind.GGUF:
                raise
            not_native = error.message
        else:
            check_tensor_names(reader.tensor_names, config, source.path)
            return config, ""
    try:
        return probe_shape(source.path), not_native
    except KvferryError as error:
        raise unusable(f"{not_native}; transformers cannot stand in: {error.message}") from error


def _open(source: ModelSource) -> AbstractContextManager[ModelReader]:
    return nullcontext(GgufFile(source.path)) if source.kind is SourceKind.GGUF else open_checkpoint(source.path)


def _checkpoint_shapes(directory: Path) -> Iterator[tuple[int, ...]]:
    for file in weight_files(directory):
        try:
            with safe_open(directory / file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    yield tuple(opened.get_slice(name).get_shape())
        except (SafetensorError, OSError) as error:
            raise unusable(f"{directory / file} is no readable safetensors file: {error}") from error


def _kv_cost(shape: ModelShape, dtype: KVDtype, available_bytes: int | None) -> KVCost:
    layout = KVCacheLayout(
        model_id="any",
        model_revision="any",
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        block_size=_BLOCK_SIZE,
        dtype=dtype,
    )
    pool_bytes = min(DEFAULT_POOL_BYTES, (available_bytes or DEFAULT_POOL_BYTES) // 4)
    return KVCost(
        dtype=dtype.value,
        bytes_per_token=layout.block_bytes // _BLOCK_SIZE,
        tokens_in_default_pool=pool_bytes // layout.block_bytes * _BLOCK_SIZE,
    )

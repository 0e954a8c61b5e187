"""The prepared weights file: written once as a stream, then mapped by every process that serves the model.

The format is safetensors, so other tools can read it:

    [ header length: u64 ][ JSON header, padded with spaces to a page border ][ tensors, back to back ]

A mapping is private and copy-on-write. Nobody writes weights, so all processes of a host share the pages of the
file, and a wild write would cost the process its own copy of a page, not the file.
"""

import json
import mmap
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.model_config import unusable

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I8": torch.int8}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LENGTH = struct.Struct("<Q")
_PAGE_BYTES = 4096
_MAX_HEADER_BYTES = 100_000_000  # the bound of the safetensors library
_METADATA_KEY = "__metadata__"


@dataclass(frozen=True, slots=True)
class TensorForm:
    """What a tensor is to be."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Its size in the file."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What stands in the file: begin and end are byte offsets from the start of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def write_weights(path: Path, forms: Mapping[str, TensorForm], produce: Callable[[str], Tensor]) -> None:
    """Write the tensors of `forms`, in its order. `produce(name)` is called once for each, and only one is alive.

    Raises OSError when the disk is full, and ValueError when `produce` gives another shape or dtype than announced, or
    when a tensor would not be aligned: dtypes with wide numbers come first.
    """
    header: dict[str, Any] = {_METADATA_KEY: {"format": "pt"}}
    offset = 0
    for name, form in forms.items():
        if offset % form.dtype.itemsize:
            raise ValueError(f"{name} would begin at byte {offset}, not aligned for {form.dtype}")
        end = offset + form.num_bytes
        header[name] = {
            "dtype": _DTYPE_NAMES[form.dtype],
            "shape": list(form.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + _LENGTH.size) % _PAGE_BYTES)
    with path.open("wb") as file:
        file.write(_LENGTH.pack(len(text)))
        file.write(text)
        for name, form in forms.items():
            tensor = produce(name).contiguous()
            if tuple(tensor.shape) != form.shape or tensor.dtype != form.dtype:
                raise ValueError(f"{name} is {_described(tensor)}, not {form.dtype} {list(form.shape)}")
            # bf16 has no numpy counterpart, so every dtype goes out as bytes.
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)


def map_weights(path: Path) -> dict[str, Tensor]:
    """Map the file and return its tensors by name, without copying or reading them.

    The tensors keep the mapping alive. Do not write to them. Any thread may call.
    Raises KvferryError when the file is missing, damaged, truncated, or not aligned for its dtype.
    """
    try:
        with path.open("rb") as file:
            size_bytes = path.stat().st_size
            if size_bytes < _LENGTH.size:
                raise unusable(f"{path} is too short to be a safetensors file")
            mapping = mmap.mmap(file.fileno(), size_bytes, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise unusable(f"cannot map {path}: {error.strerror}") from error
    mapping.madvise(mmap.MADV_WILLNEED)
    return {
        name: torch.frombuffer(mapping, dtype=spec.dtype, count=prod(spec.shape), offset=spec.begin).view(spec.shape)
        for name, spec in _parse_header(path, mapping, size_bytes).items()
    }


def check_tensors(path: Path, tensors: Mapping[str, Tensor], forms: Mapping[str, TensorForm]) -> None:
    """Raise KvferryError unless the file at `path` holds exactly the tensors that its model needs."""
    differences = [f"lacks {name}" for name in forms if name not in tensors]
    differences += [f"has an unknown {name}" for name in tensors if name not in forms]
    differences += [
        f"has {name} as {_described(tensors[name])} instead of {form.dtype} {list(form.shape)}"
        for name, form in forms.items()
        if name in tensors and (tuple(tensors[name].shape) != form.shape or tensors[name].dtype != form.dtype)
    ]
    if differences:
        raise unusable(f"{path} does not fit its config.json: it {summarise(differences)}")


def summarise(items: Iterable[str], shown: int = 4) -> str:
    """The first few items of a list for a person to read, and how many more there are."""
    items = list(items)
    rest = f" and {len(items) - shown} more" if len(items) > shown else ""
    return ", ".join(items[:shown]) + rest


def _described(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _parse_header(path: Path, mapping: mmap.mmap, size_bytes: int) -> dict[str, TensorSpec]:
    (header_bytes,) = _LENGTH.unpack(mapping[: _LENGTH.size])
    data_start = _LENGTH.size + header_bytes
    if header_bytes > _MAX_HEADER_BYTES or data_start > size_bytes:
        raise unusable(f"{path} announces a header of {header_bytes} bytes, beyond its end: it is damaged")
    try:
        header = json.loads(mapping[_LENGTH.size : data_start])
    except (ValueError, RecursionError) as error:
        raise unusable(f"{path} has no readable header: {error}") from error
    if not isinstance(header, dict):
        raise unusable(f"{path} has a header that is no JSON object")
    specs = {
        name: _parse_entry(path, name, entry, data_start, size_bytes)
        for name, entry in header.items()
        if name != _METADATA_KEY
    }
    position = data_start
    for name, spec in sorted(specs.items(), key=lambda item: item[1].begin):
        if spec.begin != position:
            raise unusable(f"{path}: tensor {name} begins at byte {spec.begin}, not where the one before ends")
        position = spec.end
    if position != size_bytes:
        raise unusable(f"{path} has {size_bytes} bytes, but its tensors end at {position}")
    return specs


def _parse_entry(path: Path, name: str, entry: object, data_start: int, size_bytes: int) -> TensorSpec:
    match entry:
        case {"dtype": str(dtype_name), "shape": [*shape], "data_offsets": [int(first), int(last)]}:
            pass
        case _:
            raise unusable(f"{path}: the header entry of {name} is malformed")
    if dtype_name not in _DTYPES:
        raise unusable(f"{path}: tensor {name} has dtype {dtype_name}; supported: {', '.join(_DTYPES)}")
    if not all(isinstance(size, int) and 0 < size <= size_bytes for size in shape):
        raise unusable(f"{path}: tensor {name} has the shape {shape}")
    spec = TensorSpec(_DTYPES[dtype_name], tuple(shape), data_start + first, data_start + last)
    if first < 0 or spec.end > size_bytes or spec.end - spec.begin != prod(shape) * spec.dtype.itemsize:
        raise unusable(f"{path}: tensor {name} {shape} does not fit its bytes {first} to {last}: the file is damaged")
    if spec.begin % spec.dtype.itemsize:
        raise unusable(f"{path}: tensor {name} begins at byte {spec.begin}, not aligned for {dtype_name}")
    return spec

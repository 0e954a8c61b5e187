"""A step's Batch as bytes, for the ranks that did not lay it out: plain numbers, nothing that could be executed.

    [ for each field: kind, sizes... : int64 ][ the data of each field, each on an 8-byte border ]

Which fields there are is known at both ends: they run the same code.
"""

from dataclasses import fields
from math import prod
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch import Batch

_FIELDS: Final = tuple(field.name for field in fields(Batch) if field.init)
_MAX_DIMENSIONS: Final = 2
_ALIGNMENT: Final = 8
# What a field can be: a number, a tuple of numbers, or a tensor of one of these dtypes.
_NUMBER, _TUPLE = 0, 1
_DTYPES: Final = {2: torch.int64, 3: torch.int32, 4: torch.bool}
_KINDS: Final = {dtype: kind for kind, dtype in _DTYPES.items()}


def pack_batch(batch: Batch) -> bytes:
    """The batch as bytes. Its tensors are on the CPU."""
    head = np.full((len(_FIELDS), 1 + _MAX_DIMENSIONS), -1, dtype=np.int64)
    parts = [b""]
    for row, name in zip(head, _FIELDS, strict=True):
        row[0], array = _as_array(name, getattr(batch, name))
        row[1 : 1 + array.ndim] = array.shape
        data = array.tobytes()
        parts += (data, bytes(-len(data) % _ALIGNMENT))
    parts[0] = head.tobytes()
    return b"".join(parts)


def unpack_batch(message: bytearray) -> Batch:
    """The batch that `pack_batch` packed; its tensors are views of `message`."""
    head_size = len(_FIELDS) * (1 + _MAX_DIMENSIONS)
    head = np.frombuffer(message, dtype=np.int64, count=head_size).reshape(len(_FIELDS), -1)
    offset = head.nbytes
    values: dict[str, Any] = {}
    for (kind, *sizes), name in zip(head.tolist(), _FIELDS, strict=True):
        dtype = _DTYPES.get(kind, torch.int64)
        shape = [] if kind == _NUMBER else [size for size in sizes if size >= 0]
        count = prod(shape)
        value = torch.frombuffer(message, dtype=dtype, count=count, offset=offset).view(shape) if count else None
        size_bytes = count * dtype.itemsize
        offset += size_bytes + -size_bytes % _ALIGNMENT
        values[name] = _as_value(kind, torch.empty(shape, dtype=dtype) if value is None else value)
    return Batch(**values)


def _as_array(name: str, value: object) -> tuple[int, NDArray[Any]]:
    match value:
        case Tensor() if value.dtype in _KINDS and value.ndim <= _MAX_DIMENSIONS:
            return _KINDS[value.dtype], value.numpy()
        case int():
            return _NUMBER, np.asarray(value, dtype=np.int64)
        case tuple():
            return _TUPLE, np.asarray(value, dtype=np.int64)
    raise TypeError(f"{name} of a batch cannot be sent: {type(value).__name__}")


def _as_value(kind: int, tensor: Tensor) -> object:
    if kind == _NUMBER:
        return int(tensor)
    return tuple(tensor.tolist()) if kind == _TUPLE else tensor

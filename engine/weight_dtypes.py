"""In which dtypes the tensors of a prepared model are stored.

            vectors (norms, biases)   embedding, lm_head, router of experts   projections
    fp32    fp32                      fp32                                    fp32
    bf16    fp32                      bf16                                    bf16
    fp16    fp32                      fp16                                    fp16
    int8    fp32                      bf16                                    int8, and an fp32 scale an output

All arithmetic is fp32. int8 is symmetric: weight = q * scale with scale = largest |weight| of the row / 127. What
chooses a token or an expert stays bf16 there: rounding it to 8 bits changes choices and saves little.
"""

from collections.abc import Iterable
from enum import Enum

import torch
from torch import Tensor

from engine.model_config import unusable
from engine.tensor_map import PreparedTensor
from engine.weights import TensorForm

_INT8_MODULES = frozenset({"qkv", "attention_out", "gate_up", "down"})
_INT8_MAX = 127.0
_SCALES = ".scales"


class WeightDtype(Enum):
    """What `--weight-dtype` names."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    INT8 = "int8"


_MATRICES = {
    WeightDtype.FP32: torch.float32,
    WeightDtype.BF16: torch.bfloat16,
    WeightDtype.FP16: torch.float16,
    WeightDtype.INT8: torch.bfloat16,
}


def stored_forms(tensors: Iterable[PreparedTensor], dtype: WeightDtype) -> dict[str, TensorForm]:
    """What stands in the weights file, in file order: wide numbers first, so that each is aligned; else as given."""
    forms: dict[str, TensorForm] = {}
    for tensor in tensors:
        if len(tensor.shape) == 1:
            forms[tensor.name] = TensorForm(tensor.shape, torch.float32)
        elif dtype is WeightDtype.INT8 and tensor.name.split(".")[-2] in _INT8_MODULES:
            forms[tensor.name] = TensorForm(tensor.shape, torch.int8)
            forms[_scales_name(tensor.name)] = TensorForm(tensor.shape[:1], torch.float32)
        else:
            forms[tensor.name] = TensorForm(tensor.shape, _MATRICES[dtype])
    return dict(sorted(forms.items(), key=lambda item: -item[1].dtype.itemsize))


def source_of(name: str) -> str:
    """The prepared tensor that a tensor of the file is made from."""
    return f"{name.removesuffix(_SCALES)}.weight" if name.endswith(_SCALES) else name


def stored(name: str, form: TensorForm, values: Tensor) -> Tensor:
    """A tensor of the file from the fp32 `values` of its prepared tensor. May be `values` itself.

    Raises KvferryError for numbers beyond the range of the dtype.
    """
    if name.endswith(_SCALES):
        return _row_scales(values)
    if form.dtype is torch.int8:
        return values.div(_row_scales(values).unsqueeze(1)).round_().clamp_(-_INT8_MAX, _INT8_MAX).to(torch.int8)
    if form.dtype is not torch.float32 and values.abs().max() > torch.finfo(form.dtype).max:
        raise unusable(f"{name} has numbers beyond the range of {str(form.dtype).removeprefix('torch.')}")
    return values.to(form.dtype)


def widened(name: str, tensors: dict[str, Tensor]) -> Tensor:
    """The fp32 values that a tensor of the file stands for; the tensor itself if it is fp32."""
    values, scales = tensors[name].float(), tensors.get(_scales_name(name))
    return values if scales is None else values * scales.unsqueeze(1)


def _scales_name(name: str) -> str:
    return name.removesuffix(".weight") + _SCALES


def _row_scales(values: Tensor) -> Tensor:
    """fp32 [rows], positive. A row of zeros has the scale 1."""
    scales = values.abs().amax(dim=1) / _INT8_MAX
    return torch.where(scales > 0, scales, 1.0)

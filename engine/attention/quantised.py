"""Rows of K and V with one scale each, in torch. A row is the head_dim elements of one head and token.

The rule is that of the wire (kv_transfer/quantise.py, which this package may not import), to the bit, so that a block
has the same bytes whether the engine or a sender quantised it.
"""

import torch
from torch import Tensor

_LIMITS = {torch.int8: 127.0, torch.uint8: 448.0}  # the largest codes of int8 and of fp8 e4m3
_FP16_LARGEST = 65504.0


def quantised(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes, and scales fp16 [...], of rows [..., head_dim] of any float dtype. dtype: int8, or uint8 for the bits of
    fp8 e4m3. A row with an infinity or a NaN gets the scale NaN, so it reads back as NaN."""
    rows = rows.float()
    limit = _LIMITS[dtype]
    largest = rows.abs().amax(dim=-1)
    scales = (largest / limit).clamp(max=_FP16_LARGEST).half()
    wide = scales.float()
    inverse = torch.where(wide > 0, 1 / wide, 0)
    scaled = (rows * inverse.unsqueeze(-1)).clamp(-limit, limit)
    unusable = ~largest.isfinite()
    scaled.masked_fill_(unusable.unsqueeze(-1), 0)
    scales.masked_fill_(unusable, torch.nan)
    if dtype is torch.int8:
        return scaled.round_().to(dtype), scales
    return scaled.to(torch.float8_e4m3fn).view(dtype), scales


def dequantised(codes: Tensor, scales: Tensor) -> Tensor:
    """fp32 [..., head_dim] of codes and scales [...] as `quantised` gives them."""
    values = codes if codes.dtype is torch.int8 else codes.view(torch.float8_e4m3fn)
    return values.float().mul_(scales.float().unsqueeze(-1))

"""The gate of an MLP: gate(first half) * second half of each row, in fp32, whatever the activations are.

Both gates are z * sigmoid(s): SiLU with s = z; GELU in its tanh form, 0.5 * z * (1 + tanh(t)), with s = 2 * t, since
tanh(t) = 2 * sigmoid(2 * t) - 1.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops.interface import Gate

_BLOCK = 1024
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_TWO_ROOTS = tl.constexpr(2 * math.sqrt(2 / math.pi))
_CUBIC = tl.constexpr(0.044715)


def gated(gate_up: Tensor, gate: Gate) -> Tensor:
    """[T, 2 * n] -> [T, n], a new contiguous tensor of the same dtype; queued on the current stream.

    `gate_up`: fp32, fp16 or bf16; rows are contiguous, a constant stride apart. Raises ValueError for anything else.
    """
    if gate_up.dtype not in _FLOATS or gate_up.dim() != 2 or gate_up.shape[1] % 2 or gate_up.stride(1) != 1:
        raise ValueError(f"a gate needs rows of two halves, not {gate_up.dtype} {list(gate_up.shape)}")
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    result = torch.empty((num_tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    if result.numel():
        _gated[(num_tokens, triton.cdiv(size, _BLOCK))](
            gate_up, result, gate_up.stride(0), size, SILU=gate is Gate.SILU, BLOCK=_BLOCK, num_warps=2
        )
    return result


@triton.jit
def _gated(
    gate_up: tl.tensor, result: tl.tensor, stride: tl.int64, size: tl.int32, SILU: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Program (t, i): the i-th part of token t."""
    token = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first = gate_up + token * stride + place
    z = tl.load(first, mask=place < size, other=0).to(tl.float32)
    up = tl.load(first + size, mask=place < size, other=0).to(tl.float32)
    s = z if SILU else _TWO_ROOTS * (z + _CUBIC * z * z * z)
    value = z / (1 + tl.exp(-s)) * up
    tl.store(result + token * size + place, value.to(result.dtype.element_ty), mask=place < size)

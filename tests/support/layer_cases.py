"""Norms and gates on rows of all shapes, and what plain torch makes of them."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from engine.ops.interface import Gate

_TOLERANCES = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}
_EPS = 1e-5


@dataclass(frozen=True, slots=True)
class Norm:
    """`shape` of x, cut out of rows that are wider; `by_head`: a weight for each head; `added`: after an addition."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    by_head: bool = False
    added: bool = False
    size: float = 1.0


@dataclass(frozen=True, slots=True)
class Gated:
    """Rows of two halves with `size` numbers each."""

    gate: Gate
    size: int
    dtype: torch.dtype = torch.bfloat16


CASES: dict[str, Norm | Gated] = {
    "norm of bf16 rows": Norm((3, 256)),
    "norm of fp16 rows that are no power of two": Norm((2, 2304), torch.float16),
    "norm of fp32 rows": Norm((2, 576), torch.float32),
    "norm of tiny rows": Norm((2, 64), torch.float32, size=1e-4),
    "norm of wide rows": Norm((1, 20000)),
    "norm of no rows": Norm((0, 64)),
    "norm of heads": Norm((3, 6, 128)),
    "norm of heads that are no power of two": Norm((2, 3, 80), torch.float32),
    "norm of heads with weights of their own": Norm((2, 5, 64), torch.float32, by_head=True),
    "norm after an addition in bf16": Norm((3, 512), added=True),
    "norm after an addition in fp32": Norm((2, 100), torch.float32, added=True),
    "SiLU in bf16": Gated(Gate.SILU, 1536),
    "SiLU in fp32": Gated(Gate.SILU, 100, torch.float32),
    "GELU in fp16": Gated(Gate.GELU_TANH, 1100, torch.float16),
    "GELU in fp32": Gated(Gate.GELU_TANH, 64, torch.float32),
}


def _x(case: Norm) -> tuple[Tensor, Tensor, Tensor]:
    """x, what is added to it, and the weight."""
    random = torch.Generator().manual_seed(3)
    heads = case.shape[1:-1]
    wide = torch.randn((case.shape[0], 2, *case.shape[1:]), generator=random) * case.size
    weight = torch.randn((*heads, case.shape[-1]) if case.by_head else case.shape[-1:], generator=random)
    return wide.to(case.dtype)[:, 0], torch.randn(case.shape, generator=random).to(case.dtype), weight


def _gate_up(case: Gated) -> Tensor:
    return (torch.randn((3, 2 * case.size), generator=torch.Generator().manual_seed(4)) * 4).to(case.dtype)


def run(case: Norm | Gated, device: str) -> dict[str, Tensor]:
    """What the kernel made of it."""
    from engine.kernels.gates import gated  # Not for those who import the cases only.
    from engine.kernels.norms import add_rms_norm, rms_norm

    if isinstance(case, Gated):
        return {"result": gated(_gate_up(case).to(device), case.gate).cpu()}
    x, change, weight = (part.to(device) for part in _x(case))
    # A copy to a device may have made the rows contiguous.
    x = torch.stack([x, x], dim=1)[:, 0]
    if case.added:
        result = add_rms_norm(x, change, weight, _EPS)
        return {"result": result.cpu(), "x": x.cpu(), "twice": rms_norm(x, weight, _EPS).cpu()}
    return {"result": rms_norm(x, weight, _EPS).cpu()}


def check(case: Norm | Gated, result: dict[str, Tensor]) -> None:
    """Raises AssertionError where the result is not that of plain torch."""
    tolerance = _TOLERANCES[case.dtype]
    if isinstance(case, Gated):
        gate, up = _gate_up(case).float().chunk(2, dim=1)
        silu = case.gate is Gate.SILU
        expected = (functional.silu(gate) if silu else functional.gelu(gate, approximate="tanh")) * up
        torch.testing.assert_close(result["result"], expected.to(case.dtype), rtol=tolerance, atol=tolerance)
        return
    x, change, weight = _x(case)
    if case.added:
        torch.testing.assert_close(result["x"], x + change, rtol=tolerance, atol=tolerance)
        assert torch.equal(result["result"], result["twice"])
        x = result["x"]
    wide = x.double()
    normed = wide / (wide.pow(2).mean(-1, keepdim=True) + _EPS).sqrt() * weight
    assert result["result"].is_contiguous()
    torch.testing.assert_close(result["result"], normed.to(case.dtype), rtol=tolerance, atol=tolerance)

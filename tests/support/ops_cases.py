"""A layer's operations on a GPU, and what plain torch in fp32 makes of the same numbers."""

import torch
from torch import Tensor

from engine.ops.interface import Gate, Linear, Ops
from engine.ops.torch_ops import TorchOps

_TOLERANCES = {torch.float32: 1e-5, torch.float16: 2**-8, torch.bfloat16: 2**-5}
CASES = {str(dtype).removeprefix("torch."): dtype for dtype in _TOLERANCES}


def _outputs(ops: Ops, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    """All operations, on numbers that this dtype has."""
    random = torch.Generator().manual_seed(6)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).to(torch.bfloat16)

    def to_device(tensor: Tensor, kept: torch.dtype) -> Tensor:
        return tensor.to(kept).to(device)

    table, weight, back = numbers(40, 64), numbers(96, 64) / 8, numbers(64, 48) / 8
    bias, scales = numbers(96).float().to(device), numbers(96).float().abs().to(device)
    codes = torch.randint(-127, 128, (96, 64), generator=random, dtype=torch.int8).to(device)
    norm = numbers(64).float().to(device)
    ids = torch.tensor([3, 39, 0], device=device)
    x = ops.embed(ids, to_device(table, dtype))
    biased = Linear(to_device(weight, dtype), bias)
    found = {"embed": x.clone(), "rms_norm": ops.rms_norm(x, norm, 1e-5).clone()}
    gate_up = ops.linear(x, biased).clone()
    found["linear"] = gate_up.clone()
    found["int8 linear"] = ops.linear(x, Linear(codes, bias, scales)).clone() / 128
    gated = ops.gated(gate_up, Gate.GELU_TANH).clone()
    found["gated"] = gated.clone()
    found["logits"] = ops.logits(x, biased).clone()
    found["int8 logits"] = ops.logits(x, Linear(codes, None, scales)).clone() / 128
    total = x.clone()
    ops.add_linear(total, gated, Linear(to_device(back, dtype), norm))
    found["add_linear"] = total
    added = torch.zeros_like(found["linear"])
    ops.add_linear(added, x, Linear(codes, None, scales))
    found["int8 add_linear"] = added / 128
    return {name: tensor.cpu() for name, tensor in found.items()}


def run(case: torch.dtype, device: str) -> dict[str, Tensor]:
    """The outputs of TritonOps."""
    from engine.ops.triton_ops import TritonOps  # Not for those who import the cases only.

    return _outputs(TritonOps(case), case, device)


def check(case: torch.dtype, result: dict[str, Tensor]) -> None:
    """Raises AssertionError where they are not those of plain torch, or are of another dtype."""
    expected = _outputs(TorchOps(), torch.float32, "cpu")
    tolerance = _TOLERANCES[case]
    assert result.keys() == expected.keys()
    for name, values in result.items():
        assert values.dtype == (torch.float32 if "logits" in name else case), name
        torch.testing.assert_close(
            values.float(),
            expected[name].float(),
            rtol=tolerance,
            atol=2 * tolerance,
            msg=lambda text, n=name: f"{n}: {text}",
        )

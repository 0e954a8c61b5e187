"""Operations on CUDA: matrices by torch, which has cuBLAS for them, and what lies between by kernels in Triton."""

import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels import gates, norms
from engine.ops.interface import Gate, Linear


class TritonOps:
    """Ops on CUDA; under Triton's interpreter, for tests, also on CPU. Stateless. All work is queued on the current
    stream; nothing waits for the device, so that a step can be captured in a graph.

    Weights and biases are best in the activations' dtype: others, and int8 weights, are converted at each call.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        """`dtype` of activations: fp32, fp16 or bf16. Raises ValueError for another."""
        if dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise ValueError(f"activations must be fp32, fp16 or bf16, not {dtype}")
        self._dtype = dtype

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """See Ops."""
        return functional.embedding(token_ids, table).to(self._dtype)

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        """See Ops."""
        weight, bias = linear.weight.to(x.dtype), None if linear.bias is None else linear.bias.to(x.dtype)
        if linear.scales is None:
            return functional.linear(x, weight, bias)
        # The codes of int8 are exact in every dtype of activations.
        y = (functional.linear(x, weight) * linear.scales).to(x.dtype)
        return y if bias is None else y.add_(bias)

    def add_linear(self, x: Tensor, y: Tensor, linear: Linear) -> None:
        """See Ops."""
        if linear.scales is not None:
            x.add_(self.linear(y, linear))
            return
        x.addmm_(y, linear.weight.to(x.dtype).t())
        if linear.bias is not None:
            x.add_(linear.bias)

    def logits(self, x: Tensor, linear: Linear) -> Tensor:
        """See Ops. The sums of products are never rounded to the activations' dtype: that would make ties."""
        product = _fp32_product(x, linear.weight.to(x.dtype))
        if linear.scales is not None:
            product *= linear.scales
        return product if linear.bias is None else product.add_(linear.bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See Ops."""
        return norms.rms_norm(x, weight, eps)

    def gated(self, gate_up: Tensor, gate: Gate) -> Tensor:
        """See Ops."""
        return gates.gated(gate_up, gate)


def _fp32_product(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T in fp32."""
    if x.dtype is torch.float32 or x.device.type != "cuda":
        return functional.linear(x.float(), weight.float())
    # Only torch's CUDA code has products that are wider than their factors.
    return torch.mm(x, weight.t(), out_dtype=torch.float32)

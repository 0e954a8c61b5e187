"""The matrix products and attention of one engine step, written down while it runs and called again without the rest.

Nothing here knows the model: whatever the engine multiplies and attends in the recorded step is what is replayed, with
the same inputs, the same operations and the same weights, and must give the same outputs.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from engine.attention import AttentionBackend
from engine.batch import Batch

# A new product in a model must be added here, or it counts as overhead; the ones in attention are inside `attend`.
_PRODUCTS: frozenset[Callable[..., Any]] = frozenset(
    {
        torch.nn.functional.linear,
        torch.matmul,
        torch.mm,
        torch.bmm,
        torch.addmm,
        Tensor.matmul,
        Tensor.__matmul__,
        Tensor.mm,
        Tensor.bmm,
        Tensor.addmm,
        Tensor.addmm_,
    }
)
_IN_PLACE: frozenset[Callable[..., Any]] = frozenset({Tensor.addmm_})


@dataclass(frozen=True, slots=True)
class Call:
    """One product or attention: `function(*arguments)` gave `output`. In-place ones write their first argument."""

    function: Callable[..., Tensor]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    in_place: bool
    output: Tensor


class TappedAttention:
    """An attention backend that passes everything on, and writes down its calls while a step is recorded."""

    def __init__(self, backend: AttentionBackend) -> None:
        self._backend = backend
        self._products: _Products | None = None

    def store(self, layer: int, k: Tensor, v: Tensor, batch: Batch) -> None:
        """See AttentionBackend."""
        self._backend.store(layer, k, v, batch)

    def attend(self, layer: int, q: Tensor, batch: Batch) -> Tensor:
        """See AttentionBackend."""
        if self._products is None:
            return self._backend.attend(layer, q, batch)
        return self._products.attend(self._backend, layer, q, batch)

    @contextmanager
    def recording(self) -> Iterator[list[Call]]:
        """The calls of the step that runs inside, in order."""
        products = _Products()
        self._products = products
        try:
            with products:
                yield products.calls
        finally:
            self._products = None


class _Products(TorchFunctionMode):
    """Sees every torch function that is called while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        if func not in _PRODUCTS:
            return func(*args, **keywords)
        in_place = func in _IN_PLACE
        # What is written later must be kept as it was: the target of an in-place product, and every output.
        kept = (args[0].clone(), *args[1:]) if in_place else args
        output = func(*args, **keywords)
        self.calls.append(Call(func, kept, keywords, in_place, output.clone()))
        return output

    def attend(self, backend: AttentionBackend, layer: int, q: Tensor, batch: Batch) -> Tensor:
        """Write down one call of attention, and not the products inside it."""
        before = len(self.calls)
        output = backend.attend(layer, q, batch)
        del self.calls[before:]
        self.calls.append(Call(backend.attend, (layer, q, batch), {}, False, output.clone()))
        return output


@torch.inference_mode()
def replay(calls: Sequence[Call]) -> None:
    """Call everything again and throw the outputs away. The targets of in-place products keep adding up."""
    for call in calls:
        call.function(*call.arguments, **call.keywords)


@torch.inference_mode()
def differences(calls: Sequence[Call]) -> int:
    """How many calls give another output than in the step, to the last bit. Changes nothing."""
    different = 0
    for call in calls:
        arguments = (call.arguments[0].clone(), *call.arguments[1:]) if call.in_place else call.arguments
        different += not torch.equal(call.function(*arguments, **call.keywords), call.output)
    return different

"""The matrix products and attention of one engine step, written down while it runs and called again without the rest.

Nothing here knows the model: whatever it multiplies by way of its Ops, and attends by way of its AttentionBackend, in
the recorded step is what is replayed, with the same inputs, the same operations and the same weights, and must give
the same outputs.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.attention.interface import AttentionBackend
from engine.batch import Batch
from engine.ops.interface import Gate, Linear, Ops


@dataclass(frozen=True, slots=True)
class Call:
    """One product or attention: `function(*arguments)` gave `output`. In-place ones write their first argument."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    in_place: bool
    output: Tensor


class Recorder:
    """The calls of a step, in order, while one is recorded."""

    def __init__(self) -> None:
        self._calls: list[Call] | None = None

    @contextmanager
    def recording(self) -> Iterator[list[Call]]:
        """The calls of the step that runs inside."""
        calls: list[Call] = []
        self._calls = calls
        try:
            yield calls
        finally:
            self._calls = None

    def call(self, function: Callable[..., Tensor], *arguments: Any) -> Tensor:
        """Call it, and write it down."""
        if self._calls is None:
            return function(*arguments)
        # Scratch that a later call overwrites must be kept as it was, and so must every output.
        kept = tuple(value.clone() if isinstance(value, Tensor) else value for value in arguments)
        output = function(*arguments)
        self._calls.append(Call(function, kept, False, output.clone()))
        return output

    def call_in_place(self, function: Callable[..., None], target: Tensor, *arguments: Any) -> None:
        """The same for a function that adds to its first argument."""
        if self._calls is None:
            function(target, *arguments)
            return
        kept = tuple(value.clone() if isinstance(value, Tensor) else value for value in (target, *arguments))
        function(target, *arguments)
        self._calls.append(Call(function, kept, True, target.clone()))


class TappedAttention:
    """An attention backend that passes everything on, and has `attend` written down."""

    def __init__(self, backend: AttentionBackend, recorder: Recorder) -> None:
        self._backend = backend
        self._recorder = recorder

    def store(self, layer: int, k: Tensor, v: Tensor, batch: Batch) -> None:
        """See AttentionBackend."""
        self._backend.store(layer, k, v, batch)

    def rotate_and_store(self, layer: int, qk: Tensor, v: Tensor, rotation: Tensor, batch: Batch) -> None:
        """See AttentionBackend."""
        self._backend.rotate_and_store(layer, qk, v, rotation, batch)

    def attend(self, layer: int, q: Tensor, batch: Batch) -> Tensor:
        """See AttentionBackend."""
        return self._recorder.call(self._backend.attend, layer, q, batch)


class TappedOps:
    """Ops that pass everything on, and have the matrix products written down."""

    def __init__(self, ops: Ops, recorder: Recorder) -> None:
        self._ops = ops
        self._recorder = recorder

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """See Ops."""
        return self._ops.embed(token_ids, table)

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        """See Ops."""
        return self._recorder.call(self._ops.linear, x, linear)

    def add_linear(self, x: Tensor, y: Tensor, linear: Linear) -> None:
        """See Ops."""
        self._recorder.call_in_place(self._ops.add_linear, x, y, linear)

    def logits(self, x: Tensor, linear: Linear) -> Tensor:
        """See Ops."""
        return self._recorder.call(self._ops.logits, x, linear)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See Ops."""
        return self._ops.rms_norm(x, weight, eps)

    def gated(self, gate_up: Tensor, gate: Gate) -> Tensor:
        """See Ops."""
        return self._ops.gated(gate_up, gate)


@torch.inference_mode()
def replay(calls: Sequence[Call]) -> None:
    """Call everything again and throw the outputs away. The targets of in-place products keep adding up."""
    for call in calls:
        call.function(*call.arguments)


@torch.inference_mode()
def differences(calls: Sequence[Call]) -> int:
    """How many calls give another output than in the step, to the last bit. Changes nothing."""
    different = 0
    for call in calls:
        if call.in_place:
            found = call.arguments[0].clone()
            call.function(found, *call.arguments[1:])
        else:
            found = call.function(*call.arguments)
        different += not torch.equal(found, call.output)
    return different

"""Telling of each layer when its KV is final, without stopping the device that computes the next ones.

device     | layer 0 | layer 1 | layer 2 | layer 3 | ...
host       | queue 0 | queue 1 | queue 2, tell of 0 | queue 3, tell of 1 | tell of 2 | tell of 3
"""

from collections import deque
from collections.abc import Callable

from engine.execution.device import Event
from engine.model_runner import LayerHook


class LayerEvents:
    """The layers of one step. Owner thread only; so the hook may touch what this thread owns."""

    def __init__(self, mark: Callable[[int], Event], hook: LayerHook) -> None:
        """`mark(layer)` is called when the layer's store has been queued, and gives the event at which its KV can be
        read; `hook(layer)` is called after that, once a layer and in order."""
        self._mark = mark
        self._hook = hook
        self._pending: deque[tuple[int, Event]] = deque()

    def stored(self, layer: int) -> None:
        """The store of a layer is queued: the hook that `Model.forward` wants. Tells of layers that are ready."""
        self._pending.append((layer, self._mark(layer)))
        while self._pending and self._pending[0][1].done():
            self._hook(self._pending.popleft()[0])

    def finish(self) -> None:
        """Wait for the layers not told of yet, and tell of them."""
        while self._pending:
            layer, event = self._pending.popleft()
            event.wait()
            self._hook(layer)

"""Telling of layers while the device goes on."""

import pytest

from engine.execution.device import DONE
from engine.execution.layer_events import LayerEvents


class Point:
    """An event that the test completes, or that is completed by waiting."""

    def __init__(self, layer: int, log: list[str]) -> None:
        self.is_done = False
        self._name = f"wait {layer}"
        self._log = log

    def done(self) -> bool:
        return self.is_done

    def wait(self) -> None:
        self._log.append(self._name)
        self.is_done = True


class Layers:
    """Events under a test's control; `log` has what happened, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.points: list[Point] = []
        self.events = LayerEvents(self._mark, lambda layer: self.log.append(f"told of {layer}"))

    def _mark(self, layer: int) -> Point:
        self.points.append(Point(layer, self.log))
        return self.points[-1]


def test_layers_that_are_done_at_once_are_told_of_at_once() -> None:
    told: list[int] = []
    events = LayerEvents(lambda layer: DONE, told.append)
    for layer in range(3):
        events.stored(layer)
        assert told == list(range(layer + 1))
    events.finish()
    assert told == [0, 1, 2]


def test_nobody_waits_while_layers_are_queued_and_all_are_told_of_in_order_in_the_end() -> None:
    layers = Layers()
    for layer in range(4):
        layers.events.stored(layer)
    assert layers.log == []
    layers.events.finish()
    assert layers.log == [line for i in range(4) for line in (f"wait {i}", f"told of {i}")]


def test_a_layer_is_told_of_while_later_ones_are_queued() -> None:
    layers = Layers()
    layers.events.stored(0)
    layers.events.stored(1)
    layers.points[0].is_done = True
    layers.events.stored(2)
    assert layers.log == ["told of 0"]
    layers.points[2].is_done = True
    layers.events.stored(3)
    # Layer 1 is not done, so nobody hears of layer 2 yet.
    assert layers.log == ["told of 0"]
    layers.events.finish()
    assert [line for line in layers.log if line.startswith("told")] == [f"told of {i}" for i in range(4)]


def test_what_the_hook_raises_passes_through() -> None:
    def fail(layer: int) -> None:
        raise RuntimeError(f"layer {layer}")

    events = LayerEvents(lambda layer: DONE, fail)
    with pytest.raises(RuntimeError, match="layer 0"):
        events.stored(0)

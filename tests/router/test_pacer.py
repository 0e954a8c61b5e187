"""The pacer of deliveries, on a loop whose time the test makes."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from router.dispatch.pacer import Pacer


class Timer:
    def __init__(self, at: float, call: Callable[[], None]) -> None:
        self.at, self.call, self.cancelled = at, call, False

    def cancel(self) -> None:
        self.cancelled = True


class FakeLoop(asyncio.AbstractEventLoop):
    """Time stands still but where it is moved. `step` runs what was asked for soon."""

    def __init__(self) -> None:
        self.now = 100.0
        self.soon: list[Callable[[], None]] = []
        self.timers: list[Timer] = []

    def time(self) -> float:
        return self.now

    def call_soon(self, callback: Any, *args: Any, **_: Any) -> Any:  # type: ignore[override]
        self.soon.append(lambda: callback(*args))

    def call_later(self, delay: float, callback: Any, *args: Any, **_: Any) -> Any:  # type: ignore[override]
        timer = Timer(self.now + delay, lambda: callback(*args))
        self.timers.append(timer)
        return timer

    def step(self) -> None:
        soon, self.soon = self.soon, []
        for call in soon:
            call()


class World:
    """`busy_s`: what a delivery takes, and the tasks that it wakes."""

    def __init__(self, busy_s: float) -> None:
        self.loop = FakeLoop()
        self.deliveries = 0
        self.busy_s = busy_s
        self.pacer = Pacer(self.deliver, self)

    def now(self) -> float:
        return self.loop.now

    def deliver(self) -> None:
        self.deliveries += 1
        self.loop.now += self.busy_s / 2
        # The tasks that were woken run before what the pacer asks for behind them.
        self.loop.call_soon(lambda: setattr(self.loop, "now", self.loop.now + self.busy_s / 2))

    def arrive(self) -> None:
        self.pacer.ask(self.loop)
        self.loop.step()

    def wait(self) -> float:
        """Let the delivery come that waits. Returns how long it had to, since what came before it."""
        timer = self.loop.timers.pop()
        waited_s, self.loop.now = timer.at - self.loop.now, timer.at
        timer.call()
        self.loop.step()
        return waited_s


def test_a_loop_that_keeps_up_is_given_everything_at_once() -> None:
    world = World(busy_s=0.0008)
    for count in range(1, 5):
        world.arrive()
        assert world.deliveries == count
    assert world.loop.timers == []


def test_what_comes_while_others_should_have_the_loop_is_given_out_together() -> None:
    world = World(busy_s=0.004)
    world.arrive()
    for _ in range(5):
        world.arrive()
    assert world.deliveries == 1
    assert len(world.loop.timers) == 1
    assert world.wait() == pytest.approx(0.004)
    assert world.deliveries == 2


def test_after_a_pause_as_long_as_the_work_nothing_waits() -> None:
    world = World(busy_s=0.008)
    world.arrive()
    world.loop.now += 0.009
    world.arrive()
    assert world.deliveries == 2
    assert world.loop.timers == []


def test_no_wait_is_longer_than_its_bound_and_a_cancelled_one_does_not_come() -> None:
    world = World(busy_s=3.0)
    world.arrive()
    world.arrive()
    (timer,) = world.loop.timers
    assert timer.at - world.loop.now <= 0.02 + 1e-9
    world.pacer.cancel()
    assert timer.cancelled
    world.pacer.cancel()

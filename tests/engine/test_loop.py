import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from engine.loop import EngineLoop, LoopSnapshot
from kvferry_rpc.common_pb2 import ErrorCode
from runtime.clock import ManualClock, SystemClock
from runtime.errors import KvferryError

WAIT_S = 20.0


@dataclass
class Scripted:
    """A handler that runs commands (functions), has `work` steps to do, and remembers which thread called it."""

    work: int = 0
    blocked: int = 0  # steps that find nothing to compute although there is work
    has_timers: bool = False
    ticks: int = 0
    threads: set[int] = field(default_factory=set)
    progress: threading.Condition = field(default_factory=threading.Condition)

    def handle(self, command: Callable[[], None]) -> None:
        self.threads.add(threading.get_ident())
        command()
        self.say()

    def step(self) -> bool:
        self.threads.add(threading.get_ident())
        if self.blocked:
            self.blocked -= 1
            return False
        self.work -= 1
        self.say()
        return True

    def tick(self, now: float) -> None:
        self.threads.add(threading.get_ident())
        self.ticks += 1
        self.say()

    @property
    def has_work(self) -> bool:
        return self.work > 0

    def view(self) -> int:
        return self.work

    def say(self) -> None:
        with self.progress:
            self.progress.notify_all()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self.progress:
            while not condition():
                assert self.progress.wait(WAIT_S), "the loop does not move"


Loop = EngineLoop[Callable[[], None], int]


def unexpected(error: Exception) -> None:
    raise AssertionError("fatal") from error


@contextmanager
def running(handler: Scripted, *, clock: SystemClock | ManualClock | None = None, max_inbox: int = 8) -> Iterator[Loop]:
    loop: Loop = EngineLoop(handler, clock=clock or SystemClock(), max_inbox=max_inbox)
    loop.start(unexpected)
    try:
        yield loop
    finally:
        assert loop.stop(WAIT_S)


def test_commands_are_handled_in_order_by_one_thread_that_is_not_the_callers() -> None:
    handler, seen = Scripted(), []
    with running(handler, max_inbox=100) as loop:
        for i in range(50):
            loop.submit(lambda i=i: seen.append(i))
        handler.wait_for(lambda: len(seen) == 50)
    assert seen == list(range(50))
    assert len(handler.threads) == 1
    assert threading.get_ident() not in handler.threads


def test_work_that_a_command_brings_is_stepped_until_it_is_done() -> None:
    handler = Scripted()
    with running(handler) as loop:
        loop.submit(lambda: setattr(handler, "work", 5))
        handler.wait_for(lambda: handler.ticks > 0 and loop.snapshot == LoopSnapshot(5, 0))


def test_commands_are_handled_between_steps() -> None:
    handler, seen = Scripted(work=10**9), threading.Event()
    with running(handler) as loop:
        loop.submit(seen.set)
        assert seen.wait(WAIT_S)
        assert handler.has_work


def test_a_full_inbox_refuses_at_once_but_never_news() -> None:
    handler, gate, entered, news = Scripted(), threading.Event(), threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        assert gate.wait(WAIT_S)

    with running(handler, max_inbox=2) as loop:
        loop.submit(hold)
        assert entered.wait(WAIT_S)
        loop.submit(lambda: None)
        loop.submit(lambda: None)
        with pytest.raises(KvferryError) as caught:
            loop.submit(lambda: None)
        assert caught.value.code == ErrorCode.OVERLOADED
        assert caught.value.retry_after_ms > 0
        loop.notify(news.set)
        gate.set()
        assert news.wait(WAIT_S)


@pytest.mark.parametrize(("work", "timers"), [(0, False), (0, True), (1, False)])
def test_timers_tick_without_any_traffic(work: int, timers: bool) -> None:
    handler = Scripted(work=work, blocked=10**9, has_timers=timers)
    with running(handler):
        handler.wait_for(lambda: handler.ticks >= 3)


def test_an_idle_loop_sleeps_and_a_busy_one_does_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    timeouts: list[float | None] = []
    real_wait = threading.Condition.wait

    def spy(self: threading.Condition, timeout: float | None = None) -> bool:
        if threading.current_thread().name == "engine":
            timeouts.append(timeout)
        return real_wait(self, timeout)

    monkeypatch.setattr(threading.Condition, "wait", spy)
    for handler, expected in ((Scripted(), 0.25), (Scripted(has_timers=True), 0.05), (Scripted(1, 10**9), 0.05)):
        timeouts.clear()
        with running(handler):
            handler.wait_for(lambda handler=handler: handler.ticks >= 3)
        assert set(timeouts) == {expected}
        # One sleep a round: no round without one.
        assert len(timeouts) >= handler.ticks


def test_a_failing_step_is_fatal_once_and_stops_the_loop(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Scripted):
        def step(self) -> bool:
            raise RuntimeError("the device is gone")

    errors: list[Exception] = []
    fatal = threading.Event()

    def on_fatal(error: Exception) -> None:
        errors.append(error)
        assert not loop.stop(WAIT_S)  # from the owner thread itself: does not wait for itself
        fatal.set()

    loop: Loop = EngineLoop(Failing(), clock=SystemClock(), max_inbox=4)
    with caplog.at_level(logging.CRITICAL):
        loop.start(on_fatal)
        loop.submit(lambda: setattr(loop._handler, "work", 1))
        assert fatal.wait(WAIT_S)
        assert loop.stop(WAIT_S)
    assert [str(error) for error in errors] == ["the device is gone"]
    assert not loop.is_alive
    with pytest.raises(KvferryError) as caught:
        loop.submit(lambda: None)
    assert caught.value.code == ErrorCode.UNAVAILABLE
    loop.notify(lambda: None)  # dropped


def test_a_stuck_step_shows_from_outside_while_the_snapshot_is_old() -> None:
    class Stuck(Scripted):
        def step(self) -> bool:
            entered.set()
            assert gate.wait(WAIT_S)
            return super().step()

    entered, gate, clock = threading.Event(), threading.Event(), ManualClock()
    handler = Stuck()
    with running(handler, clock=clock) as loop:
        assert loop.stalled_ms == 0
        loop.submit(lambda: setattr(handler, "work", 1))
        assert entered.wait(WAIT_S)
        clock.advance(12.5)
        assert loop.stalled_ms == 12_500
        gate.set()
        handler.wait_for(lambda: loop.snapshot.steps == 1 and loop.stalled_ms == 0)


def test_work_that_no_step_can_move_counts_as_stalled() -> None:
    clock, handler = ManualClock(), Scripted(work=1, blocked=10**9)
    with running(handler, clock=clock) as loop:
        handler.wait_for(lambda: handler.ticks >= 2)
        clock.advance(3.0)
        before = handler.ticks
        handler.wait_for(lambda: handler.ticks >= before + 2)
        assert loop.stalled_ms == 3000
        handler.blocked = 0
        handler.wait_for(lambda: loop.stalled_ms == 0)


def test_an_idle_engine_is_never_stalled() -> None:
    clock, handler = ManualClock(), Scripted()
    with running(handler, clock=clock) as loop:
        handled = threading.Event()
        loop.submit(handled.set)
        assert handled.wait(WAIT_S)
        ticks = handler.ticks
        handler.wait_for(lambda: handler.ticks >= ticks + 2)  # the round of the command is over
        clock.advance(100.0)
        assert loop.stalled_ms == 0


def test_stopping_before_the_start_and_twice_is_harmless() -> None:
    loop: Loop = EngineLoop(Scripted(), clock=SystemClock(), max_inbox=1)
    assert loop.stop(WAIT_S)
    assert loop.stop(WAIT_S)


def test_an_inbox_needs_room() -> None:
    with pytest.raises(ValueError, match="max_inbox"):
        EngineLoop(Scripted(), clock=SystemClock(), max_inbox=0)

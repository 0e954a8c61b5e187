"""The owner thread of a worker's engine: commands in through a bounded inbox, frozen snapshots out.

The thread runs `handle` for each command, `tick` for timers and `step` while there is work, in turn, and sleeps on a
condition otherwise. Nothing else touches the engine.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from kvferry_rpc.common_pb2 import ErrorCode
from runtime.clock import Clock
from runtime.errors import KvferryError

CommandT = TypeVar("CommandT")
CommandT_contra = TypeVar("CommandT_contra", contravariant=True)
ViewT = TypeVar("ViewT")
ViewT_co = TypeVar("ViewT_co", covariant=True)

_TICK_BUSY_S = 0.05
_TICK_IDLE_S = 0.25

_log = logging.getLogger(__name__)


class LoopHandler(Protocol[CommandT_contra, ViewT_co]):
    """A worker's side of the loop. All methods are called by the owner thread only."""

    def handle(self, command: CommandT_contra) -> None:
        """Carry out one command. Failures of the request at hand are handled inside: an exception is fatal."""
        ...

    def step(self) -> bool:
        """Run one engine step if there is something to compute. Returns whether anything was computed."""
        ...

    def tick(self, now: float) -> None:
        """Look at deadlines; `now` is the clock's time in seconds. Called at least every 50 ms while has_work or
        has_timers (but not during a step), at least every 250 ms otherwise."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether a step may have something to compute."""
        ...

    @property
    def has_timers(self) -> bool:
        """Whether something will have to be done at a certain time."""
        ...

    def view(self) -> ViewT_co:
        """A frozen view of the worker's state for other threads; taken after each round."""
        ...


@dataclass(frozen=True, slots=True)
class LoopSnapshot(Generic[ViewT]):
    """State after a round of the loop. `steps` counts steps that computed something."""

    steps: int
    view: ViewT


class EngineLoop(Generic[CommandT, ViewT]):
    """One owner thread around a handler.

    Any thread may call `submit`, `notify`, `stop` and read the properties.
    """

    def __init__(
        self,
        handler: LoopHandler[CommandT, ViewT],
        *,
        clock: Clock,
        max_inbox: int,
        name: str = "engine",
    ) -> None:
        """Raises ValueError for `max_inbox` below 1."""
        if max_inbox < 1:
            raise ValueError(f"max_inbox must be at least 1, not {max_inbox}")
        self._handler = handler
        self._clock = clock
        self._max_inbox = max_inbox
        self._wake = threading.Condition()
        self._inbox: deque[CommandT] = deque()
        self._stopping = False
        self._waiting_since: float | None = None  # since when work has waited for a step that computes something
        self._snapshot: LoopSnapshot[ViewT] = LoopSnapshot(0, handler.view())
        self._name = name
        self._thread: threading.Thread | None = None

    @property
    def snapshot(self) -> LoopSnapshot[ViewT]:
        """State after the latest round."""
        return self._snapshot

    @property
    def stalled_ms(self) -> int:
        """How long work (or a command) has waited without a step that computed something; 0 when there is none.

        Derived here from the time of the last step, so a thread stuck inside a step cannot hide it.
        """
        since = self._waiting_since
        return 0 if since is None else int(1000 * (self._clock.now() - since))

    @property
    def is_alive(self) -> bool:
        """Whether the owner thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, on_fatal: Callable[[Exception], None]) -> None:
        """Start the owner thread; once. `on_fatal` is called, by that thread, if the handler raises: the loop is over
        then."""
        self._thread = threading.Thread(target=self._run, args=(on_fatal,), name=self._name, daemon=True)
        self._thread.start()

    def submit(self, command: CommandT) -> None:
        """Hand in new work. Raises KvferryError: OVERLOADED when the inbox is full, UNAVAILABLE after `stop`."""
        with self._wake:
            if self._stopping:
                raise KvferryError(ErrorCode.UNAVAILABLE, "the engine has stopped")
            if len(self._inbox) >= self._max_inbox:
                raise KvferryError(
                    ErrorCode.OVERLOADED, f"{self._max_inbox} commands are waiting for the engine", retry_after_ms=1000
                )
            self._put(command)

    def notify(self, command: CommandT) -> None:
        """Hand in news about work that was accepted (a cancel, the end of a transfer): never refused for room, and so
        bounded by that work alone. Dropped after `stop`."""
        with self._wake:
            if not self._stopping:
                self._put(command)

    def stop(self, timeout_s: float) -> bool:
        """End the thread after the round at hand; what is still in the inbox is dropped. Idempotent.

        Returns whether the thread has ended within the time (False when called from the owner thread itself).
        """
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread is threading.current_thread():
            return False
        if self._thread is not None:
            self._thread.join(timeout_s)
        return not self.is_alive

    def _put(self, command: CommandT) -> None:
        self._inbox.append(command)
        if self._waiting_since is None:
            self._waiting_since = self._clock.now()
        self._wake.notify()

    def _run(self, on_fatal: Callable[[Exception], None]) -> None:
        steps = 0
        computed = False
        try:
            while (commands := self._next_commands(wait=not computed)) is not None:
                for command in commands:
                    self._handler.handle(command)
                self._handler.tick(self._clock.now())
                computed = self._handler.has_work and self._handler.step()
                steps += computed
                self._snapshot = LoopSnapshot(steps, self._handler.view())
                self._note_progress(computed)
        except Exception as error:
            _log.exception("the engine failed")
            with self._wake:
                self._stopping = True
            on_fatal(error)

    def _next_commands(self, wait: bool) -> list[CommandT] | None:
        """Empty the inbox. With `wait`, sleep first until a command arrives or a tick is due. None = stop."""
        with self._wake:
            if wait and not self._inbox and not self._stopping:
                handler = self._handler
                self._wake.wait(_TICK_BUSY_S if handler.has_work or handler.has_timers else _TICK_IDLE_S)
            commands = list(self._inbox)
            self._inbox.clear()
            return None if self._stopping else commands

    def _note_progress(self, computed: bool) -> None:
        with self._wake:
            if not self._handler.has_work and not self._inbox:
                self._waiting_since = None
            elif computed or self._waiting_since is None:
                self._waiting_since = self._clock.now()

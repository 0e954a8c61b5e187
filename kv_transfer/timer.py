"""A thread that acts when something is due, and sleeps without waking when nothing is."""

import logging
import threading
from collections.abc import Callable

from runtime.clock import Clock

_log = logging.getLogger(__name__)


class DueTimer:
    """Calls `act(now)` each time the clock has reached `next_due()`. `nudge` after anything that may make it earlier.

    Both callables run on the timer's thread. With a clock that a test moves by hand the thread only waits; the test
    calls what `act` calls.
    """

    def __init__(
        self, name: str, clock: Clock, *, next_due: Callable[[], float | None], act: Callable[[float], None]
    ) -> None:
        self._clock = clock
        self._next_due = next_due
        self._act = act
        self._changed = threading.Condition()
        self._nudged = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def nudge(self) -> None:
        """Look at the due time again. Any thread; never blocks."""
        with self._changed:
            self._nudged = True
            self._changed.notify()

    def close(self, timeout_s: float) -> None:
        """End the thread. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(max(0.0, timeout_s))

    def _run(self) -> None:
        while True:
            due = self._next_due()
            now = self._clock.now()
            if due is not None and due <= now:
                try:
                    self._act(now)
                except Exception:
                    _log.exception("a timer's action failed")
                    due = now + 1.0  # A defect must not become a busy loop.
                else:
                    due = self._next_due()
            with self._changed:
                if self._closed:
                    return
                if not self._nudged:
                    self._changed.wait(None if due is None else max(0.0, due - self._clock.now()))
                self._nudged = False
                if self._closed:
                    return

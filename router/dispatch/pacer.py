"""When what arrived for many requests is given out: at once while the event loop keeps up, else in larger pieces."""

import asyncio
from collections.abc import Callable

from runtime.clock import Clock

# Work that took less is too small to be worth a wait; none waits longer.
_SHORTEST_WORK_S = 0.001
_LONGEST_HOLD_S = 0.02


class Pacer:
    """Calls `deliver` soon after `ask`: at once, unless the last delivery and all that it set going (tasks of requests
    that write to their clients) took so long that as much time should go to others first. Event-loop thread only.
    """

    def __init__(self, deliver: Callable[[], None], clock: Clock) -> None:
        """`clock`: the loop's own may stand still while a callback runs."""
        self._deliver = deliver
        self._now = clock.now
        self._not_before = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def ask(self, loop: asyncio.AbstractEventLoop) -> None:
        """There is something to deliver."""
        if self._timer is not None:
            return
        wait_s = self._not_before - self._now()
        if wait_s <= 0.0:
            self._run(loop)
        else:
            self._timer = loop.call_later(wait_s, self._run, loop)

    def cancel(self) -> None:
        """No delivery waits any more. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        began = self._now()
        self._deliver()
        # In the loop's order this comes behind the tasks that were just woken.
        loop.call_soon(self._done, began)

    def _done(self, began: float) -> None:
        now = self._now()
        work_s = now - began
        if work_s >= _SHORTEST_WORK_S:
            self._not_before = now + min(work_s, _LONGEST_HOLD_S)

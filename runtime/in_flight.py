"""A count of what is under way, with someone waiting for it to end."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class InFlight:
    """Counts running pieces of work on one event loop; draining waits for zero. Event-loop thread only."""

    def __init__(self) -> None:
        self._count = 0
        self._zero = asyncio.Event()
        self._zero.set()

    @property
    def count(self) -> int:
        """Pieces under way now."""
        return self._count

    def enter(self) -> None:
        """One more. Each `enter` needs exactly one `leave`."""
        self._count += 1
        self._zero.clear()

    def leave(self) -> None:
        """One less. Raises RuntimeError when there was none: some path released twice."""
        if self._count == 0:
            raise RuntimeError("left more often than entered")
        self._count -= 1
        if self._count == 0:
            self._zero.set()

    @contextmanager
    def track(self) -> Iterator[None]:
        """Counts the block as one piece of work."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    async def wait_zero(self, timeout_s: float | None) -> bool:
        """Wait until nothing is under way; False if that took longer than `timeout_s` (None: as long as it takes)."""
        try:
            await asyncio.wait_for(self._zero.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

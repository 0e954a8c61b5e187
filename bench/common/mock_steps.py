"""The pace of a worker without a model: steps that give each running sequence one token, as an engine's steps do.

Both mock servers of `mock_backend.py` run on it, so that routers which speak different protocols stand before the same
worker. Event-loop thread only.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class MockSequence:
    """One request at the mock. Times are of `time.perf_counter`, which all processes of a host share on Linux."""

    request_id: str
    num_tokens: int
    received_at: float = field(default_factory=time.perf_counter)
    first_at: float = 0.0
    last_at: float = 0.0
    sent: int = 0

    @property
    def first_held_s(self) -> float:
        """What the mock itself took until its first token."""
        return self.first_at - self.received_at

    @property
    def held_s(self) -> float:
        """What the mock itself took until its last token."""
        return self.last_at - self.received_at


class MockSteps:
    """Runs steps while there is a sequence; each `step_s` after the one before, or as fast as it goes with 0."""

    def __init__(self, emit: Callable[[list[MockSequence]], None]) -> None:
        """`emit` sends the next token of each of these sequences (`sent` counts the earlier ones) and returns."""
        self.step_s = 0.0
        self.finished: dict[str, MockSequence] = {}
        self._emit = emit
        self._running: dict[MockSequence, None] = {}
        self._task: asyncio.Task[None] | None = None

    def add(self, sequence: MockSequence) -> None:
        """It takes part from the next step on."""
        self._running[sequence] = None
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    def remove(self, sequence: MockSequence) -> None:
        """Nobody wants it any more. Idempotent."""
        self._running.pop(sequence, None)

    async def _run(self) -> None:
        due = time.perf_counter()
        while self._running:
            batch = list(self._running)
            now = time.perf_counter()
            for sequence in batch:
                if not sequence.sent:
                    sequence.first_at = now
            self._emit(batch)
            for sequence in batch:
                sequence.sent += 1
                if sequence.sent == sequence.num_tokens:
                    sequence.last_at = now
                    del self._running[sequence]
                    self.finished[sequence.request_id] = sequence
            due = max(due + self.step_s, now)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
        self._task = None

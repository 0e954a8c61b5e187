"""A gate before a worker's steps: what a test wants to happen in the middle of a request then happens there."""

import math
from typing import Any


class StepGate:
    """Takes the place of a worker's `step`. Closed, the worker computes nothing, however fast its machine is, but goes
    on hearing commands and looking at deadlines. Open at first."""

    def __init__(self, worker: Any) -> None:
        self._step = worker.step
        self._taken = 0  # written by the owner thread alone, as `_limit` is by the test: no update is lost
        self._limit = math.inf
        worker.step = self

    def __call__(self) -> bool:
        """As `LoopHandler.step`."""
        if self._taken >= self._limit:
            return False
        computed: bool = self._step()
        self._taken += computed
        return computed

    def close(self, *, after_steps: int = 0) -> None:
        """Let this many more steps pass and no other. While the worker has nothing to compute."""
        self._limit = self._taken + after_steps

    def open(self) -> None:
        """Let all steps pass; the owner thread looks within 50 ms."""
        self._limit = math.inf

"""An engine loop without an engine: it keeps what it is given, and a test plays the worker."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from engine.wire import DoorLimits
from runtime.errors import KvferryError

WAIT_S = 20.0  # only ever reached by a test that fails
LIMITS = DoorLimits(vocab_size=50, max_context_tokens=32, eos_token_ids=frozenset({2}))
SECRET = b"a secret of the tests"

CommandT = TypeVar("CommandT")


class ScriptedLoop:
    """Stands for `EngineLoop` towards a gRPC service, on the service's event loop."""

    def __init__(self) -> None:
        self.commands: list[Any] = []
        self.refusal: KvferryError | None = None
        self._changed = asyncio.Condition()

    def submit(self, command: Any) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.notify(command)

    def notify(self, command: Any) -> None:
        self.commands.append(command)
        asyncio.get_running_loop().create_task(self._say())

    async def _say(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def of(self, kind: type[CommandT]) -> list[CommandT]:
        """Commands of one kind, in order."""
        return [command for command in self.commands if isinstance(command, kind)]

    async def wait(self, kind: type[CommandT], count: int = 1) -> list[CommandT]:
        """Until there are so many commands of this kind."""
        await self.wait_until(lambda: len(self.of(kind)) >= count)
        return self.of(kind)

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Until the commands fulfil a condition."""
        async with asyncio.timeout(WAIT_S), self._changed:
            await self._changed.wait_for(condition)

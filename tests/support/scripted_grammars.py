"""Grammars whose moment of readiness the test decides."""

import asyncio
from collections.abc import Sequence

from engine.sequence import TokenConstraint
from kvferry_rpc.common_pb2 import Grammar


class ScriptedGrammars:
    """Each call waits for its future in `calls`, made when it comes. `seen` has what was asked."""

    def __init__(self) -> None:
        self.calls: list[asyncio.Future[TokenConstraint]] = []
        self.seen: list[tuple[Grammar, list[int]]] = []
        self._called = asyncio.Event()

    async def constraint(self, grammar: Grammar, output_token_ids: Sequence[int] = ()) -> TokenConstraint:
        self.seen.append((grammar, list(output_token_ids)))
        future: asyncio.Future[TokenConstraint] = asyncio.get_running_loop().create_future()
        self.calls.append(future)
        self._called.set()
        return await future

    async def called(self, count: int = 1) -> "asyncio.Future[TokenConstraint]":
        """Wait for call number `count`, from 1."""
        while len(self.calls) < count:
            self._called.clear()
            await self._called.wait()
        return self.calls[count - 1]


class FreeText:
    """A constraint that allows every token."""

    def allowed(self) -> None:
        return None

    def advance(self, token_id: int) -> None:
        return None

    def rewind(self, num_tokens: int) -> None:
        return None

"""Streams that are pushed, for tests that would rather pull, and sources that would rather yield."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, Generic, TypeVar

from router.generation import Sink, TokenBatch, TokenEnd

T = TypeVar("T")
E = TypeVar("E")


class EnoughTokens(Exception):
    """Thrown into a pulled stream (with `athrow`) by a reader that has what it wanted; into a generator of `play` when
    the sink has."""


class Collected(Generic[T]):
    """A sink that always has room."""

    def __init__(self) -> None:
        self.items: list[T] = []

    def push(self, item: T) -> bool:
        self.items.append(item)
        return True

    async def wants_more(self) -> bool:
        return True


class _OneByOne(Generic[T]):
    """A sink that takes an item whenever its reader asks for one."""

    def __init__(self) -> None:
        self.items: deque[T] = deque()
        self.has_enough = False
        self.news = asyncio.Event()
        self.asked = asyncio.Event()

    def push(self, item: T) -> bool:
        self.items.append(item)
        self.news.set()
        return False

    async def wants_more(self) -> bool:
        await self.asked.wait()
        self.asked.clear()
        return not self.has_enough


async def pulled(run: Callable[[Sink[T]], Coroutine[Any, Any, E]]) -> AsyncGenerator[T | E, None]:
    """What `run` pushes, item by item when it is asked for, and then what it returns. Raises what it raises.

    Closing the generator cancels `run`; EnoughTokens, thrown into it, tells it that nothing more is wanted.
    """
    sink = _OneByOne[T]()
    task = asyncio.create_task(run(sink))
    task.add_done_callback(lambda _: sink.news.set())
    try:
        while True:
            await sink.news.wait()
            sink.news.clear()
            if not sink.items:
                break
            try:
                yield sink.items.popleft()
            except EnoughTokens:
                sink.has_enough = True
            sink.asked.set()
            if task.done():
                break
        yield await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def play(script: AsyncGenerator[TokenBatch | TokenEnd, None], sink: Sink[TokenBatch]) -> TokenEnd:
    """Push what a generator yields, up to its TokenEnd. EnoughTokens is thrown into it when the sink wants no more."""
    async with aclosing(script):
        async for item in script:
            if isinstance(item, TokenEnd):
                return item
            if not sink.push(item) and not await sink.wants_more():
                end = await script.athrow(EnoughTokens())
                assert isinstance(end, TokenEnd), "a script ends when its reader has enough"
                return end
    raise AssertionError("the script has no end")

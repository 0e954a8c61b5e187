"""Several streams read as one: the choices of a request run at the same time and fail together."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


async def interleave(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Yield (index of the stream, item) in order of arrival until all streams have ended.

    The first exception ends all: the other streams are closed before it is raised. Closing this generator closes them
    too. Streams run ahead of the reader by a bounded number of items.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as stream:
            async for item in stream:
                yield 0, item
        return
    # None marks the end of one stream.
    queue: asyncio.Queue[tuple[int, T] | BaseException | None] = asyncio.Queue(maxsize=len(streams))
    pumps = [asyncio.create_task(_pump(index, stream, queue)) for index, stream in enumerate(streams)]
    running = len(pumps)
    try:
        while running:
            entry = await queue.get()
            if entry is None:
                running -= 1
            elif isinstance(entry, BaseException):
                try:
                    raise entry
                finally:
                    # Its traceback has this frame: together they would hold all streams until the collector comes.
                    del entry
            else:
                yield entry
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(
    index: int, stream: AsyncGenerator[T, None], queue: "asyncio.Queue[tuple[int, T] | BaseException | None]"
) -> None:
    """Move one stream into the queue, and its failure too; the stream is closed in any case."""
    try:
        async with aclosing(stream):
            async for item in stream:
                await queue.put((index, item))
    except Exception as error:
        await queue.put(error)
    else:
        await queue.put(None)

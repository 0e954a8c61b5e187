"""Several streams read as one: the choices of a request run at the same time and fail together."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

from router.generation import GenerationRequest, TextChunk, TextEnd, TokenSource
from router.text.chat_reader import ChatReader, ChatSyntax, chat_events
from router.text.text_generation import generate
from router.text.tokenizer import Tokenizer

T = TypeVar("T")


def choice_texts(
    source: TokenSource, requests: Sequence[GenerationRequest], chat: ChatSyntax | None, tokenizer: Tokenizer
) -> AsyncGenerator[tuple[int, TextChunk | TextEnd], None]:
    """The answers to the requests, interleaved, as events of a chat if they belong to one (`chat_reader.py`). Both
    front doors read their answers here."""
    texts = [generate(source, request, tokenizer) for request in requests]
    if chat is not None:
        readers = [ChatReader(chat, request.request_id) for request in requests]
        texts = [chat_events(stream, reader) for stream, reader in zip(texts, readers, strict=True)]
    return interleave(texts)


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

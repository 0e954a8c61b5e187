"""The choices of a request: they run at the same time, go to one place, and fail together. For both front doors."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol

from router.generation import GenerationRequest, TextChunk, TextEnd, TokenSource
from router.text.chat_generation import generate_chat
from router.text.chat_reader import ChatSyntax
from router.text.text_generation import generate
from router.text.tokenizer import Tokenizer


class AnswerSink(Protocol):
    """Where the answers to one request go, item by item, as they come. Event-loop thread only."""

    def push(self, index: int, item: TextChunk | TextEnd) -> bool:
        """Take the next item of choice `index`, in microseconds; its TextEnd is the last one. False: before the next
        item of that choice, `flush` is awaited. It may be called from any task."""
        ...

    async def flush(self) -> None:
        """Wait until there is room for more. Each choice may wait here in a task of its own."""
        ...


async def run_choices(
    source: TokenSource,
    requests: Sequence[GenerationRequest],
    chat: ChatSyntax | None,
    tokenizer: Tokenizer,
    sink: AnswerSink,
) -> None:
    """Answer all requests, as events of a chat if they belong to one (`chat_reader.py`). Returns when all have ended
    and the sink has everything.

    The first failure ends the other requests before it is raised; so does the end of this task. Event-loop task only.
    """
    runs = [_run(source, request, chat, tokenizer, _Choice(index, sink)) for index, request in enumerate(requests)]
    if len(runs) == 1:
        await runs[0]
    else:
        await together(runs)


async def together(runs: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run them at the same time. The first exception ends the others before it is raised, and so does a
    cancellation."""
    tasks = [asyncio.create_task(run) for run in runs]
    failure: BaseException | None = None
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        failure = next((error for error in map(_failure, done) if error is not None), None)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if failure is not None:
        try:
            raise failure
        finally:
            # Its traceback has this frame: together they would hold all requests until the collector comes.
            del failure, done, tasks, task


class _Choice:
    """The sink of one choice's text."""

    def __init__(self, index: int, sink: AnswerSink) -> None:
        self._index = index
        self._sink = sink

    def push(self, item: TextChunk | TextEnd) -> bool:
        return self._sink.push(self._index, item)

    async def wants_more(self) -> bool:
        await self._sink.flush()
        return True


async def _run(
    source: TokenSource, request: GenerationRequest, chat: ChatSyntax | None, tokenizer: Tokenizer, choice: _Choice
) -> None:
    end: TextEnd
    if chat is None:
        end = await generate(source, request, tokenizer, choice)
    else:
        end = await generate_chat(source, request, tokenizer, chat, choice)
    if not choice.push(end):
        await choice.wants_more()


def _failure(task: "asyncio.Task[None]") -> BaseException | None:
    return asyncio.CancelledError() if task.cancelled() else task.exception()

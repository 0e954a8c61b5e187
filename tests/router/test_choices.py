"""The choices of a request: all of them in one sink, all ended when one fails."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from kvferry_rpc.common_pb2 import ErrorCode, SamplingParams
from router.generation import GenerationRequest, TextChunk, TextEnd
from router.http.choices import run_choices
from runtime.errors import KvferryError
from tests.support.http_door import ids_of, one_by_one, tokenizer
from tests.support.scripted_source import Script, ScriptedSource

LOST = KvferryError(ErrorCode.UNAVAILABLE, "lost")
WORDS = ("one two three four", "five six", "seven eight nine")


class Sink:
    """Takes all that comes, while it is open."""

    def __init__(self) -> None:
        self.items: list[tuple[int, TextChunk | TextEnd]] = []
        self.open = asyncio.Event()
        self.open.set()

    def push(self, index: int, item: TextChunk | TextEnd) -> bool:
        self.items.append((index, item))
        return self.open.is_set()

    async def flush(self) -> None:
        await self.open.wait()

    def text(self, index: int) -> str:
        return "".join(item.text for at, item in self.items if at == index and isinstance(item, TextChunk))


def requests(count: int) -> list[GenerationRequest]:
    return [GenerationRequest(f"r-{at}", (1, 2), SamplingParams(seed=at), deadline=9.0) for at in range(count)]


def script(last: Sequence[Any] = ()) -> Script:
    """Each choice has its own words; the last one of three goes on with `last`."""

    def steps(request: GenerationRequest) -> list[Any]:
        at = request.sampling.seed
        return [*one_by_one(WORDS[at]), *(last if at == 2 else ())]

    return steps


async def run(source: ScriptedSource, sink: Sink, count: int = 3) -> None:
    await run_choices(source, requests(count), None, tokenizer(), sink)


@pytest.mark.parametrize("count", [1, 3])
async def test_all_items_of_all_choices_arrive_in_their_order_and_the_ends_last(count: int) -> None:
    sink = Sink()
    await run(ScriptedSource(script()), sink, count)
    for index in range(count):
        own = [item for at, item in sink.items if at == index]
        assert sink.text(index) == WORDS[index]
        assert [isinstance(item, TextEnd) for item in own] == [False] * (len(own) - 1) + [True]


async def test_choices_take_turns() -> None:
    gates = [asyncio.Event(), asyncio.Event()]
    first = [ids_of("a"), gates[0], ids_of("b")]
    source = ScriptedSource(lambda request: [gates[1], ids_of("c")] if request.sampling.seed else first)
    sink = Sink()
    running = asyncio.create_task(run(source, sink, 2))
    for gate in gates[::-1]:
        await source.wait_until(lambda source: len(source.requests) == 2)
        await asyncio.sleep(0)
        gate.set()
        for _ in range(20):
            await asyncio.sleep(0)
    await running
    chunks = [(at, item.text) for at, item in sink.items if isinstance(item, TextChunk)]
    assert chunks == [(0, "a"), (1, "c"), (0, "b")]


@pytest.mark.parametrize("failure", [LOST, RuntimeError("defect")])
async def test_a_failure_ends_the_others_before_it_is_raised(failure: Exception) -> None:
    go = asyncio.Event()

    def steps(request: GenerationRequest) -> list[Any]:
        return [go, failure] if request.sampling.seed == 2 else [ids_of("x"), asyncio.Event()]

    source = ScriptedSource(steps)
    running = asyncio.create_task(run(source, Sink()))
    await source.wait_until(lambda source: len(source.running) == 3)
    go.set()
    with pytest.raises(type(failure), match=str(failure)):
        await running
    assert not source.running
    assert len(source.cancelled) == 2


@pytest.mark.parametrize("count", [1, 3])
async def test_a_cancelled_task_ends_all(count: int) -> None:
    source = ScriptedSource(lambda _: [ids_of("x"), asyncio.Event()])
    running = asyncio.create_task(run(source, Sink(), count))
    await source.wait_until(lambda source: len(source.running) == count)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not source.running
    assert len(source.cancelled) == count


@pytest.mark.parametrize("count", [1, 3])
async def test_choices_stand_still_while_the_sink_has_no_room(count: int) -> None:
    sink = Sink()
    sink.open.clear()
    source = ScriptedSource(script())
    running = asyncio.create_task(run(source, sink, count))
    await source.wait_until(lambda source: len(source.running) == count)
    for _ in range(200):
        await asyncio.sleep(0)
    assert len(sink.items) == count
    sink.open.set()
    await running
    assert [sink.text(index) for index in range(count)] == list(WORDS[:count])

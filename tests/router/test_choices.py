"""Streams read as one."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from router.http.choices import interleave


class Streams:
    """Numbered streams that say when they were closed."""

    def __init__(self) -> None:
        self.closed: list[int] = []
        self.given = [0, 0, 0]

    async def stream(self, index: int, count: int, failure: Exception | None = None) -> AsyncGenerator[int, None]:
        try:
            for value in range(count):
                self.given[index] += 1
                yield value
                await asyncio.sleep(0)
            if failure is not None:
                raise failure
        finally:
            self.closed.append(index)


async def test_all_items_of_all_streams_arrive_in_their_order() -> None:
    streams = Streams()
    items = [item async for item in interleave([streams.stream(index, 10 * index) for index in range(3)])]
    for index in range(3):
        assert [value for source, value in items if source == index] == list(range(10 * index))
    assert sorted(streams.closed) == [0, 1, 2]


@pytest.mark.parametrize("count", [1, 3])
async def test_a_failure_closes_the_others_before_it_is_raised(count: int) -> None:
    streams = Streams()
    sources = [streams.stream(0, 2, ValueError("bad")), *(streams.stream(i, 10_000) for i in range(1, count))]
    with pytest.raises(ValueError, match="bad"):
        [item async for item in interleave(sources)]
    assert sorted(streams.closed) == list(range(count))


@pytest.mark.parametrize("count", [1, 3])
async def test_closing_closes_all(count: int) -> None:
    streams = Streams()
    async with aclosing(interleave([streams.stream(index, 10_000) for index in range(count)])) as items:
        for _ in range(5):
            await anext(items)
    assert sorted(streams.closed) == list(range(count))


async def test_streams_do_not_run_ahead_of_the_reader() -> None:
    streams = Streams()
    async with aclosing(interleave([streams.stream(index, 10_000) for index in range(3)])) as items:
        await anext(items)
        for _ in range(1000):
            await asyncio.sleep(0)
        assert sum(streams.given) <= 1 + 2 * 3

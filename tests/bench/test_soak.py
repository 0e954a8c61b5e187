"""The clients of a soak, and what they call wrong, against a door with a scripted cluster."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from bench.common.soak_clients import SoakClients
from bench.common.soak_http import received
from kvferry_rpc.common_pb2 import ErrorCode
from router.http.protocol import HttpServer
from runtime.errors import KvferryError
from tests.support.http_door import MODEL, Door, one_by_one, says
from tests.support.tool_templates import tool_door

TEXT = "A text of some words."


@asynccontextmanager
async def clients_of(door: Door) -> AsyncIterator[SoakClients]:
    server = HttpServer(door.app, host="127.0.0.1", port=0)
    await server.start()
    try:
        yield SoakClients(f"127.0.0.1:{server.port}", MODEL, seed=1, patience_s=0.0)
    finally:
        await server.close(grace_s=1)


async def test_every_way_of_asking_finds_a_good_server_good() -> None:
    door = tool_door(says(TEXT), "hermes")
    async with clients_of(door) as clients:
        await clients.learn()
        for way in clients.ways:
            for _ in range(2):
                await clients.once(way)
    tally = clients.tally
    assert tally.problems == {}
    assert tally.server_errors == tally.odd_answers == tally.wrong_texts == 0
    assert tally.finished == tally.accepted > 0
    assert tally.compared > 0
    assert not door.source.running


async def test_another_text_than_before_is_wrong() -> None:
    door = Door(says(TEXT))
    async with clients_of(door) as clients:
        await clients.learn()
        door.source.script = says(TEXT + " And more.")
        for way in ("stream", "whole", "compressed"):
            await clients.once(way)
    assert clients.tally.wrong_texts == 3


async def test_an_answer_that_breaks_off_is_not_finished() -> None:
    def script(_: Any) -> Any:
        return [*one_by_one(TEXT), KvferryError(ErrorCode.UNAVAILABLE, "scripted")]

    door = Door(says(TEXT))
    async with clients_of(door) as clients:
        await clients.learn()
        door.source.script = script
        await clients.once("story")
    assert (clients.tally.accepted, clients.tally.finished) == (1, 0)


async def test_a_defect_is_a_server_error() -> None:
    door = Door(says(TEXT))
    async with clients_of(door) as clients:
        await clients.learn()
        door.source.script = lambda _: [RuntimeError("scripted")]
        await clients.once("whole")
    assert clients.tally.server_errors == 1


@pytest.mark.parametrize(
    ("data", "body", "is_whole"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc", b"abc", True),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nab", b"ab", False),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n", b"abc", True),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n", b"abc", False),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nabc", b"abc", False),
    ],
)
def test_an_answer_is_whole_when_it_ends_as_it_says(data: bytes, body: bytes, is_whole: bool) -> None:
    answer = received(data)
    assert (answer.status, answer.body, answer.is_whole) == (200, body, is_whole)


def test_no_head_is_no_answer() -> None:
    with pytest.raises(ConnectionError):
        received(b"HTTP/1.1 200")

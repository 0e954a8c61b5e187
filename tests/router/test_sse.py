"""The watch on the client, and the stream of events by itself."""

import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest

from router.http.errors import ClientGone
from router.http.sse import HEARTBEAT, ClientWatch, EventStream


class Client:
    """The client's end of an ASGI connection."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.got: list[MutableMapping[str, Any]] = []
        self.reads = asyncio.Event()
        self.reads.set()
        self.asked_to_write = asyncio.Event()
        self.num_asked = 0

    async def receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: MutableMapping[str, Any]) -> None:
        self.num_asked += 1
        self.asked_to_write.set()
        await self.reads.wait()
        await asyncio.sleep(0)
        self.got.append(message)


async def send(stream: EventStream, data: bytes) -> None:
    if not stream.push(data):
        await stream.flush()


async def test_leaving_cancels_the_block() -> None:
    client = Client()
    cleaned: list[bool] = []

    async def serve() -> None:
        with ClientWatch(client.receive):
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                cleaned.append(True)

    asyncio.get_running_loop().call_soon(client.left.set)
    with pytest.raises(ClientGone):
        await serve()
    assert cleaned
    await asyncio.sleep(0)  # The task itself goes on.


async def test_a_block_that_ends_in_time_is_left_alone() -> None:
    client = Client()
    with ClientWatch(client.receive):
        await asyncio.sleep(0)
    client.left.set()
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_cancellation_from_outside_stays_one() -> None:
    client = Client()

    async def serve() -> None:
        with ClientWatch(client.receive):
            await asyncio.Event().wait()

    for client_leaves_too in (False, True):
        task = asyncio.create_task(serve())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        if client_leaves_too:
            client.left.set()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_failure_inside_the_block_passes_through() -> None:
    with pytest.raises(ValueError, match="own"), ClientWatch(Client().receive):
        raise ValueError("own")


async def test_no_heartbeat_is_added_while_a_write_waits_for_the_reader() -> None:
    client = Client()
    async with EventStream(client.send, headers=[], quiet_s=0.005) as stream:
        await send(stream, b"data: 1\n\n")
        client.reads.clear()
        client.asked_to_write.clear()
        writing = asyncio.create_task(send(stream, b"data: 2\n\n"))
        await client.asked_to_write.wait()
        num_asked = client.num_asked
        await asyncio.sleep(0.05)
        assert client.num_asked == num_asked
        client.reads.set()
        await writing
        await stream.close()
    # Before and after that a slow machine may be quiet for long enough.
    bodies = [message.get("body") for message in client.got if message.get("body") != HEARTBEAT]
    assert bodies == [None, b"data: 1\n\n", b"data: 2\n\n", b"data: [DONE]\n\n"]


async def test_an_event_waits_for_a_heartbeat_under_way() -> None:
    client = Client()
    client.reads.clear()
    async with EventStream(client.send, headers=[], quiet_s=0.005) as stream:
        await client.asked_to_write.wait()
        assert stream.started
        sending = asyncio.create_task(send(stream, b"data: 1\n\n"))
        await asyncio.sleep(0)
        client.reads.set()
        await sending
        await stream.close()
    assert [message["type"] for message in client.got].count("http.response.start") == 1
    bodies = [message.get("body") for message in client.got]
    assert bodies[:3] == [None, HEARTBEAT, b"data: 1\n\n"]
    assert client.got[-1] == {"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False}


async def test_a_heartbeat_that_fails_costs_nothing_but_itself() -> None:
    tried = asyncio.Event()

    async def broken(message: MutableMapping[str, Any]) -> None:
        tried.set()
        raise OSError("gone")

    async with EventStream(broken, headers=[], quiet_s=0.005):
        await tried.wait()


class Pipe:
    """The way past ASGI, of one client."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.is_full = False

    def write(self, data: bytes) -> None:
        self.client.got.append({"pipe": data})


async def test_events_behind_the_first_one_go_through_the_pipe() -> None:
    client = Client()
    async with EventStream(client.send, headers=[], quiet_s=10, pipe=Pipe(client)) as stream:
        assert not stream.push(b"1")
        assert not stream.push(b"2")
        await stream.flush()
        assert stream.push(b"3")
        assert stream.push(b"4")
        await stream.close(b"5")
    assert [message.get("pipe") or message.get("body") for message in client.got] == [None, b"12", b"3", b"4", b"5"]
    assert client.got[-1]["more_body"] is False


async def test_what_finds_the_pipe_full_waits_for_the_reader_and_keeps_its_place() -> None:
    client = Client()
    pipe = Pipe(client)
    async with EventStream(client.send, headers=[], quiet_s=10, pipe=pipe) as stream:
        await send(stream, b"1")
        pipe.is_full = True
        client.reads.clear()
        client.asked_to_write.clear()
        assert not stream.push(b"2")
        flushing = [asyncio.create_task(stream.flush()) for _ in range(2)]
        await client.asked_to_write.wait()
        pipe.is_full = False
        assert not stream.push(b"3")
        client.reads.set()
        await asyncio.gather(*flushing)
        assert stream.push(b"4")
        await stream.close(b"5")
    bodies = [message.get("pipe") or message.get("body") for message in client.got]
    assert bodies == [None, b"1", b"2", b"3", b"4", b"5"]

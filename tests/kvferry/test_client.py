import socket
import threading
from collections.abc import Iterator

import pytest

from kvferry.client import ONE_TRY, AsyncClient, Client, chat_request, text_request
from kvferry_rpc.common_pb2 import STOP, ErrorCode, SamplingParams
from runtime.errors import KvferryError


@pytest.fixture
def dead_address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


@pytest.fixture
def slow_to_greet(fake_router: str) -> Iterator[str]:
    """A router whose connections are taken only after a while, as on a machine that is very busy."""
    host, port = fake_router.rsplit(":", 1)
    listener = socket.create_server(("127.0.0.1", 0))
    opened: list[socket.socket] = [listener]

    def pump(source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def serve() -> None:
        client, _ = listener.accept()
        threading.Event().wait(2.0)
        router = socket.create_connection((host, int(port)))
        opened.extend((client, router))
        there = threading.Thread(target=pump, args=(client, router))
        there.start()
        pump(router, client)
        there.join()

    thread = threading.Thread(target=serve)
    thread.start()
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    thread.join()
    for each in opened:
        each.close()


def test_a_router_that_takes_seconds_to_greet_is_waited_for(slow_to_greet: str) -> None:
    with Client(slow_to_greet) as client:
        assert client.default_model() == "fake"


def test_a_chat_streams_and_ends_with_its_finish(fake_router: str) -> None:
    with Client(fake_router) as client:
        messages = [("system", "be kind"), ("user", "good morning")]
        parts = list(client.generate(chat_request(client.default_model(), messages)))
    assert "".join(part.text for part in parts) == "good morning (messages 2, seed none) "
    assert [part.HasField("finish") for part in parts] == [False, False, False, True]
    assert parts[-1].finish.reason == STOP
    assert parts[-1].finish.receipt.transport == "shm"


def test_leaving_a_stream_early_is_harmless(fake_router: str) -> None:
    with Client(fake_router) as client:
        for _ in client.generate(text_request("fake", "one two three")):
            break
        assert client.cluster_state().requests_in_flight == 3
        assert client.receipt("req-1").checksum_verified


def test_a_refusal_is_a_kvferry_error_with_the_servers_words(fake_router: str) -> None:
    with Client(fake_router) as client:
        with pytest.raises(KvferryError, match="temperature must be") as caught:
            list(client.generate(text_request("fake", "x", SamplingParams(temperature=3.0))))
        assert caught.value.code == ErrorCode.INVALID_REQUEST
        with pytest.raises(KvferryError, match="no receipt of 'other' is kept"):
            client.receipt("other")


def test_where_nothing_listens_the_error_says_how_to_start_a_cluster(dead_address: str) -> None:
    with Client(dead_address, retry=ONE_TRY) as client:
        for call in (client.models, client.cluster_state, lambda: client.receipt("r")):
            with pytest.raises(KvferryError, match="kvferry up") as caught:
                call()
            assert caught.value.code == ErrorCode.UNAVAILABLE


async def test_the_asyncio_client_does_the_same(fake_router: str, dead_address: str) -> None:
    async with AsyncClient(fake_router) as client:
        assert await client.default_model() == "fake"
        parts = [part async for part in client.generate(text_request("fake", "a b"))]
        assert "".join(part.text for part in parts) == "a b (messages 0, seed none) "
        assert (await client.receipt("req-1")).handoff_id == "h-1"
        assert (await client.cluster_state()).workers[0].worker_id == "decode-0"
        with pytest.raises(KvferryError, match="no receipt"):
            await client.receipt("other")
    async with AsyncClient(dead_address, retry=ONE_TRY) as client:
        with pytest.raises(KvferryError, match="kvferry up"):
            await client.models()

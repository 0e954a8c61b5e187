"""A crowd before a real router with the bounds it has by default. Its worker is scripted, and stands still."""

import asyncio
import itertools
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from kvferry_rpc import public_pb2, public_pb2_grpc
from runtime.grpc_life import channel
from tests.support.fake_workers import Fabric, FakeDecode
from tests.support.router_process import RouterProcess, attached, router

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]
MODEL = "tiny"
NUM_CLIENTS, CHOICES = 90, 16
# Each choice takes a place: 256 run, 1024 wait.
NUM_TAKEN = (256 + 1024) // CHOICES


def _body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 40, "ignore_eos": True, **fields}


async def test_beyond_the_queue_requests_are_refused_at_once_and_all_the_others_can_leave(tmp_path: Path) -> None:
    decode = FakeDecode("decode-0", Fabric())
    decode.pause_after = 3
    limits = httpx.Limits(max_connections=NUM_CLIENTS + 10)
    async with (
        # The worker has room for any number: only the bounds of the router count.
        router(tmp_path, "--kv-forecast-tokens=0") as running,
        attached(running, decode),
        httpx.AsyncClient(base_url=running.url, timeout=60, limits=limits) as http,
    ):
        crowd = [asyncio.create_task(http.post("/v1/completions", json=_body(n=CHOICES))) for _ in range(NUM_CLIENTS)]
        # The others wait for a worker that stands still: an answer now is one that waited for nobody.
        for answered in itertools.islice(asyncio.as_completed(crowd), NUM_CLIENTS - NUM_TAKEN):
            answer = await answered
            assert answer.status_code == 429
            assert int(answer.headers["retry-after"]) >= 1
        await decode.until(lambda: len(decode.live) == 256)
        async with channel(f"127.0.0.1:{running.ports['grpc_port']}") as link:
            stub = public_pb2_grpc.KvferryStub(link)
            state = await stub.ClusterState(public_pb2.ClusterStateRequest(), timeout=30)
            assert (state.requests_in_flight, state.requests_queued) == (NUM_TAKEN * CHOICES, 1024)
            assert (await http.get("/health")).status_code == 200
            with pytest.raises(grpc.aio.AioRpcError) as over:
                await _generate(stub)
            assert over.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            await _all_leave(crowd, running, decode)
            decode.resume.set()
            assert (await http.post("/v1/completions", json=_body(max_tokens=2))).status_code == 200


async def _generate(stub: "public_pb2_grpc.KvferryAsyncStub") -> None:
    request = public_pb2.GenerateRequest(model=MODEL, tokens=public_pb2.TokenIds(ids=[5, 6, 7]))
    async for _ in stub.Generate(request, timeout=60):
        pass


async def _all_leave(crowd: "list[asyncio.Task[httpx.Response]]", running: RouterProcess, decode: FakeDecode) -> None:
    """Hang up, and wait until nothing is left of anybody."""
    for client in crowd:
        client.cancel()
    await asyncio.gather(*crowd, return_exceptions=True)
    await decode.until(lambda: not decode.live)
    async with channel(f"127.0.0.1:{running.ports['grpc_port']}") as link, asyncio.timeout(60):
        stub = public_pb2_grpc.KvferryStub(link)
        ask = public_pb2.ClusterStateRequest()
        while (await stub.ClusterState(ask, timeout=30)).requests_in_flight:  # noqa: ASYNC110 - another process's state
            await asyncio.sleep(0.02)

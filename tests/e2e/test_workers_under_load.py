"""One prefill and one decode worker, and everybody at once: no lease runs out, no hand-off fails, every receipt holds.

And clients that leave at the very moment a prompt is finished, while its blocks are being committed.
"""

import asyncio
import random
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.live_cluster import LiveCluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]
SEED = 45


def _client(cluster: LiveCluster) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=cluster.base_url, timeout=180, limits=httpx.Limits(max_connections=256))


async def _serving(address: str) -> bool:
    async with grpc.aio.insecure_channel(address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _body(rng: random.Random, max_tokens: int, **fields: Any) -> dict[str, Any]:
    prompt = [rng.randrange(6, 4000) for _ in range(rng.randrange(100, 400))]
    return {"model": "tiny-real", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, **fields}


def test_two_hundred_at_once_all_have_verified_receipts_and_workers_answer_meanwhile(tcp_cluster: LiveCluster) -> None:
    """H072."""
    rng, workers = random.Random(SEED), [worker.address for worker in tcp_cluster.state().workers]

    async def run() -> list[dict[str, Any]]:
        async with _client(tcp_cluster) as http:
            bodies = [_body(rng, 4, kv_receipt=True) for _ in range(200)]
            answers = [asyncio.create_task(http.post("/v1/completions", json=body)) for body in bodies]
            while not all(answer.done() for answer in answers):
                assert (await http.get("/health")).status_code == 200
                assert await asyncio.gather(*map(_serving, workers)) == [True] * 2
                await asyncio.wait(answers, timeout=0.5)
            assert [answer.result().status_code for answer in answers] == [200] * len(bodies)
            return [answer.result().json()["kv_receipt"] for answer in answers]

    receipts = asyncio.run(run())
    for receipt in receipts:
        assert receipt["transport"] == "tcp", receipt
        assert receipt["checksum_verified"], receipt
        assert receipt["checksum"], receipt
        assert receipt["tokens_recomputed"] == 0, receipt
        failures = receipt.get("earlier_failures", [])
        assert all("overloaded" in failure for failure in failures), failures
    assert len({receipt["checksum"] for receipt in receipts}) == len(receipts), "a digest is of one hand-off"
    tcp_cluster.wait_at_rest()
    assert "lease" not in tcp_cluster.log("decode-0")
    assert tcp_cluster.log("prefill-0").count("KV goes to decode-0") == 1, "one link carries all of them"


def test_clients_that_leave_just_as_their_prompt_is_finished_leave_nothing_behind(tcp_cluster: LiveCluster) -> None:
    rng = random.Random(SEED + 1)

    async def leave(http: httpx.AsyncClient, gate: asyncio.Semaphore) -> None:
        """The first token leaves the prefill worker just before the commit: hang up when it comes, or a bit later."""
        patience_s = rng.choice((0.0, 0.0, 0.001, 0.003, 0.005))
        async with gate, http.stream("POST", "/v1/completions", json=_body(rng, 2000, stream=True)) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    break
            await asyncio.sleep(patience_s)

    async def run() -> int:
        async with _client(tcp_cluster) as http:
            gate = asyncio.Semaphore(8)
            await asyncio.gather(*(leave(http, gate) for _ in range(100)))
            probe = await http.post("/v1/completions", json=_body(rng, 4, kv_receipt=True))
            assert probe.json()["kv_receipt"]["checksum_verified"]
            return probe.status_code

    assert asyncio.run(run()) == 200
    state = tcp_cluster.wait_at_rest()
    assert {worker.pid for worker in state.workers} == {tcp_cluster.pids["prefill-0"], tcp_cluster.pids["decode-0"]}

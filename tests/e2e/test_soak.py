"""Many requests with random lengths, cancels and disconnects on pools that are too small for them."""

import asyncio
import random
from collections import Counter
from pathlib import Path

import httpx
import pytest

from tests.support.live_cluster import LiveCluster, live_cluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
NUM_REQUESTS = 1000
CONCURRENCY = 32
SEED = 20


def test_a_thousand_requests_with_cancels_leave_every_pool_whole(tmp_path: Path) -> None:
    with live_cluster(tmp_path, "--num-blocks", "96", "--max-num-seqs", "24", "--no-restart") as cluster:
        outcomes = asyncio.run(_storm(cluster))
        state = cluster.wait_at_rest()
        metrics = httpx.get(f"{cluster.base_url}/metrics").text
        pids_after = cluster.state()
    assert sum(outcomes.values()) == NUM_REQUESTS
    assert set(outcomes) <= {"finished", "left", "refused"}, outcomes
    assert outcomes["finished"] >= NUM_REQUESTS // 3, outcomes
    assert outcomes["left"] >= NUM_REQUESTS // 10, outcomes
    for worker in state.workers:
        assert worker.blocks_free + worker.blocks_cached == worker.blocks_total == 96
    assert {worker.pid for worker in pids_after.workers} == {
        pid for name, pid in cluster.pids.items() if name != "router"
    }, "a worker was lost on the way"
    counts = _counts(metrics)
    received = counts.pop("received")
    assert received == sum(counts.values()), counts


async def _storm(cluster: LiveCluster) -> Counter[str]:
    rng = random.Random(SEED)
    gate = asyncio.Semaphore(CONCURRENCY)
    limits = httpx.Limits(max_connections=CONCURRENCY)
    async with httpx.AsyncClient(base_url=cluster.base_url, timeout=120, limits=limits) as http:

        async def one(number: int) -> str:
            async with gate:
                return await _request(http, random.Random(SEED * 10_000 + number))

        order = list(range(NUM_REQUESTS))
        rng.shuffle(order)
        return Counter(await asyncio.gather(*(one(number) for number in order)))


async def _request(http: httpx.AsyncClient, rng: random.Random) -> str:
    """One request: streamed or not, read to its end or left at a random point. The outcome in one word."""
    shared = rng.random() < 0.3
    prompt = [7] * 48 if shared else [rng.randrange(6, 4000) for _ in range(rng.choice((1, 15, 16, 17, 40, 120, 300)))]
    body = {
        "model": "tiny-real",
        "prompt": prompt,
        "max_tokens": rng.choice((1, 2, 8, 24)),
        "temperature": rng.choice((0, 1)),
        "ignore_eos": True,
        "stream": rng.random() < 0.7,
    }
    patience = rng.choice((None, None, None, None, None, 0.0, 0.05, 0.3))
    try:
        async with asyncio.timeout(patience):
            return await (_streamed if body["stream"] else _buffered)(http, body, rng)
    except TimeoutError:
        return "left"


async def _buffered(http: httpx.AsyncClient, body: dict[str, object], rng: random.Random) -> str:
    answer = await http.post("/v1/completions", json=body)
    if answer.status_code == 429:
        return "refused"
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == body["max_tokens"]
    return "finished"


async def _streamed(http: httpx.AsyncClient, body: dict[str, object], rng: random.Random) -> str:
    leave_after = rng.choice((None, None, None, 1, 3))
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code == 429:
            return "refused"
        assert answer.status_code == 200
        count = 0
        last = ""
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                count += 1
                last = line
                if count == leave_after:
                    return "left"
    assert last == "data: [DONE]", last
    return "finished"


def _counts(metrics: str) -> dict[str, float]:
    """`received` and the number of requests for each outcome."""
    values: dict[str, float] = {}
    for line in metrics.splitlines():
        if line.startswith("kvferry_requests_received_total "):
            values["received"] = float(line.rsplit(" ", 1)[1])
        elif line.startswith("kvferry_requests_ended_total{"):
            values[line.split('outcome="')[1].split('"')[0]] = float(line.rsplit(" ", 1)[1])
    return values

"""Workers that die, stop or drain under a running stream: the text does not change and nothing leaks."""

import asyncio
import itertools
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.live_cluster import LiveCluster, live_cluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]
BODY: dict[str, Any] = {
    "model": "tiny-real",
    "max_tokens": 160,
    "ignore_eos": True,
    "temperature": 0.9,
    "seed": 11,
    "stream": True,
    "kv_receipt": True,
}


@pytest.fixture
def two_by_two(tmp_path: Path) -> Iterator[LiveCluster]:
    with live_cluster(tmp_path, "--prefill", "2", "--decode", "2", "--num-blocks", "512") as cluster:
        yield cluster


async def _stream(http: httpx.AsyncClient, prompt: str) -> AsyncIterator[str]:
    """Data events of one streamed completion."""
    async with http.stream("POST", "/v1/completions", json={**BODY, "prompt": prompt}) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                yield line[6:]


async def _text(
    http: httpx.AsyncClient,
    prompt: str,
    started: asyncio.Event | None = None,
    receipts: list[dict[str, Any]] | None = None,
) -> str:
    parts: list[str] = []
    async for data in _stream(http, prompt):
        if data == "[DONE]":
            return "".join(parts)
        event = httpx.Response(200, content=data).json()
        assert "error" not in event, event
        if receipts is not None and "kv_receipt" in event:
            receipts.append(event["kv_receipt"])
        parts.extend(choice["text"] for choice in event["choices"])
        if started is not None and len(parts) >= 2:  # the first one is of the prefill worker
            started.set()
    raise AssertionError("the stream ended without [DONE]")


async def _disturbed(cluster: LiveCluster, victim: str, number: signal.Signals) -> list[dict[str, Any]]:
    """Eight streams, a signal to one worker when all are under way; each text must equal its undisturbed one. Their
    receipts."""
    receipts: list[dict[str, Any]] = []
    prompts = [f"Tell me story number {index} about a fox and a crow. " * 3 for index in range(8)]
    limits = httpx.Limits(max_connections=32)
    async with httpx.AsyncClient(base_url=cluster.base_url, timeout=120, limits=limits) as http:
        expected = [await _text(http, prompt) for prompt in prompts]
        started = [asyncio.Event() for _ in prompts]
        streams = [asyncio.create_task(_text(http, *pair, receipts)) for pair in zip(prompts, started, strict=True)]
        await asyncio.gather(*(event.wait() for event in started))
        cluster.kill(victim, number)
        assert await asyncio.gather(*streams) == expected
        assert await _text(http, prompts[0]) == expected[0]
    assert len(receipts) == len(prompts)
    return receipts


def test_a_decode_worker_killed_under_eight_streams_changes_no_text(two_by_two: LiveCluster) -> None:
    asyncio.run(_disturbed(two_by_two, "decode-0", signal.SIGKILL))
    two_by_two.wait_at_rest()


def test_a_decode_worker_told_to_stop_moves_its_streams_or_finishes_them(two_by_two: LiveCluster) -> None:
    receipts = asyncio.run(_disturbed(two_by_two, "decode-1", signal.SIGTERM))
    two_by_two.wait_at_rest()
    for receipt in receipts:
        assert receipt["earlier_failures"] == []
        assert receipt["tokens_recomputed"] == 0
        for moved in receipt["migrations"]:
            assert (moved["from_worker"], moved["to_worker"]) == ("decode-1", "decode-0")
            assert moved["checksum_verified"]
            assert moved["blocks_sent"] > 0
            assert moved["transport"] == "shm"
            assert moved["tokens_recomputed"] == 0


def test_a_prefill_worker_killed_while_prompts_are_computed_costs_no_request(two_by_two: LiveCluster) -> None:
    async def run() -> None:
        killed = asyncio.Event()

        async def ask_until_killed(number: int) -> None:
            """Prompt after prompt: however fast they are computed, there are some when the worker is killed."""
            for turn in itertools.count():
                body = {**BODY, "stream": False, "max_tokens": 4, "prompt": f"{number} {turn} " * 300}
                assert (await http.post("/v1/completions", json=body)).status_code == 200
                if killed.is_set():
                    return

        async with httpx.AsyncClient(base_url=two_by_two.base_url, timeout=120) as http:
            asks = [asyncio.create_task(ask_until_killed(number)) for number in range(12)]
            await asyncio.to_thread(_wait_prefilling, two_by_two, "prefill-0")
            two_by_two.kill("prefill-0")
            killed.set()
            await asyncio.gather(*asks)

    asyncio.run(run())
    two_by_two.wait_at_rest()


def test_without_any_prefill_worker_the_decode_worker_computes_the_prompt_and_says_so(tmp_path: Path) -> None:
    with live_cluster(tmp_path, "--prefill", "0", "--num-blocks", "256") as cluster:
        body = {"model": "tiny-real", "prompt": "Hello there. " * 10, "max_tokens": 4, "kv_receipt": True}
        receipt = httpx.post(f"{cluster.base_url}/v1/completions", json=body, timeout=60).json()["kv_receipt"]
        cluster.wait_at_rest()
    assert receipt["transport"] == "local"
    assert receipt["prefill_worker"] == receipt["decode_worker"] == "decode-0"
    assert receipt["plan_reason"]


def _wait_prefilling(cluster: LiveCluster, name: str) -> None:
    """Until this worker has reported that it computes. Reports can only be looked at."""
    deadline = time.monotonic() + 60
    while not any(worker.sequences_running for worker in cluster.state().workers if worker.worker_id == name):
        assert time.monotonic() < deadline
        time.sleep(0.02)

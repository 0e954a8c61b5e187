"""Workers that die, stop or drain under a running stream: the text does not change and nothing leaks."""

import asyncio
import itertools
import signal
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from kvferry.__main__ import main
from kvferry.client.types import ClusterState
from tests.support.live_cluster import LiveCluster

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


async def _disturbed(cluster: LiveCluster, disturb: Callable[[], None]) -> list[dict[str, Any]]:
    """Eight streams, and something that happens when all are under way; each text must equal its undisturbed one. Their
    receipts."""
    receipts: list[dict[str, Any]] = []
    prompts = [f"Tell me story number {index} about a fox and a crow. " * 3 for index in range(8)]
    limits = httpx.Limits(max_connections=32)
    async with httpx.AsyncClient(base_url=cluster.base_url, timeout=120, limits=limits) as http:
        expected = [await _text(http, prompt) for prompt in prompts]
        started = [asyncio.Event() for _ in prompts]
        streams = [asyncio.create_task(_text(http, *pair, receipts)) for pair in zip(prompts, started, strict=True)]
        await asyncio.gather(*(event.wait() for event in started))
        await asyncio.to_thread(disturb)
        assert await asyncio.gather(*streams) == expected
        assert await _text(http, prompts[0]) == expected[0]
    assert len(receipts) == len(prompts)
    return receipts


def test_a_decode_worker_killed_under_eight_streams_changes_no_text(mortal: LiveCluster) -> None:
    asyncio.run(_disturbed(mortal, lambda: mortal.kill("decode-0")))


def test_a_decode_worker_told_to_stop_moves_its_streams_or_finishes_them(mortal: LiveCluster) -> None:
    _check_moves(asyncio.run(_disturbed(mortal, lambda: mortal.kill("decode-1", signal.SIGTERM))))


def test_a_decode_worker_told_to_become_a_prefill_worker_cuts_no_stream_and_comes_back(mortal: LiveCluster) -> None:
    def become(role: str) -> None:
        assert main(["worker", role, "decode-1", "--state-dir", str(mortal.state_dir)]) == 0

    def wait_for(role: str) -> None:
        mortal.wait_until(lambda state: ("decode-1", role, "ready") in _roles(state))

    pid = mortal.pid("decode-1")
    _check_moves(asyncio.run(_disturbed(mortal, lambda: become("prefill"))))
    wait_for("prefill")
    become("decode")
    wait_for("decode")
    assert mortal.pid("decode-1") == pid


def _roles(state: ClusterState) -> set[tuple[str, str, str]]:
    return {(worker.worker_id, worker.role, worker.state) for worker in state.workers}


def _check_moves(receipts: list[dict[str, Any]]) -> None:
    """Nothing failed, and what left decode-1 went to decode-0 with its KV."""
    for receipt in receipts:
        assert receipt["earlier_failures"] == []
        assert receipt["tokens_recomputed"] == 0
        for moved in receipt["migrations"]:
            assert (moved["from_worker"], moved["to_worker"]) == ("decode-1", "decode-0")
            assert moved["checksum_verified"]
            assert moved["blocks_sent"] > 0
            assert moved["transport"] == "shm"
            assert moved["tokens_recomputed"] == 0


def test_a_prefill_worker_killed_while_prompts_are_computed_costs_no_request(mortal: LiveCluster) -> None:
    async def run() -> None:
        killed = asyncio.Event()

        async def ask_until_killed(number: int) -> None:
            """Prompt after prompt: however fast they are computed, there are some when the worker is killed."""
            for turn in itertools.count():
                body = {**BODY, "stream": False, "max_tokens": 4, "prompt": f"{number} {turn} " * 300}
                assert (await http.post("/v1/completions", json=body)).status_code == 200
                if killed.is_set():
                    return

        async with httpx.AsyncClient(base_url=mortal.base_url, timeout=120) as http:
            asks = [asyncio.create_task(ask_until_killed(number)) for number in range(12)]
            await asyncio.to_thread(_wait_prefilling, mortal, "prefill-0")
            mortal.kill("prefill-0")
            killed.set()
            await asyncio.gather(*asks)

    asyncio.run(run())


def test_without_any_prefill_worker_the_decode_worker_computes_the_prompt_and_says_so(mortal: LiveCluster) -> None:
    body = {"model": "tiny-real", "prompt": "Hello there. " * 10, "max_tokens": 4, "kv_receipt": True}
    with mortal.launcher_asleep():
        for name in ("prefill-0", "prefill-1"):
            mortal.kill(name)
        mortal.wait_until(lambda state: all(worker.role == "decode" for worker in state.workers))
        receipt = httpx.post(f"{mortal.base_url}/v1/completions", json=body, timeout=60).json()["kv_receipt"]
    assert receipt["transport"] == "local"
    assert receipt["prefill_worker"] == receipt["decode_worker"]
    assert receipt["decode_worker"].startswith("decode-")
    assert receipt["plan_reason"]


def _wait_prefilling(cluster: LiveCluster, name: str) -> None:
    """Until this worker has reported that it computes."""
    cluster.wait_until(lambda state: any(w.sequences_running for w in state.workers if w.worker_id == name))

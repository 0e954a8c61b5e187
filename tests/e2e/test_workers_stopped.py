"""Prefill workers that freeze or die in the middle of pushing, while the decode pool is full of what they promised."""

import asyncio
import random
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvferry_rpc.public_pb2 import ClusterStateResponse, WorkerState
from tests.support.live_cluster import LiveCluster, live_cluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]
VICTIM = "prefill-0"
NUM_BLOCKS = 256  # of 16 tokens: room for six of the prompts


def _prompts(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(6, 4000) for _ in range(620 + index)] for index in range(12)]


async def _ask(http: httpx.AsyncClient, prompt: list[int]) -> dict[str, Any]:
    body = {"model": "tiny-real", "prompt": prompt, "max_tokens": 6, "ignore_eos": True, "temperature": 0}
    answer = await http.post("/v1/completions", json={**body, "kv_receipt": True})
    assert answer.status_code == 200, answer.text
    content: dict[str, Any] = answer.json()
    return content


def _text(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["text"])


def _worker(state: ClusterStateResponse, name: str) -> WorkerState:
    return next(worker for worker in state.workers if worker.worker_id == name)


def _wait_until(cluster: LiveCluster, condition: Callable[[ClusterStateResponse], bool]) -> None:
    """Load reports can only be looked at."""
    deadline = time.monotonic() + 60
    while not condition(state := cluster.state()):
        assert time.monotonic() < deadline, state
        time.sleep(0.02)


def _pushing(state: ClusterStateResponse) -> bool:
    """Whether the victim computes while the decode worker waits for blocks."""
    return bool(_worker(state, VICTIM).sequences_running and _worker(state, "decode-0").sequences_receiving >= 4)


async def _disturbed(cluster: LiveCluster, seed: int, disturb: Callable[[], None]) -> list[dict[str, Any]]:
    """Twelve prompts at once, twice what there is room for; the disturbance when the victim is in the middle."""
    async with httpx.AsyncClient(base_url=cluster.base_url, timeout=120) as http:
        asks = [asyncio.create_task(_ask(http, prompt)) for prompt in _prompts(seed)]
        await asyncio.to_thread(_wait_until, cluster, _pushing)
        disturb()
        return await asyncio.gather(*asks)


async def _undisturbed(cluster: LiveCluster, seed: int) -> list[str]:
    async with httpx.AsyncClient(base_url=cluster.base_url, timeout=120) as http:
        return [_text(answer) for answer in await asyncio.gather(*(_ask(http, prompt) for prompt in _prompts(seed)))]


def _assert_same(answers: list[dict[str, Any]], expected: list[str]) -> None:
    assert [_text(answer) for answer in answers] == expected
    for answer in answers:
        receipt = answer["kv_receipt"]
        assert receipt["transport"] == "local" or receipt["checksum_verified"], receipt


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_prefill_worker_that_freezes_while_it_pushes_costs_no_answer_and_no_block(
    tmp_path: Path, transport: str
) -> None:
    with _two_by_one(tmp_path, transport) as cluster:
        answers = asyncio.run(_disturbed(cluster, 1, lambda: cluster.kill(VICTIM, signal.SIGSTOP)))
        try:
            # Over shm the frozen process might write at any time; over tcp the decode worker alone writes.
            quarantined = _worker(cluster.state(), "decode-0").blocks_quarantined
            assert bool(quarantined) == (transport == "shm"), quarantined
            assert any(answer["kv_receipt"]["attempt"] > 1 for answer in answers)
        finally:
            cluster.kill(VICTIM, signal.SIGCONT if transport == "shm" else signal.SIGKILL)
        cluster.wait_at_rest()
        _assert_same(answers, asyncio.run(_undisturbed(cluster, 1)))
        if transport == "shm":
            _kill_while_the_decode_pool_is_full(cluster)
        cluster.wait_at_rest()


def _kill_while_the_decode_pool_is_full(cluster: LiveCluster) -> None:
    """Its death is the fence: what it was writing is free at once, and others take its place."""
    answers = asyncio.run(_disturbed(cluster, 2, lambda: cluster.kill(VICTIM, signal.SIGKILL)))
    cluster.wait_at_rest()
    _assert_same(answers, asyncio.run(_undisturbed(cluster, 2)))


def _two_by_one(directory: Path, transport: str) -> AbstractContextManager[LiveCluster]:
    flags = ("--prefill", "2", "--num-blocks", str(NUM_BLOCKS), "--token-budget", "64", "--transport", transport)
    return live_cluster(directory, *flags)

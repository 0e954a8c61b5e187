"""Every process of a cluster is replaced under load, and no client notices."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvferry.client.asynchronous import AsyncClient
from tests.support.live_cluster import LiveCluster, live_cluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]
# And one over gRPC. Two cores have three processes to start besides.
NUM_CLIENTS = 1
PROMPTS = [f"Story number {number} of a fox and a crow. " * 3 for number in range(3)]


def _body(prompt: str) -> dict[str, Any]:
    return {
        "model": "tiny-real",
        "prompt": prompt,
        "max_tokens": 120,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }


async def _text(http: httpx.AsyncClient, prompt: str) -> str:
    """The whole answer. A client that tries nothing again: whatever goes wrong fails the test."""
    parts: list[str] = []
    async with http.stream("POST", "/v1/completions", json=_body(prompt)) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return "".join(parts)
            if line.startswith("data: "):
                event = json.loads(line[6:])
                assert "error" not in event, event
                parts += [choice["text"] for choice in event["choices"]]
    raise AssertionError("the stream ended without [DONE]")


async def _restart_under_load(cluster: LiveCluster) -> tuple[dict[str, Any], int]:
    """What `kvferry restart` said, and how many requests were answered meanwhile, each as it is without it."""
    over = asyncio.Event()

    async def ask_on(number: int) -> int:
        answered = 0
        async with httpx.AsyncClient(base_url=cluster.base_url, timeout=120) as http:
            while not over.is_set():
                prompt = PROMPTS[(number + answered) % len(PROMPTS)]
                assert await _text(http, prompt) == expected[prompt]
                answered += 1
        return answered

    async def ask_on_over_grpc() -> int:
        """With the client's own patience: a call that finds its router leaving is made again."""
        answered = 0
        async with AsyncClient(cluster.grpc) as client:
            while not over.is_set():
                prompt = PROMPTS[answered % len(PROMPTS)]
                answer = await client.complete(prompt, max_tokens=120, temperature=0.0, ignore_eos=True)
                assert answer.text == expected[prompt]
                answered += 1
        return answered

    async with httpx.AsyncClient(base_url=cluster.base_url, timeout=120) as http:
        expected = {prompt: await _text(http, prompt) for prompt in PROMPTS}
    clients = [asyncio.create_task(ask_on(number)) for number in range(NUM_CLIENTS)]
    clients.append(asyncio.create_task(ask_on_over_grpc()))
    command = (sys.executable, "-m", "kvferry", "restart", "--rolling", "--json", "--state-dir", str(cluster.state_dir))
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    said, _ = await process.communicate()
    over.set()
    answered = await asyncio.gather(*clients)
    assert process.returncode == 0, said
    async with httpx.AsyncClient(base_url=cluster.base_url, timeout=120) as http:
        assert await _text(http, PROMPTS[0]) == expected[PROMPTS[0]]
    return json.loads(said.splitlines()[-1]), sum(answered)


def test_a_rolling_restart_fails_no_request_and_changes_no_text(tmp_path: Path) -> None:
    with live_cluster(tmp_path, "--prefill", "1", "--decode", "1", "--num-blocks", "512") as cluster:
        before = dict(cluster.pids)
        done, answered = asyncio.run(_restart_under_load(cluster))
        assert done["replaced"] == {"prefill-0": "prefill-1", "decode-0": "decode-1"}
        assert answered > NUM_CLIENTS
        state = cluster.wait_at_rest()
        assert {worker.worker_id for worker in state.workers} == {"prefill-1", "decode-1"}
        cluster.pids = {name: cluster.pid(name) for name in ("router", "prefill-1", "decode-1")}
        assert not set(before.values()) & set(cluster.pids.values())

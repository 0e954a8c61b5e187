"""What clients see when processes behind the front door, or the router itself, are killed, stopped or told to end."""

import asyncio
import json
import signal
import time
from typing import Any

import httpx
import pytest

from kvferry.client.types import ClusterState, WorkerState
from tests.support.live_cluster import LiveCluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(150)]
MODEL = "tiny-real"
NUM_WORKERS = 4
DECODES = ("decode-0", "decode-1")


def _worker(state: ClusterState, name: str) -> WorkerState | None:
    return next((worker for worker in state.workers if worker.worker_id == name), None)


def _body(prompt: str, max_tokens: int, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0, **fields}


def _post(cluster: LiveCluster, **fields: Any) -> httpx.Response:
    return httpx.post(f"{cluster.base_url}/v1/completions", json=_body(max_tokens=4, **fields), timeout=60)


def _ready(cluster: LiveCluster) -> int:
    return httpx.get(f"{cluster.base_url}/ready", timeout=30).status_code


class Stream:
    """One streamed completion, read by a task. `started` is set at its second event, which is of the decode worker."""

    def __init__(self, http: httpx.AsyncClient, prompt: str, max_tokens: int) -> None:
        self.started = asyncio.Event()
        self.events: list[Any] = []
        self._body = _body(prompt, max_tokens, stream=True)
        self.task = asyncio.create_task(self._read(http))

    @property
    def text(self) -> str:
        return "".join(choice["text"] for event in self.events for choice in event.get("choices", ()))

    async def _read(self, http: httpx.AsyncClient) -> bool:
        """True when it came to its [DONE], False when it ended otherwise."""
        try:
            async with http.stream("POST", "/v1/completions", json=self._body) as answer:
                assert answer.status_code == 200
                async for line in answer.aiter_lines():
                    if line == "data: [DONE]":
                        return True
                    if line.startswith("data: "):
                        self.events.append(json.loads(line[6:]))
                    if len(self.events) >= 2:
                        self.started.set()
        except httpx.TransportError:
            pass
        return False


def _client(cluster: LiveCluster) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=cluster.base_url, timeout=60, limits=httpx.Limits(max_connections=64))


async def _start_streams(http: httpx.AsyncClient, count: int, max_tokens: int) -> list[Stream]:
    streams = [Stream(http, f"Story {number}. " * 4, max_tokens) for number in range(count)]
    async with asyncio.timeout(60):
        await asyncio.gather(*(stream.started.wait() for stream in streams))
    return streams


def test_a_burst_on_the_hottest_prefix_of_a_killed_worker_fails_nobody(mortal: LiveCluster) -> None:
    prefix = "Once upon a time there was a fox who would not be hurried. " * 30
    warm = _post(mortal, prompt=prefix, kv_receipt=True).json()
    victim = warm["kv_receipt"]["decode_worker"]

    async def burst() -> list[httpx.Response]:
        async with _client(mortal) as http:
            mortal.kill(victim)
            return await asyncio.gather(*(http.post("/v1/completions", json=_body(prefix, 4)) for _ in range(50)))

    answers = asyncio.run(burst())
    assert [answer.status_code for answer in answers] == [200] * 50
    assert {answer.json()["choices"][0]["text"] for answer in answers} == {warm["choices"][0]["text"]}


def test_a_killed_router_comes_back_on_its_ports_and_finds_its_workers_and_their_caches(mortal: LiveCluster) -> None:
    prompt = "The same long beginning for all who ask. " * 30
    warm = _post(mortal, prompt=prompt, kv_receipt=True).json()["kv_receipt"]
    pids = {worker.pid for worker in mortal.state().workers}
    router_id = mortal.state().router_id

    async def cut() -> list[bool]:
        async with _client(mortal) as http:
            streams = await _start_streams(http, 6, 3900)
            mortal.kill("router")
            async with asyncio.timeout(30):
                return await asyncio.gather(*(stream.task for stream in streams))

    assert asyncio.run(cut()) == [False] * 6
    state = mortal.wait_until(lambda state: state.router_id != router_id and len(state.workers) == NUM_WORKERS)
    assert {worker.pid for worker in state.workers} == pids
    # What the lost router had started is nobody's any more.
    mortal.wait_at_rest()
    assert _ready(mortal) == 200
    receipt = _post(mortal, prompt=prompt, kv_receipt=True).json()["kv_receipt"]
    # The reason is made from the router's own index, which it can only have from the workers.
    assert f"{receipt['prefill_worker']} has 0 of" not in receipt["plan_reason"]
    assert receipt["prefill_worker"] == warm["prefill_worker"]


def test_a_router_told_to_stop_finishes_its_streams_and_takes_no_new_ones(mortal: LiveCluster) -> None:
    async def undisturbed() -> list[str]:
        async with _client(mortal) as http:
            streams = await _start_streams(http, 20, 400)
            assert await asyncio.gather(*(stream.task for stream in streams)) == [True] * 20
            return [stream.text for stream in streams]

    async def disturbed() -> list[str]:
        async with _client(mortal) as http:
            # Long ones: none may have ended when the workers stop, however late this process is.
            streams = await _start_streams(http, 20, 400)
            for name in DECODES:  # so that the streams cannot end before everything was looked at
                mortal.kill(name, signal.SIGSTOP)
            try:
                mortal.kill("router", signal.SIGTERM)
                while (await http.get("/ready")).status_code == 200:  # noqa: ASYNC110 - another process's state
                    await asyncio.sleep(0.01)
                assert (await http.get("/health")).status_code == 200
                refused = await http.post("/v1/completions", json=_body("Too late", 4))
                assert refused.status_code == 503
                assert int(refused.headers["retry-after"]) >= 1
                assert not all(stream.task.done() for stream in streams)
            finally:
                for name in DECODES:
                    mortal.kill(name, signal.SIGCONT)
            assert await asyncio.gather(*(stream.task for stream in streams)) == [True] * 20
            return [stream.text for stream in streams]

    expected = asyncio.run(undisturbed())
    router_id = mortal.state().router_id
    assert asyncio.run(disturbed()) == expected
    mortal.wait_until(lambda state: state.router_id != router_id)
    ends = [event["text"] for event in mortal.events if event["event"] == "died" and event["name"] == "router"]
    assert ends[-1] == "exited with status 0"


def test_stopped_workers_are_avoided_and_readiness_says_when_none_is_left(mortal: LiveCluster) -> None:
    mortal.kill("decode-0", signal.SIGSTOP)
    try:
        mortal.wait_until(lambda state: (w := _worker(state, "decode-0")) is None or w.state == "stalled")
        assert _ready(mortal) == 200
        receipts = [_post(mortal, prompt=f"Number {n}", kv_receipt=True).json()["kv_receipt"] for n in range(8)]
        assert {receipt["decode_worker"] for receipt in receipts} == {"decode-1"}
        mortal.kill("decode-1", signal.SIGSTOP)
        deadline = time.monotonic() + 10
        while _ready(mortal) == 200:
            assert time.monotonic() < deadline, "readiness does not notice"
            time.sleep(0.1)
        assert _ready(mortal) == 503
        assert httpx.get(f"{mortal.base_url}/health", timeout=30).status_code == 200
    finally:
        for name in DECODES:
            mortal.kill(name, signal.SIGCONT)
    mortal.wait_until(lambda state: all((w := _worker(state, name)) and w.state == "ready" for name in DECODES))
    assert _ready(mortal) == 200
    assert _post(mortal, prompt="Awake again").status_code == 200


def test_with_the_last_decode_worker_killed_streams_end_in_an_error_event_and_new_requests_in_503(
    mortal: LiveCluster,
) -> None:
    async def run() -> None:
        async with _client(mortal) as http:
            streams = await _start_streams(http, 4, 3900)
            for name in DECODES:
                mortal.kill(name)
            async with asyncio.timeout(30):
                ends = await asyncio.gather(*(stream.task for stream in streams))
            refused = await http.post("/v1/completions", json=_body("Anybody?", 4))
        assert ends == [False] * 4
        for stream in streams:
            *chunks, last = stream.events
            assert last["error"]["type"] == "service_unavailable_error"
            assert all(choice["finish_reason"] is None for chunk in chunks for choice in chunk["choices"])
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1

    asyncio.run(run())

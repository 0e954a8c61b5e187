"""Clients that leave a real cluster in any way and at any moment: all work for them stops, and the rest goes on."""

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import httpx
import pytest

from kvferry.client.types import ClusterState
from kvferry_rpc import public_pb2, public_pb2_grpc
from kvferry_rpc.common_pb2 import SamplingParams
from tests.support.live_cluster import LiveCluster
from tests.support.raw_http import RawClient

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]
MODEL = "tiny-real"
CONTEXT = 4096
NUM_TALKERS, TALK_TOKENS = 4, 4000
NUM_READERS, READ_TOKENS = 10, 3600


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(6, 4000) for _ in range(count)]


def _body(prompt: list[int], max_tokens: int, **fields: object) -> dict[str, object]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, **fields}


def _running(state: ClusterState, role: str) -> int:
    return sum(worker.sequences_running for worker in state.workers if worker.role == role)


def _steps(state: ClusterState, role: str) -> int:
    return sum(worker.steps for worker in state.workers if worker.role == role)


@contextmanager
def _frozen_workers(cluster: LiveCluster) -> Iterator[None]:
    """Their processes stand still, for less time than makes the router doubt them."""
    pids = [worker.pid for worker in cluster.state().workers]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("reset", [False, True], ids=["fin", "rst"])
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "buffered"])
def test_when_all_clients_leave_all_work_stops_wherever_it_was(cluster: LiveCluster, stream: bool, reset: bool) -> None:
    # Some decode, some are in prefill, some wait in the router for room.
    rng = random.Random()
    crowd = [RawClient(cluster.http) for _ in range(NUM_TALKERS + NUM_READERS)]
    for client in crowd[:NUM_TALKERS]:
        client.post("/v1/completions", _body(_ids(rng, 10), TALK_TOKENS, stream=stream))
    cluster.wait_until(lambda state: _running(state, "decode") == NUM_TALKERS)
    for client in crowd[NUM_TALKERS:]:
        client.post("/v1/completions", _body(_ids(rng, READ_TOKENS), 400, stream=stream))
    before = cluster.wait_until(lambda state: state.requests_queued > 0 and _running(state, "prefill") > 0)
    if stream:
        crowd[0].read_until(b"data: ")
    with _frozen_workers(cluster):  # what they compute before the router knows says nothing
        for client in crowd:
            client.leave(reset=reset)
        cluster.wait_until(lambda state: state.requests_in_flight == 0)
    after = cluster.wait_at_rest()
    # Carried on, the talkers would take thousands of steps on each decode worker, the readers more than a hundred
    # chunks on the prefill worker.
    assert _steps(after, "decode") - _steps(before, "decode") < 2000
    assert _steps(after, "prefill") - _steps(before, "prefill") < 60
    answer = httpx.post(f"{cluster.base_url}/v1/completions", json=_body([7, 8, 9], 2), timeout=30)
    assert answer.status_code == 200


def _generate(prompt: list[int], max_tokens: int = 400) -> public_pb2.GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return public_pb2.GenerateRequest(model=MODEL, tokens=public_pb2.TokenIds(ids=prompt), sampling=sampling)


def test_calls_cancelled_over_grpc_at_random_moments_leave_nothing(cluster: LiveCluster) -> None:
    pids = {worker.pid for worker in cluster.state().workers}
    outcomes = asyncio.run(_cancel_storm(cluster))
    cluster.wait_at_rest()
    assert {worker.pid for worker in cluster.state().workers} == pids
    assert outcomes.count("cancelled") > 100, outcomes
    assert set(outcomes) <= {"cancelled", "finished"}


async def _cancel_storm(cluster: LiveCluster) -> list[str]:
    gate = asyncio.Semaphore(24)
    async with grpc.aio.insecure_channel(cluster.grpc) as channel:
        stub = public_pb2_grpc.KvferryStub(channel)

        async def one(rng: random.Random) -> str:
            async with gate:
                call = stub.Generate(_generate(_ids(rng, rng.choice((1, 40, 300))), rng.choice((2, 3500))))
                leaving = asyncio.get_running_loop().call_later(rng.choice((0.0, 0.01, 0.05, 0.2)), call.cancel)
                try:
                    return "finished" if [part async for part in call][-1].HasField("finish") else "cut"
                except asyncio.CancelledError:
                    return "cancelled"
                finally:
                    leaving.cancel()

        return await asyncio.gather(*(one(random.Random(number)) for number in range(200)))


def test_workers_busy_with_long_prompts_stay_in_and_are_not_called_ill(cluster: LiveCluster) -> None:
    rng = random.Random()
    readers: list[RawClient] = []

    def busy_with_two(state: ClusterState) -> bool:
        """Whether it is seen at work. There are two to work on until then, however fast it is."""
        for _ in range(state.requests_in_flight, 2):
            readers.append(RawClient(cluster.http, timeout_s=60))
            readers[-1].post("/v1/completions", _body(_ids(rng, CONTEXT - 1), 1))
        return _running(state, "prefill") > 0

    busy = cluster.wait_until(busy_with_two)
    states, silences = set(), []
    while busy.requests_in_flight:
        states |= {worker.state for worker in busy.workers}
        silences += [worker.report_age_ms for worker in busy.workers]
        assert len(busy.workers) == 3
        assert httpx.get(f"{cluster.base_url}/ready", timeout=30).status_code == 200
        busy = cluster.state()
    assert states == {"ready"}
    assert max(silences) < 5000
    assert [client.status() for client in readers] == [200] * len(readers)
    for client in readers:
        client.leave()

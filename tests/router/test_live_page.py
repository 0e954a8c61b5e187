"""The data of the live page: who sees what, what is counted, and who may watch."""

import asyncio
import json
from dataclasses import fields
from typing import Any

import pytest

from kvferry_rpc.common_pb2 import ErrorCode, KVReceipt, SamplingParams
from kvferry_rpc.internal_pb2 import LoadReport, Role
from router.generation import GenerationRequest
from router.observation.live_page import MAX_WATCHERS, LivePage
from router.observation.live_requests import LiveRequest, LiveRequests, Progress
from router.policy import Plan
from router.tenants import Tenant
from router.workers.worker_registry import WorkerRegistry
from runtime.clock import ManualClock
from runtime.errors import KvferryError
from tests.support.registry_parts import attach

NOBODY, RED, BLUE = Tenant("", b""), Tenant("red", b""), Tenant("blue", b"")
ADMIN = Tenant("ops", b"", admin=True)
_PROGRESS = [field.name for field in fields(Progress)]


class Attempt:
    """An attempt whose progress the test sets."""

    def __init__(self) -> None:
        self.placed_at: float | None = None
        self.sampled_at: float | None = None
        self.decoding_at: float | None = None

    def progress(self) -> list[Progress]:
        known = {"attempt": 1, "plan": Plan("decode-0", "prefill-0", ""), "was_taken": True}
        times = {"placed_at": self.placed_at, "sampled_at": self.sampled_at, "decoding_at": self.decoding_at}
        return [Progress(**{**dict.fromkeys(_PROGRESS, False), **known, **times})]


class World:
    """A page over an empty cluster, with a clock that the test moves."""

    def __init__(self) -> None:
        self.clock = ManualClock(100.0)
        self.registry = WorkerRegistry(self.clock)
        self.requests = LiveRequests(self.clock, dict, model="tiny")
        self.page = LivePage(self.registry, self.requests, self.clock, "router-1")

    def request(self, request_id: str, tenant: str = "", output: list[int] | None = None) -> Any:
        request = GenerationRequest(request_id, (1, 2, 3), SamplingParams(max_tokens=9), 1e9, tenant=tenant)
        return self.requests.request(request, self.clock.now(), output if output is not None else [])

    def look(self, tenant: Tenant = NOBODY, after_s: float = 0.0) -> dict[str, Any]:
        """What the next tick shows."""
        self.clock.advance(after_s)
        self.page.tick()
        state: dict[str, Any] = json.loads(self.page.state(tenant))
        return state


def ids(state: dict[str, Any]) -> list[str]:
    return [request["id"] for request in state["requests"]]


def test_a_worker_shows_its_pool_and_its_work() -> None:
    world = World()
    worker = attach(world.registry, "d0", num_blocks=64)
    load = LoadReport(blocks_free=40, blocks_cached=14, blocks_used=8, blocks_quarantined=2, sequences_running=3)
    world.registry.report(worker, load)
    attach(world.registry, "p0", Role.PREFILL)
    prefill, decode = world.look()["workers"]
    assert (prefill["id"], prefill["role"], prefill["state"]) == ("p0", "prefill", "ready")
    assert decode["blocks"] == {"total": 64, "free": 40, "cached": 14, "used": 8, "quarantined": 2}
    assert (decode["running"], decode["gone_s"]) == (3, None)


def test_a_worker_that_is_lost_stays_in_sight_for_a_minute_and_one_that_drained_is_not_called_lost() -> None:
    world = World()
    lost, left = attach(world.registry, "d0"), attach(world.registry, "d1")
    world.registry.drain(left)
    world.registry.detach(lost)
    world.registry.detach(left)
    seen = {worker["id"]: (worker["state"], worker["gone_s"]) for worker in world.look(after_s=4.0)["workers"]}
    assert seen == {"d0": ("lost", 4.0), "d1": ("left", 4.0)}
    assert world.look(after_s=60.0)["workers"] == []


def test_a_worker_that_is_back_says_that_it_was_lost() -> None:
    world = World()
    world.registry.detach(attach(world.registry, "d0"))
    world.clock.advance(2.0)
    attach(world.registry, "d0")
    (worker,) = world.look(after_s=1.0)["workers"]
    assert (worker["state"], worker["gone_s"]) == ("ready", 3.0)


def test_bytes_that_decode_workers_receive_are_counted_once_whatever_they_had_before() -> None:
    world = World()
    decode, prefill = attach(world.registry, "d0"), attach(world.registry, "p0", Role.PREFILL)
    world.registry.report(decode, LoadReport(bytes_moved=5000))
    world.look()
    world.registry.report(decode, LoadReport(bytes_moved=5700))
    world.registry.report(prefill, LoadReport(bytes_moved=700))
    world.look(after_s=1.0)
    world.registry.detach(decode)
    again = attach(world.registry, "d0")
    world.look(after_s=1.0)
    world.registry.report(again, LoadReport(bytes_moved=30))
    world.look(after_s=1.0)
    assert world.look(after_s=1.0)["bytes_per_second"][-4:] == [0, 700, 0, 30]


def test_first_tokens_count_when_they_come_and_times_per_token_also_behind_the_end() -> None:
    world = World()
    output: list[int] = []
    live: LiveRequest
    with world.request("r1", output=output) as live:
        live.begun(attempt := Attempt())
        attempt.placed_at = 100.5
        assert world.look(after_s=1.0)["ttft"] == {"p50_ms": None, "p99_ms": None, "count": 0}
        attempt.sampled_at = 102.0
        output.append(7)
        state = world.look(after_s=1.0)
        assert (state["ttft"]["p50_ms"], state["ttft"]["count"], state["tpot"]["count"]) == (2000, 1, 0)
        attempt.decoding_at = 102.1
        output.extend((8, 9))
        assert world.look(after_s=1.0)["tpot"]["p50_ms"] == 500
    state = world.look(after_s=9.0)
    assert (state["ttft"]["p99_ms"], state["ttft"]["count"]) == (2000, 1)
    assert (state["tpot"]["p50_ms"], state["tpot"]["count"]) == (500, 1)
    assert world.look(after_s=60.0)["tpot"]["count"] == 0


def test_a_request_shows_its_phases_and_stays_for_a_minute_behind_its_end() -> None:
    world = World()
    with world.request("r1") as live:
        live.begun(attempt := Attempt())
        attempt.placed_at, attempt.sampled_at, attempt.decoding_at = 100.5, 101.0, 101.25
        world.clock.advance(2.0)
        live.left_receipt(KVReceipt(bytes_sent=77), 2)
    (request,) = world.look()["requests"]
    assert request["phases"] == [
        ["queued", 100.0, ""],
        ["prefill", 100.5, "prefill-0"],
        ["transfer", 101.0, "decode-0"],
        ["decode", 101.25, "decode-0"],
        ["finished", 102.0, ""],
    ]
    assert (request["bytes_sent"], request["cached_tokens"]) == (77, 2)
    assert world.look(after_s=60.0)["requests"] == []


def test_a_tenant_sees_its_own_requests_and_the_figures_of_all() -> None:
    world = World()
    with world.request("r1", "red"), world.request("r2", "blue"):
        assert ids(world.look(RED)) == ["r1"]
        assert ids(world.look(BLUE)) == ["r2"]
        assert ids(world.look(ADMIN)) == ids(world.look(NOBODY)) == ["r1", "r2"]
        assert (world.look(RED)["in_flight"], world.look(RED)["queued"]) == (2, 2)


async def test_watchers_get_one_state_for_each_tick_and_miss_some_when_they_are_slow() -> None:
    world = World()
    attach(world.registry, "d0")
    watching = world.page.states(NOBODY)
    assert json.loads(await anext(watching))["now"] == 100.0
    for _ in range(3):
        world.look(after_s=1.0)
    assert json.loads(await anext(watching))["now"] == 103.0
    waiting = asyncio.ensure_future(anext(watching))
    await asyncio.sleep(0)
    assert not waiting.done()
    await world.page.close()
    with pytest.raises(StopAsyncIteration):
        await waiting


async def test_what_is_made_in_a_tick_is_made_once_for_all() -> None:
    world = World()
    assert world.page.state(NOBODY) is world.page.state(Tenant("", b""))


async def test_so_many_may_watch_and_nobody_behind_the_end() -> None:
    world = World()
    watching = [world.page.states(NOBODY) for _ in range(MAX_WATCHERS)]
    for states in watching:
        await anext(states)
    with pytest.raises(KvferryError) as caught:
        await anext(world.page.states(NOBODY))
    assert caught.value.code == ErrorCode.OVERLOADED
    await watching[0].aclose()
    await anext(late := world.page.states(NOBODY))
    await world.page.close()
    with pytest.raises(StopAsyncIteration):
        await anext(late)
    with pytest.raises(KvferryError) as caught:
        await anext(world.page.states(NOBODY))
    assert caught.value.code == ErrorCode.UNAVAILABLE
    for states in watching:
        await states.aclose()
    assert world.page.watchers == 0

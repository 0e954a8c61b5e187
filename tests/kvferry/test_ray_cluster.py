"""The Ray launcher on a Ray that is a fake, with stand-ins for the router and the workers as real processes."""

import asyncio
import os
import signal
import stat
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvferry.cluster_spec import ClusterSpec, RoleCommands
from kvferry.launchers.launcher import ROUTER, ClusterEvent
from kvferry.launchers.ray_cluster import RayCluster
from kvferry.launchers.ray_node import NodeFacts, ProcessOrder
from kvferry.launchers.ray_shapes import RayOptions, ResourcesError, WorkerShape
from kvferry.run_dir import live_state, process_start_ticks
from runtime.child_process import LaunchError
from tests.support.fake_ray import FakeRay

FAKE = str(Path(__file__).parents[1] / "support" / "fake_process.py")
SECRET = b"a secret of the cluster"


class Watched:
    """A cluster on a fake Ray, and what it told."""

    def __init__(self, root: Path, *, router: str = "good", decode: str = "good", prefill: str = "good", **spec: Any):
        self.root = root / "state"
        self.ray = FakeRay()
        self.events: list[ClusterEvent] = []
        self._told = asyncio.Event()
        shapes = {name: spec.pop(name) for name in ("decode_shape",) if name in spec}
        roles = (("router", router), ("prefill", prefill), ("decode", decode))
        values = {"start_timeout_s": 60.0, "drain_timeout_s": 30.0, **spec}
        self.order = ProcessOrder(
            options=RayOptions(cluster="main", decode=shapes.get("decode_shape", WorkerShape())),
            run_id="run-1",
            name=ROUTER,
            group="",
            spec=ClusterSpec(model_dir=root, served_model_name="fake", **values),
            secret=SECRET,
            root=self.root,
            routers="",
            model_source="fake",
            cache_dir=root,
            commands=RoleCommands(*((sys.executable, FAKE, *pair) for pair in roles)),
        )
        self.cluster = RayCluster(self.ray, self.order, self.take)

    def take(self, event: ClusterEvent) -> None:
        self.events.append(event)
        self._told.set()

    def kinds(self, name: str) -> list[str]:
        return [event.kind for event in self.events if event.name == name]

    def flags(self, name: str) -> list[str]:
        """What its process was started with, last."""
        ready = [event for event in self.events if event.name == name and event.kind == "ready"]
        return list(ready[-1].details["flags"])

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(40):
            while not condition():
                self._told.clear()
                await self._told.wait()


@asynccontextmanager
async def watched(root: Path, **values: Any) -> AsyncIterator[Watched]:
    fixture = Watched(root, **values)
    try:
        yield fixture
    finally:
        await fixture.cluster.kill()
        assert (fixture.ray.actors, fixture.ray.groups_held) == ({}, {})


def _alive(pids: dict[str, int]) -> list[str]:
    return sorted(name for name, pid in pids.items() if process_start_ticks(pid) is not None)


async def test_it_places_all_starts_the_router_then_workers_that_dial_it_and_stops_without_a_trace(
    tmp_path: Path,
) -> None:
    async with watched(tmp_path, num_decode=2) as fixture:
        cluster, ray = fixture.cluster, fixture.ray
        await cluster.start()
        assert [event.kind for event in fixture.events[:2]] == ["placed", "ready"]
        assert fixture.events[1].name == ROUTER
        assert fixture.events[-1].kind == "up"
        assert sorted(ray.groups_held) == ["main/decode-0", "main/decode-1", "main/prefill-0"]
        (internal,) = cluster.internal_addresses
        for name in ("prefill-0", "decode-0", "decode-1"):
            assert {f"--routers={internal}", "--host=127.0.0.1"} <= set(fixture.flags(name))
            secret = fixture.root / name / "secret"
            assert f"--cluster-secret-file={secret}" in fixture.flags(name)
            assert secret.read_bytes() == SECRET
            assert stat.S_IMODE(secret.stat().st_mode) == 0o600
        state = live_state(fixture.root)
        assert state is not None
        assert state["grpc_address"] == cluster.grpc_address
        assert state["internal_addresses"] == [internal]
        pids = cluster.pids
        assert _alive(pids) == ["decode-0", "decode-1", "prefill-0", "router"]
        assert await cluster.stop()
        assert _alive(pids) == []
        assert (ray.actors, ray.groups_held) == ({}, {})
        assert live_state(fixture.root) is None
        assert not list(fixture.root.glob("*/secret"))


async def test_without_room_it_says_what_was_asked_and_what_there_is_and_leaves_nothing(tmp_path: Path) -> None:
    async with watched(tmp_path, decode_shape=WorkerShape(gpus=1)) as fixture:
        with pytest.raises(ResourcesError, match=r"decode-0: CPU 1, GPU 1\. There is node 127\.0\.0\.1: CPU 8;"):
            await fixture.cluster.start()
        assert (fixture.ray.actors, fixture.ray.groups_held) == ({}, {})


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"router": "dies-at-start"}, "router exited with status 3"),
        ({"decode": "dies-at-start"}, "decode-0 exited with status 3.*\n    no memory for the pool"),
        ({"prefill": "hangs", "start_timeout_s": 3.0}, "was not ready after"),
    ],
)
async def test_a_start_that_fails_says_why_and_leaves_nothing(
    tmp_path: Path, values: dict[str, Any], said: str
) -> None:
    async with watched(tmp_path, **values) as fixture:
        with pytest.raises(LaunchError, match=said):
            await fixture.cluster.start()
        assert (fixture.ray.actors, fixture.ray.groups_held) == ({}, {})
        assert not list(fixture.root.glob("*/secret"))


async def test_a_name_that_is_taken_is_refused_and_the_cluster_of_that_name_lives(tmp_path: Path) -> None:
    async with watched(tmp_path) as fixture:
        await fixture.cluster.start()
        with pytest.raises(LaunchError, match="named 'main' is in this Ray cluster already"):
            await RayCluster(fixture.ray, fixture.order, fixture.take).start()
        assert len(_alive(fixture.cluster.pids)) == 3


async def test_a_process_that_dies_is_started_again_by_its_actor(tmp_path: Path) -> None:
    async with watched(tmp_path) as fixture:
        await fixture.cluster.start()
        before = fixture.cluster.pids["decode-0"]
        os.kill(before, signal.SIGKILL)
        await fixture.until(lambda: fixture.kinds("decode-0") == ["ready", "died", "restarting", "ready"])
        (worker,) = (worker for worker in fixture.cluster.workers() if worker.name == "decode-0")
        assert worker.running
        assert worker.pid not in (0, before)
        facts = (await fixture.cluster.facts())["decode-0"]
        assert isinstance(facts, NodeFacts)
        assert (facts.starts, facts.group, facts.pid) == (2, "main/decode-0", worker.pid)


async def test_a_worker_keeps_its_role_over_the_lives_of_its_actor_and_not_beyond(tmp_path: Path) -> None:
    async with watched(tmp_path) as fixture:
        await fixture.cluster.start()
        role_path = fixture.root / "decode-0" / "role"
        assert f"--role-file={role_path}" in fixture.flags("decode-0")
        role_path.write_text("prefill\n")  # as the worker does when a router gives it the other role
        actor = fixture.ray.actors["main/decode-0"]
        await actor.die()
        actor.begin_new_life()
        await fixture.until(lambda: fixture.kinds("decode-0").count("ready") == 2)
        later = await RayCluster.attach(fixture.ray, "main", fixture.take)
        assert {worker.name: worker.role for worker in later.workers()}["decode-0"] == "prefill"
        assert await later.remove("decode-0")
        assert not role_path.exists()
        await later.leave()


async def test_a_router_whose_actor_died_comes_back_on_its_ports_behind_the_old_process(tmp_path: Path) -> None:
    async with watched(tmp_path) as fixture:
        await fixture.cluster.start()
        actor, old = fixture.ray.actors["main/router"], fixture.cluster.pids[ROUTER]
        ports = (await actor.facts()).ports
        await actor.die()
        await fixture.until(lambda: fixture.kinds(ROUTER)[-1] == "died")
        actor.begin_new_life()
        await fixture.until(lambda: fixture.kinds(ROUTER)[-1] == "ready")
        assert process_start_ticks(old) is None
        asked = {f"--{name.replace('_', '-')}={port}" for name, port in ports.items()}
        assert asked <= set(fixture.flags(ROUTER))
        assert not fixture.cluster.router_lost.is_set()


async def test_a_process_of_the_life_before_that_does_not_end_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry.launchers.ray_node.ORPHAN_GRACE_S", -1.0)
    async with watched(tmp_path, decode="ignores-sigterm") as fixture:
        await fixture.cluster.start()
        actor, old = fixture.ray.actors["main/decode-0"], fixture.cluster.pids["decode-0"]
        await actor.die()
        actor.begin_new_life()
        await fixture.until(lambda: fixture.kinds("decode-0").count("ready") == 2)
        assert process_start_ticks(old) is None


async def test_a_later_life_whose_process_does_not_start_tries_again(tmp_path: Path) -> None:
    async with watched(tmp_path, decode="fails-second-start") as fixture:
        await fixture.cluster.start()
        actor = fixture.ray.actors["main/decode-0"]
        await actor.die()
        actor.begin_new_life()
        await fixture.until(lambda: ClusterEvent("restarting", "decode-0", "in 0.5 s") in fixture.events)
        assert any("no memory" in event.text for event in fixture.events if event.kind == "died")
        (fixture.root / "decode-0" / "started-decode").unlink()
        await fixture.until(lambda: fixture.kinds("decode-0").count("ready") == 2)


async def test_whoever_attaches_later_adds_removes_and_stops(tmp_path: Path) -> None:
    async with watched(tmp_path) as fixture:
        await fixture.cluster.start()
        await fixture.cluster.leave()
        other = await RayCluster.attach(fixture.ray, "main", fixture.take)
        assert other.grpc_address == fixture.cluster.grpc_address
        assert other.secret == SECRET
        assert [worker.name for worker in other.workers()] == ["prefill-0", "decode-0"]
        assert await other.add("decode") == "decode-1"
        await fixture.until(lambda: fixture.kinds("decode-1") == ["ready"])
        assert f"--routers={other.internal_addresses[0]}" in fixture.flags("decode-1")
        pids = other.pids
        assert await other.remove("decode-0")
        assert _alive(pids) == ["decode-1", "prefill-0", "router"]
        assert sorted(fixture.ray.groups_held) == ["main/decode-1", "main/prefill-0"]
        assert await other.add("decode") == "decode-0"
        with pytest.raises(KeyError):
            await other.remove(ROUTER)
        assert await other.stop()
        with pytest.raises(LaunchError, match="no kvferry cluster named 'main'"):
            await RayCluster.attach(fixture.ray, "main", fixture.take)


async def test_who_watches_is_told_what_another_command_has_stopped(tmp_path: Path) -> None:
    async with watched(tmp_path) as fixture:
        await fixture.cluster.start()
        other = await RayCluster.attach(fixture.ray, "main", lambda event: None)
        assert await other.remove("decode-0")
        await fixture.until(lambda: fixture.kinds("decode-0") == ["ready", "stopped"])
        assert [worker.name for worker in fixture.cluster.workers()] == ["prefill-0"]
        assert await other.stop()
        async with asyncio.timeout(20):
            await fixture.cluster.router_lost.wait()
        assert await fixture.cluster.stop()
        assert "killed" not in [event.kind for event in fixture.events]


async def test_a_worker_that_cannot_be_added_gives_its_room_back(tmp_path: Path) -> None:
    async with watched(tmp_path, decode="fails-second-start", prefill="fails-second-start") as fixture:
        await fixture.cluster.start()
        (fixture.root / "decode-1").mkdir()
        (fixture.root / "decode-1" / "started-decode").touch()
        with pytest.raises(LaunchError, match="decode-1 exited with status 3"):
            await fixture.cluster.add("decode")
        assert sorted(fixture.ray.groups_held) == ["main/decode-0", "main/prefill-0"]
        assert [worker.name for worker in fixture.cluster.workers()] == ["prefill-0", "decode-0"]
        fixture.ray.cpus = 2.0
        with pytest.raises(ResourcesError, match=r"unused in all: CPU 0\."):
            await fixture.cluster.add("decode")


async def test_a_pool_that_lies_together_gives_its_group_back_with_its_last_worker(tmp_path: Path) -> None:
    shape = WorkerShape(place="pack")
    async with watched(tmp_path, num_prefill=0, num_decode=2, decode_shape=shape) as fixture:
        await fixture.cluster.start()
        await fixture.cluster.remove("decode-0")
        assert list(fixture.ray.groups_held) == ["main/decode-0+1"]
        await fixture.cluster.add("decode")
        await fixture.cluster.remove("decode-1")
        assert list(fixture.ray.groups_held) == ["main/decode-0+0"]


async def test_stop_ends_what_answers_and_frees_what_does_not(tmp_path: Path) -> None:
    async with watched(tmp_path) as fixture:
        await fixture.cluster.start()
        fixture.ray.actors["main/decode-0"].gone = True
        assert not await fixture.cluster.stop()
        assert "killed" in fixture.kinds("decode-0")
        assert (fixture.ray.actors, fixture.ray.groups_held) == ({}, {})


async def test_a_router_actor_that_is_gone_for_good_is_the_end(tmp_path: Path) -> None:
    async with watched(tmp_path) as fixture:
        await fixture.cluster.start()
        actor = fixture.ray.actors["main/router"]
        actor.gone = True
        actor.away.set()
        async with asyncio.timeout(20):
            await fixture.cluster.router_lost.wait()


async def test_events_of_a_life_are_told_once_and_the_next_life_begins_anew(tmp_path: Path) -> None:
    async with watched(tmp_path) as fixture:
        await fixture.cluster.start()
        node = fixture.ray.actors["main/decode-0"].node
        life, events = await node.events("", 0, 0.0)
        assert [number for number, _ in events] == [1]
        assert await node.events(life, 1, 0.0) == (life, [])
        assert await node.events("an earlier life", 7, 0.0) == (life, events)

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvferry.cluster_spec import ClusterSpec, RoleCommands
from kvferry.launchers.launcher import ClusterEvent
from kvferry.launchers.local import LocalCluster
from kvferry.run_dir import RunDir, live_state, process_start_ticks
from runtime.child_process import LaunchError

FAKE = str(Path(__file__).parents[1] / "support" / "fake_process.py")


class Watched:
    """A cluster of fakes, and what it told."""

    def __init__(self, root: Path, router: str = "good", prefill: str = "good", decode: str = "good", **spec: Any):
        roles = (("router", router), ("prefill", prefill), ("decode", decode))
        commands = RoleCommands(*((sys.executable, FAKE, role, behaviour) for role, behaviour in roles))
        self.run_dir = RunDir.create(root / "run")
        self.events: list[ClusterEvent] = []
        self._told = asyncio.Event()
        values = {"start_timeout_s": 60.0, "drain_timeout_s": 30.0, **spec}
        self.cluster = LocalCluster(
            ClusterSpec(model_dir=root, served_model_name="fake", commands=commands, **values),
            self.run_dir,
            self._take,
        )

    def _take(self, event: ClusterEvent) -> None:
        self.events.append(event)
        self._told.set()

    def kinds(self, name: str) -> list[str]:
        return [event.kind for event in self.events if event.name == name]

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


def _alive(pids: dict[str, int]) -> list[str]:
    return [name for name, pid in pids.items() if process_start_ticks(pid) is not None]


async def test_router_first_then_workers_then_up_then_a_clean_stop(tmp_path: Path) -> None:
    async with watched(tmp_path, num_prefill=2) as fixture:
        cluster = fixture.cluster
        await cluster.start()
        assert fixture.events[0].name == "router"
        assert {event.name for event in fixture.events[1:4]} == {"prefill-0", "prefill-1", "decode-0"}
        assert fixture.events[4].kind == "up"
        state = live_state(fixture.run_dir.path)
        assert state is not None
        assert state["grpc_address"] == cluster.grpc_address
        assert {process["name"]: process["pid"] for process in state["processes"]} == cluster.pids
        pids = cluster.pids
        assert sorted(_alive(pids)) == ["decode-0", "prefill-0", "prefill-1", "router"]
        assert await cluster.stop()
        assert _alive(pids) == []
        assert live_state(fixture.run_dir.path) is None
        assert not fixture.run_dir.secret_path.exists()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"router": "dies-at-start"}, "router exited with status 3"),
        ({"decode": "dies-at-start"}, "decode-0 exited with status 3"),
        ({"prefill": "hangs", "start_timeout_s": 3.0}, "was not ready after"),
        ({"prefill": "dies-when-ready", "router": "never-serves"}, "prefill-0 exited with status 4"),
        ({"router": "never-serves", "start_timeout_s": 6.0}, "503 no decode worker yet"),
    ],
)
async def test_a_start_that_fails_says_why_and_leaves_nothing(
    tmp_path: Path, values: dict[str, Any], said: str
) -> None:
    async with watched(tmp_path, **values) as fixture:
        with pytest.raises(LaunchError, match=said):
            await fixture.cluster.start()
        assert _alive(fixture.cluster.pids) == []
        assert not fixture.run_dir.secret_path.exists()


async def test_a_cancelled_start_leaves_nothing(tmp_path: Path) -> None:
    async with watched(tmp_path, decode="hangs") as fixture:
        starting = asyncio.create_task(fixture.cluster.start())
        await fixture.until(lambda: "ready" in fixture.kinds("prefill-0"))
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        assert starting.cancelled()
        assert _alive(fixture.cluster.pids) == []


async def test_a_worker_that_dies_is_reported_and_started_again(tmp_path: Path) -> None:
    async with watched(tmp_path) as fixture:
        await fixture.cluster.start()
        before = fixture.cluster.pids["decode-0"]
        os.kill(before, signal.SIGKILL)
        await fixture.until(lambda: fixture.kinds("decode-0") == ["ready", "died", "restarting", "ready"])
        died = next(event for event in fixture.events if event.kind == "died")
        assert died.text == "was ended by SIGKILL"
        after = fixture.cluster.pids["decode-0"]
        assert after != before
        assert _pid_in_state(fixture, "decode-0") == after
        assert await fixture.cluster.stop()
        assert _alive({"decode-0": after}) == []


async def test_a_restart_that_fails_is_tried_again(tmp_path: Path) -> None:
    async with watched(tmp_path, decode="fails-second-start") as fixture:
        await fixture.cluster.start()
        os.kill(fixture.cluster.pids["decode-0"], signal.SIGKILL)
        await fixture.until(lambda: fixture.kinds("decode-0").count("restarting") == 2)
        assert fixture.kinds("decode-0") == ["ready", "died", "restarting", "died", "restarting"]
        waits = [event.text for event in fixture.events if event.kind == "restarting"]
        assert waits == ["in 0.5 s", "in 1 s"]
        assert await fixture.cluster.stop()


async def test_a_router_that_comes_back_gets_the_same_ports(tmp_path: Path) -> None:
    async with watched(tmp_path) as fixture:
        await fixture.cluster.start()
        first = next(event for event in fixture.events if event.name == "router").details
        os.kill(fixture.cluster.pids["router"], signal.SIGKILL)
        await fixture.until(lambda: fixture.kinds("router") == ["ready", "died", "restarting", "ready"])
        again = [event for event in fixture.events if event.name == "router"][-1].details
        for name in ("http_port", "grpc_port", "internal_port"):
            assert f"--{name.replace('_', '-')}={first[name]}" in again["flags"]
        assert not fixture.cluster.router_lost.is_set()


async def test_without_restart_a_dead_worker_stays_dead_and_a_dead_router_is_the_end(tmp_path: Path) -> None:
    async with watched(tmp_path, restart=False) as fixture:
        await fixture.cluster.start()
        os.kill(fixture.cluster.pids["decode-0"], signal.SIGKILL)
        await fixture.until(lambda: fixture.kinds("decode-0") == ["ready", "died"])
        assert not fixture.cluster.router_lost.is_set()
        os.kill(fixture.cluster.pids["router"], signal.SIGKILL)
        async with asyncio.timeout(20):
            await fixture.cluster.router_lost.wait()
        assert await fixture.cluster.stop()


async def test_workers_are_added_and_removed_one_by_one_and_names_are_used_again(tmp_path: Path) -> None:
    async with watched(tmp_path, num_prefill=0) as fixture:
        cluster = fixture.cluster
        await cluster.start()
        assert await cluster.add("decode") == "decode-1"
        assert await cluster.add("prefill") == "prefill-0"
        assert _pid_in_state(fixture, "decode-1") == cluster.pids["decode-1"]
        os.kill(cluster.pids["decode-1"], signal.SIGKILL)
        await fixture.until(lambda: fixture.kinds("decode-1") == ["ready", "died", "restarting", "ready"])
        gone = cluster.pids["decode-0"]
        assert await cluster.remove("decode-0")
        assert _alive({"decode-0": gone}) == []
        assert _pid_in_state(fixture, "decode-0") == 0
        assert [worker.name for worker in cluster.workers()] == ["decode-1", "prefill-0"]
        assert await cluster.add("decode") == "decode-0"
        for name in ("router", "decode-7"):
            with pytest.raises(KeyError):
                await cluster.remove(name)
        assert await cluster.stop()


async def test_a_worker_keeps_its_role_over_restarts_but_not_for_the_next_one_of_its_name(tmp_path: Path) -> None:
    async with watched(tmp_path, num_decode=2) as fixture:
        cluster = fixture.cluster
        await cluster.start()
        (flags,) = [event.details["flags"] for event in fixture.events if event.name == "decode-1"]
        role_path = fixture.run_dir.role_path("decode-1")
        assert f"--role-file={role_path}" in flags
        role_path.write_text("prefill\n")  # as the worker does when a router gives it the other role
        assert [worker.role for worker in cluster.workers() if worker.name == "decode-1"] == ["prefill"]
        assert await cluster.remove("decode-1")
        assert await cluster.add("decode") == "decode-1"
        assert [worker.role for worker in cluster.workers() if worker.name == "decode-1"] == ["decode"]
    assert not RunDir.create(tmp_path / "run").role_path("decode-1").exists()


async def test_a_worker_that_cannot_be_added_leaves_nothing_and_the_others_run(tmp_path: Path) -> None:
    async with watched(tmp_path, decode="fails-second-start") as fixture:
        await fixture.cluster.start()
        with pytest.raises(LaunchError, match="decode-1 exited with status 3"):
            await fixture.cluster.add("decode")
        assert [worker.name for worker in fixture.cluster.workers()] == ["prefill-0", "decode-0"]
        assert sorted(_alive(fixture.cluster.pids)) == ["decode-0", "prefill-0", "router"]


async def test_a_stop_while_a_restart_is_due_starts_nothing(tmp_path: Path) -> None:
    async with watched(tmp_path) as fixture:
        await fixture.cluster.start()
        os.kill(fixture.cluster.pids["decode-0"], signal.SIGKILL)
        await fixture.until(lambda: fixture.kinds("decode-0")[-1] == "restarting")
        assert await fixture.cluster.stop()
        assert fixture.kinds("decode-0")[-1] == "restarting"
        assert _alive(fixture.cluster.pids) == []


async def test_who_ignores_sigterm_is_killed_by_pid_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Enough for the one that does not ignore it.
    monkeypatch.setattr("kvferry.launchers.local._WORKER_EXIT_GRACE_S", 3.0)
    async with watched(tmp_path, prefill="ignores-sigterm") as fixture:
        await fixture.cluster.start()
        assert not await fixture.cluster.stop()
        assert "killed" in fixture.kinds("prefill-0")
        assert "killed" not in fixture.kinds("decode-0")
        assert _alive(fixture.cluster.pids) == []


def _pid_in_state(fixture: Watched, name: str) -> int:
    state = live_state(fixture.run_dir.path) or {"processes": []}
    return next((int(process["pid"]) for process in state["processes"] if process["name"] == name), 0)

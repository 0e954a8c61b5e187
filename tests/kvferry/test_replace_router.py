"""The launcher replaces its router: the next one is up before the one there is leaves, and workers find both."""

import signal
import socket
from pathlib import Path

import pytest

from kvferry.launchers.launcher import ROUTER
from kvferry.run_dir import live_state, process_start_ticks
from runtime.child_process import LaunchError
from runtime.ports import port_of
from runtime.process import SUCCESSOR_SIGNAL
from tests.kvferry.test_launcher import watched


async def test_the_router_before_ends_when_the_next_one_is_up(tmp_path: Path) -> None:
    async with watched(tmp_path) as fixture:
        cluster = fixture.cluster
        await cluster.start()
        before, lost = dict(cluster.pids), cluster.router_lost
        first = fixture.run_dir.routers_path.read_text()
        await cluster.replace_router()
        after = cluster.pids
        assert after[ROUTER] != before[ROUTER]
        assert {name: after[name] for name in ("prefill-0", "decode-0")} == {
            name: before[name] for name in ("prefill-0", "decode-0")
        }
        assert process_start_ticks(before[ROUTER]) is None
        assert process_start_ticks(after[ROUTER]) is not None
        # Only the new one, by its own port; whoever watches for the loss of the router watches this one now.
        assert fixture.run_dir.routers_path.read_text() not in ("", first)
        assert cluster.router_lost is lost
        state = live_state(fixture.run_dir.path)
        assert state is not None
        assert state["internal_addresses"] == list(cluster.internal_addresses)
        assert fixture.kinds(ROUTER) == ["ready", "ready"]
        assert await cluster.stop()


async def test_where_the_next_one_does_not_come_up_the_one_there_is_stays(tmp_path: Path) -> None:
    async with watched(tmp_path, router="fails-second-start") as fixture:
        await fixture.cluster.start()
        before = dict(fixture.cluster.pids)
        routers = fixture.run_dir.routers_path.read_text()
        with pytest.raises(LaunchError, match="exited with status 3"):
            await fixture.cluster.replace_router()
        assert fixture.cluster.pids == before
        assert process_start_ticks(before[ROUTER]) is not None
        assert fixture.run_dir.routers_path.read_text() == routers
        assert await fixture.cluster.stop()


async def test_ports_are_shared_with_no_other_launcher_and_given_back(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = port_of(other)
        async with watched(tmp_path, http_port=port) as fixture:
            with pytest.raises(LaunchError, match=f"--http-port {port}: cannot listen there"):
                await fixture.cluster.start()
            assert fixture.events == []
            assert fixture.cluster._held == []


def test_the_signal_is_not_one_that_a_terminal_sends() -> None:
    assert SUCCESSOR_SIGNAL not in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

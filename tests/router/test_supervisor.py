"""Several router processes behind one port: ports, starts, restarts, ends. The processes are stand-ins."""

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.config import RouterConfig
from router.supervisor import free_run, hold_port, supervise
from runtime.child_process import LaunchError
from runtime.config import parse_config
from runtime.restart_wait import RestartWait

FAKE = str(Path(__file__).parents[1] / "support" / "fake_process.py")
FLAGS = ["--model=m", "--cluster-secret-file=s", "--http-port=0", "--grpc-port=0", "--internal-port=0"]


def config(*more: str) -> RouterConfig:
    return parse_config(RouterConfig, [*FLAGS, "--router-processes=2", "--drain-timeout-s=20", *more])


def command(behaviour: str) -> tuple[str, ...]:
    return (sys.executable, FAKE, "router", behaviour)


@asynccontextmanager
async def supervised(
    capsys: pytest.CaptureFixture[str], behaviour: str = "good"
) -> AsyncIterator[tuple[dict[str, Any], asyncio.Event, "asyncio.Task[int]"]]:
    shutdown = asyncio.Event()
    running = asyncio.create_task(supervise(config(), FLAGS, shutdown, command=command(behaviour)))
    line = ""
    async with asyncio.timeout(40):
        while not line and not running.done():
            await asyncio.sleep(0.02)
            line = capsys.readouterr().out
    try:
        yield json.loads(line), shutdown, running
    finally:
        shutdown.set()
        await running


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_it_is_ready_when_all_are_and_ends_when_all_have_drained(capsys: pytest.CaptureFixture[str]) -> None:
    async with supervised(capsys) as (ready, shutdown, running):
        assert ready["role"] == "router"
        assert len(ready["processes"]) == 2
        assert all(map(is_alive, ready["processes"]))
        shutdown.set()
        assert await running == 0
        assert not any(map(is_alive, ready["processes"]))


async def test_a_process_that_ends_is_started_again_and_the_other_goes_on(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.supervisor.RestartWait", lambda: RestartWait(first_s=0.01))
    async with supervised(capfd) as (ready, _, _):
        first, second = ready["processes"]
        os.kill(first, signal.SIGKILL)
        starts = 0
        async with asyncio.timeout(40):
            while starts < 1:
                await asyncio.sleep(0.05)
                starts += capfd.readouterr().err.count("router starts")
        assert is_alive(second)


async def test_one_that_does_not_come_up_takes_the_others_down() -> None:
    with pytest.raises(LaunchError, match="exited with status 3"):
        await supervise(config(), FLAGS, asyncio.Event(), command=command("dies-at-start"))


def test_a_held_port_is_shared_with_those_who_share_and_with_nobody_else() -> None:
    with closing(hold_port("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        with socket.socket() as other:
            with pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", port))
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            other.bind(("127.0.0.1", port))
            other.listen()
            # A second set of routers must not creep in beside it.
            with pytest.raises(OSError, match="in use"):
                hold_port("127.0.0.1", port)


def test_ports_in_a_row_are_all_free() -> None:
    first = free_run("127.0.0.1", 4)
    for port in range(first, first + 4):
        with socket.socket() as one:
            one.bind(("127.0.0.1", port))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"router_processes": 0}, "--router-processes"),
        ({"router_processes": 33}, "--router-processes"),
        ({"router_processes": 2, "internal_port": 65535}, "--internal-port"),
        ({"router_processes": 2, "process_port": 65535}, "--process-port"),
    ],
)
def test_nonsense_is_refused_by_the_name_of_the_flag(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RouterConfig(model=Path("m"), cluster_secret_file=Path("s"), **values).validate()


@pytest.mark.e2e
async def test_two_real_processes_answer_at_one_port_and_each_at_its_own(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("a secret of two routers")
    model, spans, log = Path(__file__).parents[1] / "data" / "tiny-real", tmp_path / "spans", tmp_path / "log"
    with log.open("w") as errors:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "router", f"--model={model}", f"--cluster-secret-file={tmp_path / 'secret'}",
            *FLAGS[2:], "--router-processes=2", "--exit-on-stdin-close", f"--trace-file={spans}",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=errors, cwd=Path(__file__).parents[2],
        )  # fmt: skip
    asked = {"model": "tiny-real", "prompt": "x"}
    try:
        assert process.stdout is not None
        assert process.stdin is not None
        ready = json.loads(await asyncio.wait_for(process.stdout.readline(), 60))
        async with httpx.AsyncClient(timeout=15) as http:
            for port in (ready["http_port"], ready["process_port"], ready["process_port"] + 1):
                assert (await http.get(f"http://127.0.0.1:{port}/health")).status_code == 200
            for port in (ready["process_port"], ready["process_port"] + 1):
                # There is no worker.
                assert (await http.post(f"http://127.0.0.1:{port}/v1/completions", json=asked)).status_code == 503
        process.stdin.close()
        assert await asyncio.wait_for(process.wait(), 30) == 0
        assert not any(map(is_alive, ready["processes"]))
        requests = [span for span in map(json.loads, spans.read_text().splitlines()) if span["name"] == "request"]
        assert len({span["resource"]["attributes"]["service.instance.id"] for span in requests}) == len(requests) == 2
        for pid in ready["processes"]:
            assert f"router-{pid}" in log.read_text(), "a line of the log says whose it is"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()

"""A real cluster, started by the real command, for tests that talk to it from outside."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvferry.client import Client
from kvferry.client.types import ClusterState
from kvferry.run_dir import live_state, process_start_ticks
from runtime.errors import KvferryError

TINY_REAL = Path(__file__).parents[1] / "data" / "tiny-real"
REST_TIMEOUT_S = 60.0
# What Python, asyncio or gRPC write when an exception was nobody's.
_LOST_EXCEPTIONS = ("Traceback", "never retrieved", "never awaited", "was destroyed but it is pending", "ignored in")


@dataclass
class LiveCluster:
    """Addresses and processes of a running `kvferry up`."""

    launcher: "subprocess.Popen[str]"
    http: str
    grpc: str
    pids: dict[str, int]
    state_dir: Path
    events: "deque[dict[str, Any]]" = field(default_factory=deque)
    # What its own client needs besides the address: TLS, a key.
    client_options: dict[str, Any] = field(default_factory=dict)

    @property
    def base_url(self) -> str:
        return f"http://{self.http}"

    def state(self) -> ClusterState:
        with Client(self.grpc, **self.client_options) as client:
            return client.cluster_state()

    def wait_at_rest(self) -> ClusterState:
        """Wait until nothing is in flight anywhere and every block is free or cached; the state then.

        Load reports come a few times a second and offer nothing to wait on, so this looks again and again.
        """
        deadline = time.monotonic() + REST_TIMEOUT_S
        while True:
            state = self.state()
            if not resting_problems(state):
                return state
            assert time.monotonic() < deadline, f"not at rest: {resting_problems(state)}"
            time.sleep(0.1)

    def wait_until(self, condition: Callable[[ClusterState], bool]) -> ClusterState:
        """The first state that fulfils the condition. The router may be away meanwhile, and can only be asked."""
        deadline = time.monotonic() + REST_TIMEOUT_S
        while True:
            try:
                if condition(state := self.state()):
                    return state
                seen: object = state
            except KvferryError as error:
                seen = error
            assert time.monotonic() < deadline, seen
            time.sleep(0.02)

    @contextmanager
    def launcher_asleep(self) -> Iterator[None]:
        """Nothing that dies is started again before the block ends."""
        self.launcher.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.launcher.send_signal(signal.SIGCONT)

    def pid(self, name: str) -> int:
        """Its pid now: the launcher starts again what dies."""
        state = live_state(self.state_dir)
        assert state is not None, "the launcher is gone"
        return next(int(process["pid"]) for process in state["processes"] if process["name"] == name)

    def every_pid(self) -> list[tuple[str, int]]:
        """Of the first processes, and of those that there are now; a launcher that has ended has none."""
        state = live_state(self.state_dir)
        now = [] if state is None else [(process["name"], int(process["pid"])) for process in state["processes"]]
        return [*self.pids.items(), *now]

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.pid(name), number)

    def log(self, name: str) -> str:
        return (self.state_dir / "logs" / f"{name}.log").read_text()

    def lost_exceptions(self) -> dict[str, str]:
        """The logs, by process, that show an exception which nobody handled."""
        logs = {path.stem: path.read_text() for path in (self.state_dir / "logs").iterdir()}
        return {name: log for name, log in logs.items() if any(sign in log for sign in _LOST_EXCEPTIONS)}


def resting_problems(state: ClusterState) -> list[str]:
    """What is still held or under way, in words."""
    problems = [f"{state.requests_in_flight} requests in flight"] if state.requests_in_flight else []
    for worker in state.workers:
        held = worker.blocks_total - worker.blocks_free - worker.blocks_cached
        busy = worker.sequences_running + worker.sequences_waiting + worker.sequences_receiving
        if held or busy or worker.blocks_used or worker.blocks_quarantined:
            problems.append(f"{worker.worker_id}: {held} blocks held, {busy} sequences")
    return problems


def models_beside(directory: Path) -> Path:
    """Where a test with this directory has prepared models: one place for all processes that a run is spread over, so
    that each model is prepared once. Who comes second waits."""
    base = directory.parent
    return (base.parent if base.name.startswith("popen-gw") else base) / "models"


@contextmanager
def live_cluster(directory: Path, *flags: str, model: str | Path = TINY_REAL) -> Iterator[LiveCluster]:
    """Start `kvferry up` with free ports; at the end drain it, and insist that it ends well and leaves no process
    and, in no log, an exception that nobody handled."""
    state_dir = directory / "state"
    command = [sys.executable, "-m", "kvferry", "up", "--model", str(model), "--http-port", "0", "--grpc-port", "0"]
    command += ["--state-dir", str(state_dir), "--cache-dir", str(models_beside(directory)), "--json", *flags]
    errors = (directory / "up.err").open("w+")
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        cluster = _wait_serving(launcher, state_dir, errors.name)
        yield cluster
        pids = cluster.every_pid()
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(timeout=60) == 0, Path(errors.name).read_text()
        left = [name for name, pid in pids if process_start_ticks(pid) is not None]
        assert not left, f"left running: {left}"
        assert "Traceback" not in Path(errors.name).read_text()
        assert cluster.lost_exceptions() == {}
    finally:
        launcher.kill()  # its processes end when their standard input closes
        launcher.wait()
        errors.close()


def _wait_serving(launcher: "subprocess.Popen[str]", state_dir: Path, errors: str) -> LiveCluster:
    assert launcher.stdout is not None
    seen = []
    for line in launcher.stdout:
        event = json.loads(line)
        seen.append(event)
        if event.get("event") == "serving":
            cluster = LiveCluster(launcher, event["http_address"], event["grpc_address"], event["pids"], state_dir)
            threading.Thread(target=_pump, args=(launcher, cluster.events), daemon=True).start()
            return cluster
    raise AssertionError(f"`kvferry up` ended with {launcher.wait()}: {seen}\n{Path(errors).read_text()}")


def _pump(launcher: "subprocess.Popen[str]", events: "deque[dict[str, Any]]") -> None:
    assert launcher.stdout is not None
    with launcher.stdout as lines:
        for line in lines:
            events.append(json.loads(line))

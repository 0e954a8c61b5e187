"""The cluster's processes, each in its node's network, started again when they end."""

import asyncio
import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path

from runtime.child_process import ChildProcess, describe_exit
from runtime.secret import create_secret_file
from tests.chaos.load import MODEL
from tests.chaos.plan import NODES, ROUTER, WORKERS
from tests.chaos.world import ADDRESSES, World

HTTP_PORT, GRPC_PORT, INTERNAL_PORT = 8000, 8001, 8002
NUM_BLOCKS = 512
START_TIMEOUT_S = 120.0
DRAIN_TIMEOUT_S = 20.0
_RESTART_WAIT_S = 0.3
_END_GRACE_S = DRAIN_TIMEOUT_S + 15.0
# Two of the workers could share memory, as on one host; what goes to or comes from the others crosses the network.
_TRANSPORTS = {"prefill-0": "shm,tcp", "decode-0": "shm,tcp", "prefill-1": "tcp", "decode-1": "tcp"}


class Nodes:
    """Event-loop thread only."""

    def __init__(self, world: World, model: Path, directory: Path) -> None:
        """`directory`: of the cluster's secret. Logs and traces go to the world's disk."""
        self._world = world
        self._model = model
        self._directory = directory
        self._secret = directory / "secret"
        create_secret_file(self._secret)
        self._children: dict[str, ChildProcess] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._hit: set[str] = set()  # Nodes whose process has been told to end.
        self.surprises: list[str] = []  # Processes that ended although nobody told them to, or badly.

    async def start(self) -> None:
        """All of them. Raises LaunchError."""
        await self._start(ROUTER)
        await asyncio.gather(*map(self._start, WORKERS))
        self._keepers = [asyncio.create_task(self._keep(name)) for name in NODES]

    async def stop(self) -> None:
        """Drain the router, then the workers; what does not end is a surprise."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        for names in ((ROUTER,), WORKERS):
            await asyncio.gather(*map(self._stop, names))

    async def kill(self) -> None:
        """End all at once."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*(child.kill() for child in self._children.values()))

    @property
    def pids(self) -> dict[str, int]:
        """Of those that run and have said that they are ready."""
        children = self._children.items()
        return {name: child.pid for name, child in children if child.ready and child.exit_status is None}

    async def end(self, name: str, number: signal.Signals) -> None:
        """Have a node's process end by a signal, and wait until it has. It is started again."""
        child = self._children[name]
        self.signal(name, number)
        await child.wait()

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a node's process, if it has one now."""
        child = self._children[name]
        if number in (signal.SIGKILL, signal.SIGTERM):
            self._hit.add(name)
        if child.pid and child.exit_status is None:
            os.kill(child.pid, number)

    async def _start(self, name: str) -> None:
        self._hit.discard(name)
        argv = self._world.argv(name, self._command(name))
        child = ChildProcess(name, argv, self._world.disk / f"{name}.log", self._directory)
        self._children[name] = child
        await child.start(START_TIMEOUT_S)

    async def _keep(self, name: str) -> None:
        while True:
            status = await self._children[name].wait()
            if name not in self._hit or status not in (0, -signal.SIGKILL):
                self.surprises.append(f"{name} {describe_exit(status)}:\n{self._children[name].log_tail(8)}")
            await asyncio.sleep(_RESTART_WAIT_S)
            await self._start(name)

    async def _stop(self, name: str) -> None:
        child = self._children[name]
        if not await child.stop(_END_GRACE_S):
            self.surprises.append(f"{name} did not end within {_END_GRACE_S:g} s of SIGTERM")
        elif child.exit_status not in (0, None) and name not in self._hit:
            self.surprises.append(f"{name} {describe_exit(child.exit_status or 0)} when it was told to end")

    def _command(self, name: str) -> tuple[str, ...]:
        address = ADDRESSES[name]
        common = (
            f"--model={self._model}",
            f"--cluster-secret-file={self._secret}",
            f"--host={address}",
            f"--drain-timeout-s={DRAIN_TIMEOUT_S:g}",
            f"--trace-file={self._world.disk / 'spans'}",
            "--exit-on-stdin-close",
        )
        if name == ROUTER:
            ports = (f"--http-port={HTTP_PORT}", f"--grpc-port={GRPC_PORT}", f"--internal-port={INTERNAL_PORT}")
            return (sys.executable, "-m", "router", *common, *ports, f"--served-model-name={MODEL}")
        module = "prefill_worker" if name.startswith("prefill") else "decode_worker"
        own = (
            f"--worker-id={name}",
            f"--routers={ADDRESSES[ROUTER]}:{INTERNAL_PORT}",
            f"--num-blocks={NUM_BLOCKS}",
            f"--transports={_TRANSPORTS[name]}",
        )
        return (sys.executable, "-m", module, *common, *own)


def other_processes(known: Iterable[int] = ()) -> dict[int, str]:
    """What else runs in this PID namespace, by process id, with its command line. Zombies do not run."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) in (os.getpid(), *known):
            continue
        try:
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue
        if state not in ("Z", "X"):
            found[int(entry.name)] = command
    return found

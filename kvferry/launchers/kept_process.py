"""One process over all its lives: started, watched, started again after a growing wait when it dies, stopped."""

import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvferry.launchers.launcher import ClusterEvent
from runtime.child_process import ChildProcess, LaunchError, describe_exit
from runtime.restart_wait import RestartWait


class KeptProcess:
    """Event-loop thread only. The process ends with this one, however this one ends."""

    def __init__(
        self,
        name: str,
        argv: Callable[[], Sequence[str]],
        log_path: Path,
        on_event: Callable[[ClusterEvent], None],
        *,
        working_dir: Path,
        start_timeout_s: float,
    ) -> None:
        """`argv` is asked before every start."""
        self.name = name
        self.log_path = log_path
        self._argv = argv
        self._on_event = on_event
        self._working_dir = working_dir
        self._start_timeout_s = start_timeout_s
        self._child = self._new_child()
        self._keeper: asyncio.Task[None] | None = None
        self.lost = asyncio.Event()  # set when it died and is not to be started again

    @property
    def pid(self) -> int:
        """Process id of this life, or of the last one; 0 before the start."""
        return self._child.pid

    @property
    def ready(self) -> dict[str, Any]:
        """What the ready line of this life said; empty before it."""
        return self._child.ready

    @property
    def exit_status(self) -> int | None:
        """How this life ended; None while it runs."""
        return self._child.exit_status

    @property
    def running(self) -> bool:
        """Whether it lives and has said that it is ready."""
        return bool(self.ready) and self.exit_status is None

    async def start(self, timeout_s: float) -> None:
        """Start it and wait for its ready line. Raises LaunchError; no process is left then."""
        self._child = self._new_child()
        await self._child.start(timeout_s)
        self._tell("ready", describe_ready(self.pid, self.ready), {**self.ready, "pid": self.pid})

    def keep(self, *, restart: bool = True) -> None:
        """Watch it from now on, and start it again whenever it dies; without `restart` its death sets `lost`."""
        self._keeper = asyncio.create_task(self._keep(restart), name=f"keep {self.name}")

    async def stop(self, grace_s: float, number: signal.Signals = signal.SIGTERM) -> bool:
        """SIGTERM, or `number`, then SIGKILL after `grace_s`; it stays ended. Returns False when it had to be killed.
        Idempotent."""
        await self._let_go()
        clean = await self._child.stop(grace_s, number)
        if not clean:
            self._tell("killed", f"did not end within {grace_s:g} s of {number.name}")
        return clean

    async def kill(self) -> None:
        """SIGKILL; it stays ended."""
        await self._let_go()
        await self._child.kill()

    def log_tail(self, num_lines: int = 15) -> str:
        """The last lines of its log."""
        return self._child.log_tail(num_lines)

    async def _keep(self, restart: bool) -> None:
        wait = RestartWait()
        while True:
            started = time.monotonic()
            self._tell("died", describe_exit(await self._child.wait()))
            if not restart:
                break
            lived_s = time.monotonic() - started
            while not await self._start_again(wait.after(lived_s)):
                lived_s = 0.0
        self.lost.set()

    async def _start_again(self, wait_s: float) -> bool:
        self._tell("restarting", f"in {wait_s:g} s")
        await asyncio.sleep(wait_s)
        try:
            await self.start(self._start_timeout_s)
        except LaunchError as error:
            self._tell("died", str(error))
            return False
        return True

    async def _let_go(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
            self._keeper = None

    def _new_child(self) -> ChildProcess:
        return ChildProcess(self.name, self._argv(), self.log_path, self._working_dir)

    def _tell(self, kind: str, text: str, details: dict[str, Any] | None = None) -> None:
        self._on_event(ClusterEvent(kind, self.name, text, details or {}))


def describe_ready(pid: int, ready: dict[str, Any]) -> str:
    """The ready line in a person's words."""
    facts = [f"pid {pid}"]
    for key, form in (
        ("address", "{}"),
        ("num_blocks", "{} blocks"),
        ("http_port", "HTTP port {}"),
        ("grpc_port", "gRPC port {}"),
    ):
        if key in ready:
            facts.append(form.format(ready[key]))
    if "transports" in ready:
        facts.append("transports " + ", ".join(map(str, ready["transports"])))
    return ", ".join(facts)

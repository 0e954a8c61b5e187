"""Several router processes behind one HTTP port and one gRPC port.

1. The ports are chosen, and the two that clients know are held, so that nobody else gets them while a process is away.
2. Each process is `python -m router` with the same flags and ports of its own: for workers, which attach to every one
   of them, and for who wants to ask that one process (metrics, receipts). The kernel spreads connections over them.
3. Ready once all are. One that ends is started again, on the same ports, after a growing wait; the others go on.
4. Shutdown: all drain at the same time; one that misses its deadline is killed.

The processes share nothing: each has its own queue, limits, receipts and metrics.
"""

import asyncio
import logging
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from router.config import RouterConfig
from router.succession import Succession, before
from runtime.child_process import ChildProcess, LaunchError, describe_exit
from runtime.ports import free_run, hold_port, port_of
from runtime.process import SUCCESSOR_SIGNAL, write_ready_line
from runtime.restart_wait import RestartWait

COMMAND = (sys.executable, "-m", "router")
_START_TIMEOUT_S = 120.0
_EXIT_GRACE_S = 5.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ports:
    """Those that all processes listen on, and the first of those that each has alone."""

    http: int
    grpc: int
    first_internal: int
    first_own: int

    def flags_of(self, index: int) -> tuple[str, ...]:
        """What the process of this index is told, behind all other flags: the last word counts."""
        return (
            "--router-processes=1",
            "--share-ports",
            f"--http-port={self.http}",
            f"--grpc-port={self.grpc}",
            f"--internal-port={self.first_internal + index}",
            f"--process-port={self.first_own + index}",
            "--exit-on-stdin-close",
        )


async def supervise(
    config: RouterConfig, flags: Sequence[str], shutdown: asyncio.Event, *, command: Sequence[str] = COMMAND
) -> int:
    """Run `config.router_processes` routers with these flags until `shutdown`; returns the exit status.

    Raises OSError when a port cannot be had, LaunchError when a process does not come up. None is left running.
    """
    count = config.router_processes
    with (
        closing(hold_port(config.host, config.http_port, shared=config.share_ports)) as http,
        closing(hold_port(config.host, config.grpc_port, shared=config.share_ports)) as grpc,
    ):
        ports = Ports(
            http=port_of(http),
            grpc=port_of(grpc),
            first_internal=config.internal_port or free_run(config.internal_host or config.host, count),
            first_own=config.process_port or free_run(config.host, count),
        )
        keepers = [_Keeper(index, (*command, *flags, *ports.flags_of(index))) for index in range(count)]
        succession = Succession(shutdown)
        try:
            if await before(shutdown, _start_all(keepers)) is None:
                return 0
            write_ready_line(
                "router",
                http_port=ports.http,
                grpc_port=ports.grpc,
                internal_port=ports.first_internal,
                process_port=ports.first_own,
                processes=[keeper.child.pid for keeper in keepers],
            )
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(keeper.keep(), name=keeper.name) for keeper in keepers]
                await shutdown.wait()
                for task in tasks:
                    task.cancel()
            number = SUCCESSOR_SIGNAL if succession.has_successor else signal.SIGTERM
            stops = [keeper.child.stop(config.drain_timeout_s + _EXIT_GRACE_S, number) for keeper in keepers]
            return 0 if all(await asyncio.gather(*stops)) else 1
        finally:
            await asyncio.gather(*(keeper.child.kill() for keeper in keepers))


class _Keeper:
    """One of the processes, over all its lives. Event-loop thread only."""

    def __init__(self, index: int, argv: Sequence[str]) -> None:
        self.name = f"router process {index}"
        self._argv = argv
        self.child = self._new_child()

    async def keep(self) -> None:
        """Start it again whenever it ends. Runs until cancelled."""
        wait = RestartWait()
        while True:
            started = time.monotonic()
            status = await self.child.wait()
            wait_s = wait.after(time.monotonic() - started)
            _log.error("%s %s: it is started again in %g s", self.name, describe_exit(status), wait_s)
            await asyncio.sleep(wait_s)
            # The others serve. Whoever waited for workers at the first start does not any more: there may be fewer now.
            self.child = self._new_child("--await-workers=0")
            try:
                await self.child.start(_START_TIMEOUT_S)
            except LaunchError as error:
                _log.error("%s", error)

    def _new_child(self, *flags: str) -> ChildProcess:
        return ChildProcess(self.name, (*self._argv, *flags), None, Path.cwd())


async def _start_all(keepers: Sequence[_Keeper]) -> bool:
    """True; raises the LaunchError of the first that fails."""
    starts = [asyncio.create_task(keeper.child.start(_START_TIMEOUT_S)) for keeper in keepers]
    try:
        await asyncio.gather(*starts)
        return True
    finally:
        for start in starts:
            start.cancel()
        await asyncio.gather(*starts, return_exceptions=True)

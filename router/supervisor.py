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
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from router.config import RouterConfig
from runtime.child_process import ChildProcess, LaunchError, describe_exit
from runtime.process import write_ready_line

COMMAND = (sys.executable, "-m", "router")
_START_TIMEOUT_S = 120.0
_EXIT_GRACE_S = 5.0
_FIRST_RESTART_WAIT_S = 0.5
_LONGEST_RESTART_WAIT_S = 15.0
_HEALTHY_LIFE_S = 60.0  # One that lived this long is started again as quickly as after its first end.
_TRIES = 64

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
        closing(hold_port(config.host, config.http_port)) as http,
        closing(hold_port(config.host, config.grpc_port)) as grpc,
    ):
        ports = Ports(
            http=_port_of(http),
            grpc=_port_of(grpc),
            first_internal=config.internal_port or free_run(config.internal_host or config.host, count),
            first_own=config.process_port or free_run(config.host, count),
        )
        keepers = [_Keeper(index, (*command, *flags, *ports.flags_of(index))) for index in range(count)]
        try:
            await _start_all(keepers)
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
            stops = [keeper.child.stop(config.drain_timeout_s + _EXIT_GRACE_S) for keeper in keepers]
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
        wait_s = _FIRST_RESTART_WAIT_S
        while True:
            started = time.monotonic()
            status = await self.child.wait()
            if time.monotonic() - started > _HEALTHY_LIFE_S:
                wait_s = _FIRST_RESTART_WAIT_S
            _log.error("%s %s: it is started again in %g s", self.name, describe_exit(status), wait_s)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_RESTART_WAIT_S)
            self.child = self._new_child()
            try:
                await self.child.start(_START_TIMEOUT_S)
            except LaunchError as error:
                _log.error("%s", error)

    def _new_child(self) -> ChildProcess:
        return ChildProcess(self.name, self._argv, None, Path.cwd())


async def _start_all(keepers: Sequence[_Keeper]) -> None:
    """Raises the LaunchError of the first that fails."""
    starts = [asyncio.create_task(keeper.child.start(_START_TIMEOUT_S)) for keeper in keepers]
    try:
        await asyncio.gather(*starts)
    finally:
        for start in starts:
            start.cancel()
        await asyncio.gather(*starts, return_exceptions=True)


def hold_port(host: str, port: int) -> socket.socket:
    """A socket that is bound to the port (0: a free one) and does not listen: processes that share ports can, others
    cannot. Raises OSError when somebody listens there already, even one that shares."""
    with closing(_bound(host, port, shared=False)) as probe:
        port = _port_of(probe)
    return _bound(host, port, shared=True)


def free_run(host: str, count: int) -> int:
    """The first of `count` ports in a row that nobody has now. Raises OSError when there is no such run."""
    for _ in range(_TRIES):
        sockets: list[socket.socket] = []
        try:
            sockets.append(_bound(host, 0, shared=False))
            first = _port_of(sockets[0])
            # One by one, so that those before one that fails are closed too.
            sockets.extend(_bound(host, port, shared=False) for port in range(first + 1, first + count))
            return first
        except (OSError, OverflowError):
            continue
        finally:
            for one in sockets:
                one.close()
    raise OSError(f"no {count} free ports in a row on {host}")


def _bound(host: str, port: int, *, shared: bool) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    bound = socket.socket(family, kind, protocol)
    try:
        # As servers do: connections that have ended a moment ago are in nobody's way.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind(address)
    except BaseException:
        bound.close()
        raise
    return bound


def _port_of(bound: socket.socket) -> int:
    return int(bound.getsockname()[1])

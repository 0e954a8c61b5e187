"""A worker process around its engine: load, live in one role after the other, stop. The same for both roles.

1. `build` loads what every role needs, in a thread, so that signals are answered meanwhile.
2. A life in the role that the process was started in, or had last before (`worker_life.py`). Where a router asks for
   the other role, that life ends as soon as nothing runs, and one in the other role follows: the same process, weights
   and pool.
3. SIGTERM ends the last life, and the process exits 0. A dead engine thread exits 1 at once.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from runtime.clock import SystemClock
from runtime.config import flag, required_flag
from runtime.errors import KvferryError
from runtime.role_file import Role, read_role, write_role
from runtime.router_names import parse_routers
from runtime.secret import read_secret_file
from runtime.tls import InternalTlsOptions, internal_channel_tls, server_credentials
from runtime.tracing import TracingOptions
from runtime.worker_life import CLOSE_TIMEOUT_S, Access, HostedWorker, LifeEnd, WorkerLife

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class HostOptions(InternalTlsOptions, TracingOptions):
    """Flags that every worker has."""

    worker_id: str = required_flag("Name of this worker, unique in the cluster and stable over restarts.")
    host: str = flag("127.0.0.1", "Address to listen on; routers and other workers must reach it.")
    port: int = flag(0, "Port of the gRPC service; 0 takes a free one.")
    routers: tuple[str, ...] = required_flag(
        "Routers to attach to, host:port of their internal service; dns+host:port is every address of the name."
    )
    cluster_secret_file: Path = required_flag("File with the secret that all processes of the cluster share.")
    drain_timeout_s: float = flag(60.0, "Longest time to finish running requests after SIGTERM.")
    role_file: Path | None = flag(
        None, "File that keeps the role: a worker that was given the other one begins in it when it is started again."
    )
    log_level: Literal["debug", "info", "warning", "error"] = flag("info", "Least severe log lines to write.")
    log_json: bool = flag(False, "Write log lines as JSON.")
    exit_on_stdin_close: bool = flag(False, "Drain and exit when standard input closes.")

    def validate(self) -> None:
        """Raises ValueError naming the flag."""
        InternalTlsOptions.validate(self)
        TracingOptions.validate(self)
        if not self.worker_id or len(self.worker_id) > 128:
            raise ValueError("--worker-id must have 1 to 128 characters")
        if self.host in ("", "0.0.0.0", "::"):
            raise ValueError("--host is where others reach this worker: a wildcard address cannot be told to them")
        if not 0 <= self.port <= 65535:
            raise ValueError("--port must be 0 to 65535")
        if not self.routers:
            raise ValueError("--routers must name at least one router")
        parse_routers(self.routers)
        if self.drain_timeout_s <= 0:
            raise ValueError("--drain-timeout-s must be positive")


class RoleTaker(Protocol):
    """A worker process without its host: it holds what is dear to make, and gives it to one role after the other."""

    def take_role(self, role: str) -> HostedWorker:
        """A worker in this role, not started yet. The one before it has ended, and left the pool alone.

        Blocks; called in a thread. Raises KvferryError, OSError or ValueError when it cannot be.
        """
        ...

    def close(self, timeout_s: float) -> None:
        """Give everything back. Blocks; called in a thread, last."""
        ...


async def host_worker(
    options: HostOptions, role: Role, build: Callable[[bytes], RoleTaker], shutdown: asyncio.Event
) -> int:
    """Run a worker, in this role at first, or in that of its role file, until it has drained; returns the exit status.

    `build(secret)` runs in a thread.
    """
    process: RoleTaker | None = None
    role = read_role(options.role_file, role)
    try:
        secret = read_secret_file(options.cluster_secret_file)
        clock = SystemClock()
        tls = internal_channel_tls(options, clock)
        credentials = server_credentials(options.internal_tls, clock) if options.internal_tls else None
        process = await asyncio.to_thread(build, secret)
        worker = await asyncio.to_thread(process.take_role, role)
    except (KvferryError, OSError, ValueError) as error:  # what a person can mend: one line, no traceback
        _log.error("cannot start: %s", error)
        if process is not None:
            await asyncio.to_thread(process.close, CLOSE_TIMEOUT_S)
        return 1
    access = Access(secret, tls, credentials)
    try:
        end = await WorkerLife(options, role, worker, access, shutdown).run(first=True)
        while end is LifeEnd.OTHER_ROLE:
            role = "decode" if role == "prefill" else "prefill"
            worker = await asyncio.to_thread(process.take_role, role)
            write_role(options.role_file, role)
            _log.info("this worker is a %s worker now", role)
            end = await WorkerLife(options, role, worker, access, shutdown).run(first=False)
    finally:
        await asyncio.to_thread(process.close, CLOSE_TIMEOUT_S)
    return 0 if end is LifeEnd.STOPPED else 1

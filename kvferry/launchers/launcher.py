"""What every launcher can do, and what it tells whoever runs the cluster."""

import asyncio
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvferry.cluster_spec import ClusterSpec
from runtime.role_file import Role

ROUTER = "router"


@dataclass(frozen=True, slots=True)
class ClusterEvent:
    """Something to tell the person who runs the cluster. `kind`: placed, progress, ready, died, restarting, up,
    stopping, stopped or killed. `details` is what its ready line said, for `ready`."""

    kind: str
    name: str
    text: str
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorkerProcess:
    """One worker as its launcher knows it. `role` is the one that it was given last, and is started in. `running` is
    False while it is away."""

    name: str
    role: Role
    pid: int
    running: bool
    node: str = ""


class Launcher(Protocol):
    """One cluster that runs or is to run. All methods: event-loop thread only; `add` and `remove` one at a time."""

    @property
    def http_address(self) -> str:
        """host:port of the OpenAI HTTP API, once started."""
        ...

    @property
    def grpc_address(self) -> str:
        """host:port of the public gRPC service, once started."""
        ...

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by name, each on its own host."""
        ...

    @property
    def spec(self) -> ClusterSpec:
        """What it was started from."""
        ...

    @property
    def secret(self) -> bytes:
        """What its processes prove to each other."""
        ...

    @property
    def internal_addresses(self) -> tuple[str, ...]:
        """host:port where workers attach, of each router process, once started."""
        ...

    @property
    def router_lost(self) -> asyncio.Event:
        """Set when the router, once started, died for good: the cluster is useless."""
        ...

    async def start(self) -> None:
        """Bring everything up. Raises LaunchError, or whatever interrupts it; nothing is left running then."""
        ...

    def workers(self) -> tuple[WorkerProcess, ...]:
        """Every worker that is meant to run, of each role the newest last."""
        ...

    async def add(self, role: Role) -> str:
        """Start one worker more and wait until every router knows it; its name, `decode-2`. A name is used again once
        its worker has been removed. Raises LaunchError; nothing is left of that worker then."""
        ...

    async def remove(self, name: str) -> bool:
        """Drain this worker (SIGTERM: it finishes or hands on what it runs, within the drain timeout) and let it end
        for good. False when it had to be killed. Raises KeyError for a name that is no worker's."""
        ...

    async def stop(self) -> bool:
        """Drain and stop everything. Returns False when a process had to be killed."""
        ...

    async def kill(self) -> None:
        """End every process at once."""
        ...

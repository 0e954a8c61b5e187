"""A launcher and its routers, in memory: workers come, drain, change their role and go at once, or as told."""

from dataclasses import dataclass, field, replace
from typing import Any

from kvferry.launchers.launcher import WorkerProcess
from kvferry.launchers.local import free_name, role_of
from kvferry.scaling.fleet_view import DRAINING, READY, FleetView, WorkerFacts
from kvferry_rpc.common_pb2 import ErrorCode
from runtime.child_process import LaunchError
from runtime.errors import KvferryError
from runtime.role_file import Role


@dataclass
class FakeFleet:
    """`told` has what was done, in order. `busy`: workers that do not become free. `stays`: those that keep their role.
    `away`: how many looks find no router."""

    facts: dict[str, WorkerFacts] = field(default_factory=dict)
    told: list[str] = field(default_factory=list)
    busy: set[str] = field(default_factory=set)
    stays: set[str] = field(default_factory=set)
    slo: tuple[int, int] = (0, 0)
    away: int = 0
    can_start: bool = True
    processes: dict[str, Role] = field(default_factory=dict)

    def start(self, *names: str) -> "FakeFleet":
        """Workers that are there from the beginning."""
        for name in names:
            self.processes[name] = role_of(name)
            self.facts[name] = WorkerFacts(name, role_of(name), READY, incarnation=name.encode())
        return self

    def change(self, name: str, **changes: Any) -> None:
        """Let a worker be otherwise."""
        self.facts[name] = replace(self.facts[name], **changes)

    # ---- as a launcher ----

    def workers(self) -> tuple[WorkerProcess, ...]:
        return tuple(WorkerProcess(name, role, 1, True) for name, role in self.processes.items())

    async def add(self, role: Role) -> str:
        if not self.can_start:
            raise LaunchError("no memory for the pool")
        name = free_name(role, self.processes)
        self.told.append(f"add {name}")
        self.start(name)
        return name

    async def remove(self, name: str) -> bool:
        self.told.append(f"remove {name}")
        del self.processes[name]
        self.facts.pop(name, None)
        return True

    # ---- as the routers ----

    async def view(self) -> FleetView:
        if self.away > 0:
            self.away -= 1
            raise KvferryError(ErrorCode.UNAVAILABLE, "no router")
        met, missed = self.slo
        return FleetView(tuple(self.facts[name] for name in sorted(self.facts)), slo_met=met, slo_missed=missed)

    async def drain(self, name: str, *, over: bool = False, force: bool = False) -> None:
        self.told.append(f"{'lift' if over else 'drain'} {name}{' by force' if force else ''}")
        if over:
            self.change(name, state=READY)
        else:
            self.change(name, state=DRAINING, requests=int(name in self.busy))

    async def set_role(self, name: str, role: Role, *, force: bool = False) -> None:
        self.told.append(f"{name} to {role}{' by force' if force else ''}")
        if name in self.busy:
            self.change(name, state=DRAINING)
        elif name not in self.stays:
            self.change(name, role=role, incarnation=b"another life of " + name.encode())

    async def close(self) -> None: ...

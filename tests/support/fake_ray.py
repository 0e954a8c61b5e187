"""A Ray cluster in this process, for tests of the launcher: nodes with room, named groups, and actors that are
`NodeProcess`es of this event loop, whose children are real."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvferry.launchers.launcher import ClusterEvent
from kvferry.launchers.ray_link import ProcessAwayError, ProcessGoneError, RemoteProcess
from kvferry.launchers.ray_node import NodeFacts, NodeProcess, ProcessOrder
from kvferry.launchers.ray_shapes import GroupPlan, actor_name
from runtime.child_process import LaunchError


@dataclass
class FakeRay:
    """A `RayLink`. `cpus`: room of the one node; a group that does not fit is refused without a wait."""

    cpus: float = 8.0
    groups_held: dict[str, GroupPlan] = field(default_factory=dict)
    actors: dict[str, "FakeActor"] = field(default_factory=dict)

    async def nodes(self) -> Mapping[str, Mapping[str, float]]:
        return {"127.0.0.1": {"CPU": self.cpus, "memory": 1.0}}

    async def free(self) -> Mapping[str, float]:
        used = sum(len(plan.members) * plan.bundle.get("CPU", 0.0) for plan in self.groups_held.values())
        return {"CPU": self.cpus - used}

    async def place(self, plan: GroupPlan, timeout_s: float) -> bool:
        assert plan.name not in self.groups_held
        if len(plan.members) * plan.bundle["CPU"] > (await self.free())["CPU"] or "GPU" in plan.bundle:
            return False
        self.groups_held[plan.name] = plan
        return True

    async def remove_group(self, name: str) -> None:
        self.groups_held.pop(name, None)

    async def groups(self, prefix: str) -> list[str]:
        return [name for name in self.groups_held if name.startswith(prefix)]

    async def create(self, order: ProcessOrder, index: int) -> RemoteProcess:
        name = actor_name(order.options.cluster, order.name)
        if name in self.actors:
            raise LaunchError(f"there is an actor {name}")
        if order.group:
            assert self.groups_held[order.group].members[index] == order.name
        actor = self.actors[name] = FakeActor(self, name, order)
        return actor

    async def find(self, cluster: str, name: str) -> RemoteProcess | None:
        return self.actors.get(actor_name(cluster, name))

    async def names(self) -> list[str]:
        return [*self.actors, "another-cluster/decode-0"]

    def close(self) -> None: ...


class FakeActor:
    """A `RemoteProcess`. `away` and `gone` are what a test lets happen to it."""

    def __init__(self, ray: FakeRay, name: str, order: ProcessOrder) -> None:
        self._ray = ray
        self._name = name
        self._order = order
        self.away = asyncio.Event()
        self.gone = False
        self.node = self._new_node()

    async def die(self) -> None:
        """As with SIGKILL: nobody watches its process any more, nor holds its standard input."""
        process = self.node._process
        assert process is not None
        await process._let_go()
        process._child._close_stdin()
        self.away.set()

    def begin_new_life(self) -> None:
        """As Ray starts an actor again that has died."""
        self.node = self._new_node()
        self.away.clear()

    async def wait_ready(self, timeout_s: float) -> str:
        return await self._there().wait_ready(timeout_s)

    async def events(self, life: str, after: int, wait_s: float) -> tuple[str, list[tuple[int, ClusterEvent]]]:
        asked = asyncio.create_task(self._there().events(life, after, wait_s))
        dead = asyncio.create_task(self.away.wait())
        await asyncio.wait((asked, dead), return_when=asyncio.FIRST_COMPLETED)
        dead.cancel()
        if asked.done():
            return await asked
        asked.cancel()
        raise ProcessGoneError("it is dead") if self.gone else ProcessAwayError("it is away")

    async def facts(self) -> NodeFacts:
        return self._there().facts()

    async def order(self) -> ProcessOrder:
        return self._there().order()

    async def log_tail(self, num_lines: int) -> str:
        return self._there().log_tail(num_lines)

    async def stop(self, grace_s: float) -> bool:
        return await self._there().stop(grace_s)

    async def end(self) -> None:
        await self.node.stop(0.0)
        self._ray.actors.pop(self._name, None)

    def _there(self) -> NodeProcess:
        if self.gone:
            raise ProcessGoneError("it is dead")
        if self.away.is_set():
            raise ProcessAwayError("it is away")
        return self.node

    def _new_node(self) -> NodeProcess:
        node = NodeProcess(self._order, "127.0.0.1", "node-1")
        node.begin()
        return node

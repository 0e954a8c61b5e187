"""A router and its workers in a Ray cluster: one actor a process, which runs the same command line as everywhere.

1. Room is reserved for all workers; Ray decides on which nodes. No room in time: nothing is left, and what was asked
and what there is is said. 2. The router starts on this node. 3. The workers start where they were placed and dial the
router. 4. The cluster is up when the router's /ready answers 200. 5. From then on it needs nobody: actors start their
process again when it dies, Ray starts an actor again when that dies. Whoever attaches later, by the actors' names, can
watch, add, remove and stop. 6. Stop: the router drains, then the workers; actors and reservations go.

No state of the cluster is kept here that its actors do not have.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Self

from kvferry.cluster_spec import ClusterSpec, role_of
from kvferry.launchers.launcher import ROUTER, ClusterEvent, WorkerProcess
from kvferry.launchers.local import free_name
from kvferry.launchers.ray_link import ProcessAwayError, ProcessGoneError, RayLink, RemoteProcess
from kvferry.launchers.ray_node import NodeFacts, ProcessOrder
from kvferry.launchers.ray_shapes import GroupPlan, actor_name, in_order, no_room, plan_groups, processes_of
from kvferry.launchers.readiness import wait_serving
from runtime.child_process import LaunchError
from runtime.grpc_life import join_host_port
from runtime.role_file import Role

_EXIT_GRACE_S = 10.0
_EVENTS_WAIT_S = 20.0
_AWAY_WAIT_S = 1.0


class RayCluster:
    """A `Launcher`. Event-loop thread only."""

    def __init__(self, link: RayLink, order: ProcessOrder, on_event: Callable[[ClusterEvent], None]) -> None:
        """`order`: the router's."""
        order.spec.validate()
        order.options.validate()
        self._link = link
        self._order = order
        self._spec = order.spec
        self._cluster = order.options.cluster
        self._on_event = on_event
        self._remotes: dict[str, RemoteProcess] = {}
        self._groups: dict[str, str] = {}
        self._workers: dict[str, WorkerProcess] = {}
        self._pumps: dict[str, asyncio.Task[None]] = {}
        self._router: NodeFacts | None = None
        self.router_lost = asyncio.Event()

    @classmethod
    async def attach(cls, link: RayLink, cluster: str, on_event: Callable[[ClusterEvent], None]) -> Self:
        """The cluster of this name, started by another process. Raises LaunchError when there is none that answers."""
        remotes = {}
        for name in processes_of(cluster, await link.names()):
            remote = await link.find(cluster, name)
            if remote is not None:
                remotes[name] = remote
        order = await _any_order(remotes)
        if order is None:
            raise LaunchError(f"no kvferry cluster named {cluster!r} answers in this Ray cluster")
        self = cls(link, replace(order, name=ROUTER, group="", routers=""), on_event)
        self._remotes = remotes
        for facts in (await self.facts()).values():
            if isinstance(facts, NodeFacts):
                self._take_facts(facts)
        return self

    @property
    def http_address(self) -> str:
        """See `Launcher`."""
        return self._public_address("http_port")

    @property
    def grpc_address(self) -> str:
        """See `Launcher`."""
        return self._public_address("grpc_port")

    @property
    def spec(self) -> ClusterSpec:
        """See `Launcher`."""
        return self._spec

    @property
    def secret(self) -> bytes:
        """See `Launcher`."""
        return self._order.secret

    @property
    def internal_addresses(self) -> tuple[str, ...]:
        """See `Launcher`."""
        router = self._router_facts()
        return self._spec.internal_addresses(router.host, router.ports)

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by name, each on its own node."""
        router = {ROUTER: self._router.pid} if self._router else {}
        return router | {worker.name: worker.pid for worker in self._workers.values()}

    def workers(self) -> tuple[WorkerProcess, ...]:
        """See `Launcher`."""
        return tuple(self._workers[name] for name in in_order(self._workers))

    async def facts(self) -> dict[str, NodeFacts | str]:
        """What each process is now, or why that cannot be known."""
        outcomes = await asyncio.gather(*(one.facts() for one in self._remotes.values()), return_exceptions=True)
        found: dict[str, NodeFacts | str] = {}
        for name, outcome in zip(self._remotes, outcomes, strict=True):
            if isinstance(outcome, BaseException) and not isinstance(outcome, LaunchError):
                raise outcome
            found[name] = outcome if isinstance(outcome, NodeFacts) else str(outcome)
        return found

    async def log_tail(self, name: str, num_lines: int) -> str:
        """The last lines that a process has written, from its node. Raises KeyError, LaunchError."""
        return await self._remotes[name].log_tail(num_lines)

    async def start(self) -> None:
        """See `Launcher`. Raises ResourcesError, a LaunchError, when Ray has no room."""
        if processes_of(self._cluster, await self._link.names()):
            raise LaunchError(
                f"a kvferry cluster named {self._cluster!r} is in this Ray cluster already: look at it with "
                "`kvferry status --ray`, end it with `kvferry down --ray`, or give another --ray-cluster"
            )
        options, spec = self._order.options, self._spec
        names: dict[Role, list[str]] = {
            role: [name for name in spec.worker_ids if role_of(name) == role] for role in ("prefill", "decode")
        }
        plans = [
            plan
            for role, members in names.items()
            for plan in plan_groups(self._cluster, role, options.shape(role), members)
        ]
        try:
            await self._place(plans)
            deadline = time.monotonic() + spec.start_timeout_s
            await self._launch(ROUTER, "", 0, deadline)
            async with asyncio.TaskGroup() as group:
                for plan in plans:
                    for index, name in enumerate(plan.members):
                        group.create_task(self._launch(name, plan.name, index, deadline))
            await wait_serving(spec, self._router_facts().ports["http_port"], deadline, self._check_watched)
        except BaseException as error:
            await self.kill()
            if isinstance(error, BaseExceptionGroup) and (failures := error.subgroup(LaunchError)):
                raise _first_leaf(failures) from None
            raise
        self._tell("up", "cluster", f"{spec.http_scheme}://{self.http_address} and gRPC {self.grpc_address}")

    async def add(self, role: Role) -> str:
        """See `Launcher`."""
        name = free_name(role, processes_of(self._cluster, await self._link.names()))
        (plan,) = plan_groups(self._cluster, role, self._order.options.shape(role), [name])
        await self._place([plan])
        try:
            await self._launch(name, plan.name, 0, time.monotonic() + self._spec.start_timeout_s)
        except BaseException:
            await self._release(name, 0.0)
            raise
        return name

    async def remove(self, name: str) -> bool:
        """See `Launcher`."""
        if name == ROUTER or name not in self._remotes:
            raise KeyError(name)
        self._tell("stopping", name, "draining")
        clean = await self._release(name, self._spec.drain_timeout_s + _EXIT_GRACE_S)
        self._tell("stopped", name, "has left the cluster")
        return clean

    async def stop(self) -> bool:
        """See `Launcher`."""
        self._tell("stopping", "cluster", "draining")
        clean = True
        if ROUTER in self._remotes:
            # The router goes first: it refuses new requests and waits for the running ones, which need the workers.
            clean = await self._release(ROUTER, self._spec.drain_timeout_s + _EXIT_GRACE_S)
        clean = await self._release_all(_EXIT_GRACE_S) and clean
        self._tell("stopped", "cluster", "all processes have ended")
        return clean

    async def kill(self) -> None:
        """See `Launcher`."""
        await self._release_all(0.0)

    async def leave(self) -> None:
        """Watch no more; the cluster runs on."""
        for pump in self._pumps.values():
            pump.cancel()
        await asyncio.gather(*self._pumps.values(), return_exceptions=True)
        self._pumps = {}

    async def _place(self, plans: Sequence[GroupPlan]) -> None:
        timeout_s = self._order.options.placement_timeout_s
        for plan in plans:
            self._groups |= dict.fromkeys(plan.members, plan.name)
        placed = await asyncio.gather(*(self._link.place(plan, timeout_s) for plan in plans))
        missing = [plan for plan, has_room in zip(plans, placed, strict=True) if not has_room]
        if missing:
            for plan in plans:
                await self._link.remove_group(plan.name)
                for name in plan.members:
                    del self._groups[name]
            raise no_room(missing, timeout_s, await self._link.nodes(), await self._link.free())
        members = ", ".join(name for plan in plans for name in plan.members)
        self._tell("placed", "cluster", f"Ray has room for {members}")

    async def _launch(self, name: str, group: str, index: int, deadline: float) -> None:
        order = replace(self._order, name=name, group=group)
        if name != ROUTER:
            order = replace(order, routers=",".join(self.internal_addresses))
        remote = self._remotes[name] = await self._link.create(order, index)
        self._pumps[name] = asyncio.create_task(self._pump(name, remote), name=f"events of {name}")
        failure = await remote.wait_ready(max(deadline - time.monotonic(), 0.001))
        if failure:
            raise LaunchError(failure)
        self._take_facts(await remote.facts())

    def _take_facts(self, facts: NodeFacts) -> None:
        if facts.role is None:
            self._router = facts
            return
        self._groups[facts.name] = facts.group
        self._workers[facts.name] = WorkerProcess(facts.name, facts.role, facts.pid, facts.running, node=facts.host)

    async def _release_all(self, grace_s: float) -> bool:
        clean = all(await asyncio.gather(*(self._release(name, grace_s) for name in list(self._remotes))))
        # Those whose actors Ray has lost for good, or that never came to have one.
        for name in {*self._groups.values(), *await self._link.groups(actor_name(self._cluster, ""))}:
            await self._link.remove_group(name)
        self._groups = {}
        return clean

    async def _release(self, name: str, grace_s: float) -> bool:
        """Stop a process, end its actor, give its group back if nobody else is in it."""
        clean = True
        if (pump := self._pumps.pop(name, None)) is not None:
            pump.cancel()
            await asyncio.gather(pump, return_exceptions=True)
        if (remote := self._remotes.pop(name, None)) is not None:
            try:
                clean = await remote.stop(grace_s)
            except LaunchError as error:
                # Its process, if there is one, ends by itself: nobody holds its standard input any more.
                self._tell("killed", name, f"cannot be asked to stop: {error}")
                clean = False
            await remote.end()
        self._workers.pop(name, None)
        group = self._groups.pop(name, "")
        if group and group not in self._groups.values():
            await self._link.remove_group(group)
        return clean

    async def _pump(self, name: str, remote: RemoteProcess) -> None:
        """Tell what a process tells, over all lives of its actor."""
        life, last, is_away = "", 0, False
        while True:
            try:
                heard, events = await remote.events(life, last, _EVENTS_WAIT_S)
            except ProcessGoneError as error:
                self._tell("died", name, f"its actor has ended for good: {error}")
                self._mark_away(name, for_good=True)
                return
            except ProcessAwayError as error:
                # Before its first word it is only being made.
                if life and not is_away:
                    self._tell("died", name, f"its actor does not answer, Ray is to start it again: {error}")
                    self._mark_away(name, for_good=False)
                is_away = True
                await asyncio.sleep(_AWAY_WAIT_S)
                continue
            is_away = False
            if heard != life:
                life, last = heard, 0
            for number, event in events:
                last = number
                self._take_event(event)
                if event.kind == "stopped":  # by another command, which sees to the rest
                    self._forget(name)
                    return

    def _take_event(self, event: ClusterEvent) -> None:
        worker = self._workers.get(event.name)
        if worker is not None and event.kind == "ready":
            self._workers[event.name] = replace(worker, pid=int(event.details["pid"]), running=True)
        elif event.kind == "died":
            self._mark_away(event.name, for_good=not self._spec.restart)
        self._on_event(event)

    def _forget(self, name: str) -> None:
        if name == ROUTER:
            self.router_lost.set()
        for known in (self._remotes, self._workers, self._groups, self._pumps):
            known.pop(name, None)

    def _mark_away(self, name: str, *, for_good: bool) -> None:
        if name == ROUTER and for_good:
            self.router_lost.set()
        if name in self._workers:
            self._workers[name] = replace(self._workers[name], running=False)

    def _check_watched(self) -> None:
        for worker in self._workers.values():
            if not worker.running:
                raise LaunchError(f"{worker.name} ended while the cluster was starting")

    def _router_facts(self) -> NodeFacts:
        if self._router is None or not self._router.ports:
            raise LaunchError(f"the router of the kvferry cluster {self._cluster!r} does not run now")
        return self._router

    def _public_address(self, port: str) -> str:
        router = self._router_facts()
        host = router.host if self._spec.host in ("0.0.0.0", "::") else self._spec.host
        return join_host_port(host, router.ports[port])

    def _tell(self, kind: str, name: str, text: str) -> None:
        self._on_event(ClusterEvent(kind, name, text))


async def _any_order(remotes: dict[str, RemoteProcess]) -> ProcessOrder | None:
    for remote in remotes.values():
        try:
            return await remote.order()
        except LaunchError:
            continue
    return None


def _first_leaf(group: "BaseExceptionGroup[LaunchError]") -> LaunchError:
    first = group.exceptions[0]
    return first if isinstance(first, LaunchError) else _first_leaf(first)

"""The little that the launcher wants of Ray, behind two protocols, so that all but this file runs without Ray.

Ray is imported, and connected to, in `connect` alone: it replaces signal handlers then, so that comes before the
event loop's own.
"""

import asyncio
import os
import socket
import time
from collections.abc import Mapping
from typing import Any, Protocol

from kvferry.launchers.launcher import ClusterEvent
from kvferry.launchers.ray_node import NodeFacts, NodeProcess, ProcessOrder
from kvferry.launchers.ray_shapes import NAMESPACE, GroupPlan, RayOptions, actor_name
from runtime.child_process import LaunchError

_CONNECT_TIMEOUT_S = 5.0
_ANSWER_TIMEOUT_S = 20.0
_GROUP_LOOK_S = 1
_NAME_LOOK_S = 0.1
_LOCAL_HOST = "127.0.0.2"  # loopback; 127.0.0.1 Ray would replace by this host's own address
_LOCAL_CPUS = 1024  # of a Ray that we start for ourselves: nobody else shares it, so nothing is rationed


class ProcessAwayError(LaunchError):
    """The actor does not answer now; Ray may be starting it again."""


class ProcessGoneError(LaunchError):
    """The actor has ended for good."""


class RemoteProcess(Protocol):
    """A `NodeProcess` on some node. Event-loop thread; every call may raise ProcessAwayError or ProcessGoneError."""

    async def wait_ready(self, timeout_s: float) -> str:
        """As `NodeProcess`, and so are those that follow."""
        ...

    async def events(self, life: str, after: int, wait_s: float) -> tuple[str, list[tuple[int, ClusterEvent]]]:
        """Its events."""
        ...

    async def facts(self) -> NodeFacts:
        """What it is now."""
        ...

    async def order(self) -> ProcessOrder:
        """What it was made from."""
        ...

    async def log_tail(self, num_lines: int) -> str:
        """The last lines of its log."""
        ...

    async def stop(self, grace_s: float) -> bool:
        """Drain it."""
        ...

    async def end(self) -> None:
        """End the actor, and so its process, for good; its name is free then. Raises nothing."""
        ...


class RayLink(Protocol):
    """A Ray cluster. Event-loop thread."""

    async def nodes(self) -> Mapping[str, Mapping[str, float]]:
        """What each live node has in all, by its address."""
        ...

    async def free(self) -> Mapping[str, float]:
        """What is unused in the whole cluster."""
        ...

    async def place(self, plan: GroupPlan, timeout_s: float) -> bool:
        """Reserve a group; False, with nothing reserved, when there is no room in time."""
        ...

    async def remove_group(self, name: str) -> None:
        """Give a group back. Nothing happens when there is none of this name."""
        ...

    async def groups(self, prefix: str) -> list[str]:
        """Names of the groups that there are and that begin so."""
        ...

    async def create(self, order: ProcessOrder, index: int) -> RemoteProcess:
        """Make the actor of a process: at this place of its group, or on this node where it has no group. Raises
        LaunchError when there is one of this name."""
        ...

    async def find(self, cluster: str, name: str) -> RemoteProcess | None:
        """The actor of a process."""
        ...

    async def names(self) -> list[str]:
        """Names of all our actors, of every cluster."""
        ...

    def close(self) -> None:
        """Leave Ray; what runs there goes on, unless this process started that Ray."""
        ...


class NodeActor(NodeProcess):
    """The actor class. Ray awaits its constructor, so that this runs on the actor's event loop."""

    async def __init__(self, order: ProcessOrder) -> None:  # type: ignore[misc]
        import ray

        super().__init__(order, ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id())
        self.begin()


def connect(options: RayOptions, *, may_start: bool = False) -> RayLink:
    """Join the Ray cluster at this address, or the one of this host; with `may_start` start one for this process
    where there is none. Main thread, before an event loop runs; blocks for seconds.

    Raises LaunchError when Ray is not installed or cannot be reached.
    """
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError:
        raise LaunchError("Ray is not installed here: pip install 'kvferry[ray]'") from None
    # Its messages are for its own users; ours have what ours need.
    quiet = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": "ERROR"}
    where = options.address or "this host"
    try:
        if options.address:  # Ray itself waits for more than a minute
            host, _, port = options.address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT_S).close()
        ray.init(address=options.address or "auto", **quiet)
    # Ray signals itself when nobody answers it.
    except (OSError, RuntimeError, ValueError, SystemExit) as error:
        none_is_here = "Could not find any running Ray" in str(error)
        if not (may_start and none_is_here):
            raise LaunchError(
                f"cannot join a Ray cluster at {where}: {_in_short(error)}. Start one with `ray start --head`, name "
                "one with --ray-address HOST:PORT, or see to its token, ~/.ray/auth_token, being here"
            ) from None
        _start_ray(ray, quiet)
    return _Link(ray)


def _start_ray(ray: Any, options: dict[str, Any]) -> None:
    # By itself it would start a process for each CPU at once, for nobody.
    no_stock = {"prestart_worker_first_driver": False, "enable_worker_prestart": False}
    # The token that it may make, and its logs, are nobody else's.
    before = os.umask(0o077)
    try:
        ray.init(
            num_cpus=_LOCAL_CPUS,
            include_dashboard=False,
            _node_ip_address=_LOCAL_HOST,
            _system_config=no_stock,
            **options,
        )
    finally:
        os.umask(before)


class _Link:
    def __init__(self, ray: Any) -> None:
        self._ray = ray

    async def nodes(self) -> Mapping[str, Mapping[str, float]]:
        found = await asyncio.to_thread(self._ray.nodes)
        return {node["NodeManagerAddress"]: dict(node["Resources"]) for node in found if node["Alive"]}

    async def free(self) -> Mapping[str, float]:
        return dict(await asyncio.to_thread(self._ray.available_resources))

    async def place(self, plan: GroupPlan, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        bundles = [plan.bundle] * len(plan.members)
        group = self._ray.util.placement_group(bundles, strategy=plan.strategy, name=plan.name, lifetime="detached")
        try:
            while time.monotonic() < deadline:
                # A short wait at a time: a thread cannot be cancelled.
                if await asyncio.to_thread(group.wait, _GROUP_LOOK_S):
                    return True
        except BaseException:
            self._ray.util.remove_placement_group(group)
            raise
        await asyncio.to_thread(self._ray.util.remove_placement_group, group)
        return False

    async def remove_group(self, name: str) -> None:
        try:
            group = await asyncio.to_thread(self._ray.util.get_placement_group, name)
        except ValueError:
            return
        await asyncio.to_thread(self._ray.util.remove_placement_group, group)

    async def groups(self, prefix: str) -> list[str]:
        table = await asyncio.to_thread(self._ray.util.placement_group_table)
        return [one["name"] for one in table.values() if one["name"].startswith(prefix) and one["state"] != "REMOVED"]

    async def create(self, order: ProcessOrder, index: int) -> RemoteProcess:
        options: dict[str, Any] = {
            "name": actor_name(order.options.cluster, order.name),
            "namespace": NAMESPACE,
            "lifetime": "detached",
            "max_restarts": -1 if order.spec.restart else 0,
            "max_concurrency": 64,
        }
        strategies = self._ray.util.scheduling_strategies
        if order.group:
            shape = order.options.shape("prefill" if order.name.startswith("prefill-") else "decode")
            group = await asyncio.to_thread(self._ray.util.get_placement_group, order.group)
            options["scheduling_strategy"] = strategies.PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=index
            )
            kinds = {name: amount for name, amount in shape.bundle.items() if name not in ("CPU", "GPU")}
            options |= {"num_cpus": shape.cpus, "num_gpus": shape.gpus, "resources": kinds}
        else:
            here = self._ray.get_runtime_context().get_node_id()
            options["scheduling_strategy"] = strategies.NodeAffinitySchedulingStrategy(here, soft=False)
            options |= {"num_cpus": order.options.router_cpus}
        remote = self._ray.remote(NodeActor).options(**options)
        try:
            return _Process(self._ray, await asyncio.to_thread(remote.remote, order), options["name"])
        except ValueError as error:  # somebody else was quicker with this name
            raise LaunchError(_in_short(error)) from None

    async def find(self, cluster: str, name: str) -> RemoteProcess | None:
        full_name = actor_name(cluster, name)
        try:
            actor = await asyncio.to_thread(self._ray.get_actor, full_name, NAMESPACE)
        except ValueError:
            return None
        return _Process(self._ray, actor, full_name)

    async def names(self) -> list[str]:
        return list(await asyncio.to_thread(self._ray.util.list_named_actors))

    def close(self) -> None:
        self._ray.shutdown()


class _Process:
    """The driver's end of one actor."""

    def __init__(self, ray: Any, actor: Any, name: str) -> None:
        self._ray = ray
        self._actor = actor
        self._name = name

    async def wait_ready(self, timeout_s: float) -> str:
        outcome: str = await self._answer(self._actor.wait_ready.remote(timeout_s), timeout_s + _ANSWER_TIMEOUT_S)
        return outcome

    async def events(self, life: str, after: int, wait_s: float) -> tuple[str, list[tuple[int, ClusterEvent]]]:
        answer = await self._answer(self._actor.events.remote(life, after, wait_s), wait_s + _ANSWER_TIMEOUT_S)
        return answer[0], answer[1]

    async def facts(self) -> NodeFacts:
        facts: NodeFacts = await self._answer(self._actor.facts.remote(), _ANSWER_TIMEOUT_S)
        return facts

    async def order(self) -> ProcessOrder:
        order: ProcessOrder = await self._answer(self._actor.order.remote(), _ANSWER_TIMEOUT_S)
        return order

    async def log_tail(self, num_lines: int) -> str:
        tail: str = await self._answer(self._actor.log_tail.remote(num_lines), _ANSWER_TIMEOUT_S)
        return tail

    async def stop(self, grace_s: float) -> bool:
        clean: bool = await self._answer(self._actor.stop.remote(grace_s), grace_s + _ANSWER_TIMEOUT_S)
        return clean

    async def end(self) -> None:
        await asyncio.to_thread(self._ray.kill, self._actor, no_restart=True)
        deadline = time.monotonic() + _ANSWER_TIMEOUT_S
        while self._name in await asyncio.to_thread(self._ray.util.list_named_actors):
            if time.monotonic() > deadline:
                return
            await asyncio.sleep(_NAME_LOOK_S)

    async def _answer(self, reference: Any, timeout_s: float) -> Any:
        errors = self._ray.exceptions
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.wrap_future(reference.future())
        except TimeoutError:
            raise ProcessAwayError(f"no answer within {timeout_s:g} s") from None
        except errors.ActorUnavailableError as error:
            raise ProcessAwayError(_in_short(error)) from None
        except errors.RayActorError as error:
            raise ProcessGoneError(_in_short(error)) from None
        except errors.RayError as error:
            raise LaunchError(str(error)) from None


def _in_short(error: BaseException) -> str:
    """And the last one, where Ray puts the cause behind a traceback."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    return lines[0] if lines[0] == lines[-1] else f"{lines[0]} {lines[-1]}"

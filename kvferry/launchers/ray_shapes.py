"""What a worker asks of Ray, in Ray's words: bundles, placement groups, names. Pure."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

from runtime.child_process import LaunchError
from runtime.role_file import Role

NAMESPACE = "kvferry"  # of our named actors, in a Ray cluster that others use too
STRATEGIES = {
    "pack": "PACK",
    "spread": "SPREAD",
    "strict-pack": "STRICT_PACK",
    "strict-spread": "STRICT_SPREAD",
}
EACH = "each"  # every worker is placed for itself, and gives its resources back when it leaves
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_ADDRESS = re.compile(r"([A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}")
_ACCELERATOR = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
# How Ray asks for a kind of node: a sliver of a resource that each node of the kind has once.
_ACCELERATOR_SHARE = 0.001


class ResourcesError(LaunchError):
    """The Ray cluster has no room for what was asked; the message names what was asked and what there is."""


@dataclass(frozen=True, slots=True)
class WorkerShape:
    """What each worker of a pool takes of its node, and how the pool lies on the nodes."""

    cpus: float = 1.0
    gpus: float = 0.0
    accelerator: str = ""
    place: str = EACH

    def validate(self, flag: str) -> None:
        """Raises ValueError naming the flag."""
        for name, value in (("cpus", self.cpus), ("gpus", self.gpus)):
            if not 0 <= value <= 4096:
                raise ValueError(f"{flag}: {name} must be 0 to 4096, not {value:g}")
        if self.gpus > 1 and self.gpus != int(self.gpus):
            raise ValueError(f"{flag}: gpus must be whole above 1, not {self.gpus:g}")
        if self.cpus + self.gpus == 0:
            raise ValueError(f"{flag}: a worker needs some cpus or gpus, or Ray would put all on one node")
        if self.accelerator and not _ACCELERATOR.fullmatch(self.accelerator):
            raise ValueError(f"{flag}: accelerator must be a type as Ray names it, such as H100")
        if self.place != EACH and self.place not in STRATEGIES:
            raise ValueError(f"{flag}: place must be {', '.join([EACH, *STRATEGIES])}, not {self.place!r}")

    @property
    def bundle(self) -> dict[str, float]:
        """As a bundle of a placement group."""
        bundle = {"CPU": self.cpus, "GPU": self.gpus}
        if self.accelerator:
            bundle[f"accelerator_type:{self.accelerator}"] = _ACCELERATOR_SHARE
        return {name: amount for name, amount in bundle.items() if amount}


def parse_shape(text: str) -> WorkerShape:
    """`gpus=1,accelerator=H100,place=spread` as a shape; what is not named has its default. Raises ValueError."""
    values: dict[str, str | float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = part.partition("=")
        if name not in ("cpus", "gpus", "accelerator", "place") or not equals or not value or name in values:
            raise ValueError(f"{part!r} is not one of cpus=N, gpus=N, accelerator=TYPE, place=HOW, each once")
        try:
            values[name] = float(value) if name in ("cpus", "gpus") else value
        except ValueError:
            raise ValueError(f"{part!r}: {value!r} is not a number") from None
    return WorkerShape(**values)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class RayOptions:
    """How a cluster lies in a Ray cluster. `address` is Ray's; empty is the one that runs on this host."""

    address: str = ""
    cluster: str = "main"
    prefill: WorkerShape = field(default_factory=WorkerShape)
    decode: WorkerShape = field(default_factory=WorkerShape)
    router_cpus: float = 1.0
    placement_timeout_s: float = 60.0

    def validate(self) -> None:
        """Raises ValueError naming the flag."""
        check_cluster_name(self.cluster)
        check_address(self.address)
        self.prefill.validate("--prefill-shape")
        self.decode.validate("--decode-shape")
        if not 0 <= self.router_cpus <= 4096:
            raise ValueError("--router-cpus must be 0 to 4096")
        if self.placement_timeout_s <= 0:
            raise ValueError("--placement-timeout must be positive")

    def shape(self, role: Role) -> WorkerShape:
        """Of one worker of this role."""
        return self.prefill if role == "prefill" else self.decode


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """One placement group: its name, Ray's strategy, what each place in it is, and who takes which."""

    name: str
    strategy: str
    bundle: dict[str, float]
    members: tuple[str, ...]


def check_cluster_name(name: str) -> None:
    """Raises ValueError for what cannot name a cluster."""
    if not _NAME.fullmatch(name):
        raise ValueError("--ray-cluster must be 1 to 64 of A-Z a-z 0-9 . _ -, a letter or digit first")


def check_address(address: str) -> None:
    """Raises ValueError for what cannot be Ray's address. Empty is the Ray of this host."""
    if address and not _ADDRESS.fullmatch(address):
        raise ValueError(f"--ray-address must be HOST:PORT of Ray's head, not {address!r}")


def actor_name(cluster: str, process: str) -> str:
    """`main/decode-0`: of a process's actor, in our namespace."""
    return f"{cluster}/{process}"


def processes_of(cluster: str, actor_names: Sequence[str]) -> list[str]:
    """The processes of this cluster among actors of our namespace, in order."""
    prefix = actor_name(cluster, "")
    return in_order(name.removeprefix(prefix) for name in actor_names if name.startswith(prefix))


def in_order(processes: Iterable[str]) -> list[str]:
    """The router, then workers as they are numbered."""
    return sorted(processes, key=_order)


def plan_groups(cluster: str, role: Role, shape: WorkerShape, members: Sequence[str]) -> list[GroupPlan]:
    """The groups for workers that start together: one each, or one for all where they are to lie so and so."""
    if shape.place == EACH:
        return [GroupPlan(actor_name(cluster, name), "PACK", shape.bundle, (name,)) for name in members]
    if not members:
        return []
    # Named after its first member: a later group of this pool has other members as long as this one lives.
    name = f"{actor_name(cluster, members[0])}+{len(members) - 1}"
    return [GroupPlan(name, STRATEGIES[shape.place], shape.bundle, tuple(members))]


def no_room(
    missing: Sequence[GroupPlan], timeout_s: float, nodes: Mapping[str, Mapping[str, float]], free: Mapping[str, float]
) -> ResourcesError:
    """`nodes`: what each node has in all, by its address; `free`: what is unused in the whole cluster."""
    asked = "; ".join(
        f"{', '.join(plan.members)}: {_amounts(plan.bundle)}{' each' if len(plan.members) > 1 else ''}"
        + (f", {plan.strategy.lower().replace('_', '-')}" if len(plan.members) > 1 else "")
        for plan in missing
    )
    there = "; ".join(f"node {address}: {_amounts(total)}" for address, total in sorted(nodes.items())) or "no node"
    return ResourcesError(
        f"Ray found no room within {timeout_s:g} s for {asked}. There is {there}; unused in all: {_amounts(free)}. "
        "Ask for less with --prefill-shape and --decode-shape, or join more nodes"
    )


def _amounts(resources: Mapping[str, float]) -> str:
    """CPUs, GPUs and kinds of accelerators; memory and Ray's inner resources say nothing here."""
    shown = {
        name: amount for name, amount in resources.items() if name in ("CPU", "GPU") or name.startswith("accelerator_")
    }
    words = [
        f"{name} {amount:g}" if name in ("CPU", "GPU") else f"a node with {name.partition(':')[2]}"
        for name, amount in sorted(shown.items())
    ]
    return ", ".join(words) or "nothing"


def _order(process: str) -> tuple[int, str, int]:
    role, _, index = process.rpartition("-")
    if role not in get_args(Role) or not index.isdigit():
        return (0, process, 0)
    return (1 + get_args(Role).index(role), "", int(index))

"""Flags of the commands that can be about a cluster in Ray, and how they get at it."""

import argparse
import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from kvferry.console import Console
from kvferry.launchers.launcher import ClusterEvent
from kvferry.launchers.ray_cluster import RayCluster
from kvferry.launchers.ray_link import RayLink, connect
from kvferry.launchers.ray_shapes import RayOptions, WorkerShape, check_address, check_cluster_name, parse_shape

_T = TypeVar("_T")
_SHAPE_HELP = "What each takes and where it goes: cpus=N,gpus=N,accelerator=TYPE,place=each|pack|spread|strict-pack|strict-spread."  # fmt: skip # noqa: E501


def add_ray_arguments(parser: argparse.ArgumentParser, *, address_flags: tuple[str, ...] = ("--ray-address",)) -> None:
    """Which cluster, in which Ray."""
    group = parser.add_argument_group("Ray")
    group.add_argument("--ray", action=argparse.BooleanOptionalAction, default=False, help="A cluster in Ray, not one of this machine alone.")  # fmt: skip # noqa: E501
    group.add_argument(*address_flags, dest="ray_address", default="", metavar="HOST:PORT", help="Ray's address. Default: the Ray that this machine is a node of.")  # fmt: skip # noqa: E501
    group.add_argument("--ray-cluster", default="main", metavar="NAME", help="Name among the kvferry clusters in that Ray. Default: %(default)s.")  # fmt: skip # noqa: E501


def add_placement_arguments(parser: argparse.ArgumentParser) -> None:
    """What `up` has besides."""
    group = parser.add_argument_group("placement in Ray")
    for role in ("prefill", "decode"):
        group.add_argument(f"--{role}-shape", default="", metavar="SHAPE", help=f"{_SHAPE_HELP} Default: cpus=1,place=each.")  # fmt: skip # noqa: E501
    group.add_argument("--router-cpus", type=float, default=1.0, metavar="N", help="CPUs of this node that the router takes. Default: %(default)g.")  # fmt: skip # noqa: E501
    group.add_argument("--placement-timeout-s", "--placement-timeout", type=float, default=60.0, metavar="SECONDS", help="Longest wait for room in Ray. Default: %(default)g.")  # fmt: skip # noqa: E501
    group.add_argument("--detach", action=argparse.BooleanOptionalAction, default=False, help="Return when it serves; `kvferry down --ray` ends it.")  # fmt: skip # noqa: E501


def ray_options(arguments: argparse.Namespace) -> RayOptions:
    """What the flags of `up` say. Raises ValueError naming the flag."""
    options = RayOptions(
        address=arguments.ray_address,
        cluster=arguments.ray_cluster,
        prefill=_shape("--prefill-shape", arguments.prefill_shape),
        decode=_shape("--decode-shape", arguments.decode_shape),
        router_cpus=arguments.router_cpus,
        placement_timeout_s=arguments.placement_timeout_s,
    )
    options.validate()
    return options


def with_ray_cluster(
    arguments: argparse.Namespace,
    on_event: Callable[[ClusterEvent], None],
    use: Callable[[RayCluster], Awaitable[_T]],
    *,
    link: RayLink | None = None,
) -> _T:
    """Run `use` on the cluster that the flags name, in an event loop of its own. Main thread.

    Raises ValueError for a bad name, LaunchError when Ray or the cluster does not answer, and what `use` raises.
    """
    check_cluster_name(arguments.ray_cluster)
    check_address(arguments.ray_address)
    joined = link or connect(RayOptions(address=arguments.ray_address, cluster=arguments.ray_cluster))
    try:
        return asyncio.run(_attached(joined, arguments.ray_cluster, on_event, use))
    finally:
        joined.close()


def event_line(console: Console) -> Callable[[ClusterEvent], None]:
    """Tells a person what happens, a line each."""

    def show(event: ClusterEvent) -> None:
        console.emit({"event": event.kind, "name": event.name, "text": event.text})
        console.say(f"{event.name}: {event.kind}, {event.text}")

    return show


async def _attached(
    link: RayLink, name: str, on_event: Callable[[ClusterEvent], None], use: Callable[[RayCluster], Awaitable[_T]]
) -> _T:
    cluster = await RayCluster.attach(link, name, on_event)
    try:
        return await use(cluster)
    finally:
        await cluster.leave()


def _shape(flag: str, text: str) -> WorkerShape:
    try:
        return parse_shape(text)
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from None

"""`kvferry status`: workers, their pools, and what is in flight."""

import argparse
from dataclasses import asdict, dataclass
from typing import Any

from kvferry.client.types import ClusterState, WorkerState
from kvferry.commands.base import Command, add_cluster_arguments, connect
from kvferry.commands.in_ray import add_ray_arguments, with_ray_cluster
from kvferry.console import Console
from kvferry.launchers.launcher import ROUTER
from kvferry.launchers.ray_cluster import RayCluster
from kvferry.launchers.ray_node import NodeFacts

_PROCESS_HEADER = ("process", "node", "pid", "running", "starts", "devices", "group")
_HEADER = ("worker", "role", "state", "pid", "address", "free", "cached", "used", "quar.", "total", "run", "wait", "recv", "steps")  # fmt: skip # noqa: E501


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_cluster_arguments(parser)
    add_ray_arguments(parser)
    parser.add_argument("--log-lines", type=int, default=0, metavar="N", help="With --ray, so many of the last lines that each process has written. Default: %(default)s.")  # fmt: skip # noqa: E501


def _run(arguments: argparse.Namespace, console: Console) -> int:
    if arguments.ray:
        found = with_ray_cluster(arguments, lambda event: None, lambda cluster: _look(cluster, arguments.log_lines))
        show_processes(found, console)
        arguments.address = arguments.address or found.grpc_address
        if not arguments.address:
            console.complain("its router does not run now")
            return 1
    with connect(arguments) as client:
        state = client.cluster_state()
        address = client.address
    console.emit(state_dict(state))
    console.say(f"{state.model} at {address} (router {state.router_id})")
    console.say(f"requests: {state.requests_in_flight} in flight, {state.requests_queued} of them queued")
    if state.workers:
        console.say()
        console.table([_HEADER, *map(_row, state.workers)])
    else:
        console.say("no worker is attached")
    return 0


@dataclass(frozen=True, slots=True)
class Found:
    """What Ray's actors tell: facts of each process, or why there are none; last lines of their logs."""

    processes: dict[str, NodeFacts | str]
    logs: dict[str, str]
    grpc_address: str


async def _look(cluster: RayCluster, log_lines: int) -> Found:
    processes, logs = await cluster.facts(), {}
    for name, facts in processes.items():
        if log_lines and isinstance(facts, NodeFacts):
            logs[name] = await cluster.log_tail(name, log_lines)
    router = processes.get(ROUTER)
    serves = isinstance(router, NodeFacts) and router.running
    return Found(processes, logs, cluster.grpc_address if serves else "")


def show_processes(found: Found, console: Console) -> None:
    """A row for each process, then the logs."""
    console.emit(
        {
            "processes": {
                name: asdict(facts) if isinstance(facts, NodeFacts) else {"name": name, "problem": facts}
                for name, facts in found.processes.items()
            },
            "logs": found.logs,
        }
    )
    console.table([_PROCESS_HEADER, *(_process_row(name, facts) for name, facts in found.processes.items())])
    for name, log in found.logs.items():
        console.say(f"\n{name}:\n{log}")
    console.say()


def _process_row(name: str, facts: NodeFacts | str) -> tuple[str, ...]:
    if isinstance(facts, str):
        return (name, facts)
    running = "yes" if facts.running else "no"
    return (name, facts.host, str(facts.pid), running, str(facts.starts), facts.devices or "-", facts.group or "-")


def state_dict(state: ClusterState) -> dict[str, Any]:
    """Every field by its proto name, zeros included."""
    return {
        "model": state.model,
        "router_id": state.router_id,
        "requests_in_flight": state.requests_in_flight,
        "requests_queued": state.requests_queued,
        "workers": [asdict(worker) for worker in state.workers],
    }


def _row(worker: WorkerState) -> tuple[str, ...]:
    counts = (
        worker.blocks_free,
        worker.blocks_cached,
        worker.blocks_used,
        worker.blocks_quarantined,
        worker.blocks_total,
        worker.sequences_running,
        worker.sequences_waiting,
        worker.sequences_receiving,
        worker.steps,
    )
    return (worker.worker_id, worker.role, worker.state, str(worker.pid), worker.address, *map(str, counts))


COMMAND = Command("status", "Show workers, pools and requests in flight.", _add_arguments, _run)

"""`kvferry status`: workers, their pools, and what is in flight."""

import argparse
from dataclasses import asdict
from typing import Any

from kvferry.client_types import ClusterState, WorkerState
from kvferry.commands.base import Command, add_cluster_arguments, connect
from kvferry.console import Console

_HEADER = ("worker", "role", "state", "pid", "address", "free", "cached", "used", "quar.", "total", "run", "wait", "recv", "steps")  # fmt: skip # noqa: E501


def _run(arguments: argparse.Namespace, console: Console) -> int:
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


COMMAND = Command("status", "Show workers, pools and requests in flight.", add_cluster_arguments, _run)

"""`kvferry restart --rolling`: the processes of a running cluster anew, one at a time, without a request lost."""

import argparse
import asyncio
from typing import Any

from kvferry.commands.base import Command, absolute_path
from kvferry.commands.in_ray import add_ray_arguments, event_line, with_ray_cluster
from kvferry.console import Console
from kvferry.control import send_order
from kvferry.run_dir import RunDir, live_state, newest_live_state
from kvferry.scaling.elasticity import replace_workers
from kvferry_rpc.common_pb2 import ErrorCode
from runtime.errors import KvferryError


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rolling", action="store_true", required=True, help="Start each process's successor before the process leaves, one after the other, the router last; in Ray the workers alone. The only way there is.")  # fmt: skip # noqa: E501
    parser.add_argument("--state-dir", type=absolute_path, metavar="PATH", help="State directory of a cluster of this machine. Default: the one that was started last.")  # fmt: skip # noqa: E501
    add_ray_arguments(parser)


def _run(arguments: argparse.Namespace, console: Console) -> int:
    if not arguments.ray:
        state = live_state(arguments.state_dir) if arguments.state_dir else newest_live_state()
        if state is None:
            raise KvferryError(ErrorCode.UNAVAILABLE, "no running cluster found on this machine")
        if "ray_cluster" not in state:
            path = RunDir.at(state).control_path
            done = asyncio.run(send_order(path, {"order": "restart"}, console.say))
            return _tell(done, "and the router", console)
        arguments.ray_cluster, arguments.ray_address = state["ray_cluster"], state["ray_address"]
    replaced = with_ray_cluster(arguments, event_line(console), lambda cluster: replace_workers(cluster, console.say))
    return _tell({"replaced": replaced}, "and not the router", console)


def _tell(done: dict[str, Any], router: str, console: Console) -> int:
    console.emit({"event": "restarted", **done})
    console.say(f"restarted: {', '.join(f'{old} by {new}' for old, new in done['replaced'].items())}, {router}")
    return 0


COMMAND = Command("restart", "Restart a running cluster, process by process.", _add_arguments, _run)

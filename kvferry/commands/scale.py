"""`kvferry scale`: more or fewer workers of a running cluster, without cutting a stream."""

import argparse
import asyncio
from typing import Any

from kvferry.commands.base import Command, absolute_path
from kvferry.commands.in_ray import add_ray_arguments, event_line, with_ray_cluster
from kvferry.console import Console
from kvferry.control import send_order
from kvferry.run_dir import RunDir, live_state, newest_live_state
from kvferry.scaling.elasticity import scale_cluster
from kvferry_rpc.common_pb2 import ErrorCode
from runtime.errors import KvferryError


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prefill-workers", "--prefill", type=int, metavar="N", help="How many prefill workers. Default: as many as there are.")  # fmt: skip # noqa: E501
    parser.add_argument("--decode-workers", "--decode", type=int, metavar="N", help="How many decode workers. Default: as many as there are.")  # fmt: skip # noqa: E501
    parser.add_argument("--state-dir", type=absolute_path, metavar="PATH", help="State directory of a cluster of this machine. Default: the one that was started last.")  # fmt: skip # noqa: E501
    add_ray_arguments(parser)


def _run(arguments: argparse.Namespace, console: Console) -> int:
    prefill, decode = arguments.prefill_workers, arguments.decode_workers
    if prefill is None and decode is None:
        raise ValueError("say how many: --prefill N, --decode N, or both")
    if not arguments.ray:
        state = live_state(arguments.state_dir) if arguments.state_dir else newest_live_state()
        if state is None:
            raise KvferryError(ErrorCode.UNAVAILABLE, "no running cluster found on this machine")
        if "ray_cluster" not in state:
            order = {"order": "scale", "prefill": prefill, "decode": decode}
            path = RunDir.at(state).control_path
            return _tell(asyncio.run(send_order(path, order, console.say)), console)
        arguments.ray_cluster, arguments.ray_address = state["ray_cluster"], state["ray_address"]
    changes = with_ray_cluster(
        arguments, event_line(console), lambda cluster: scale_cluster(cluster, prefill, decode, console.say)
    )
    return _tell(changes, console)


def _tell(changes: dict[str, Any], console: Console) -> int:
    console.emit({"event": "scaled", **changes})
    words = [f"{what} {', '.join(names)}" for what, names in changes.items() if names]
    console.say("; ".join(words) or "nothing to do")
    return 0


COMMAND = Command("scale", "Change how many workers a running cluster has.", _add_arguments, _run)

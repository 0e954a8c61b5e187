"""`kvferry restart --rolling`: every process of a running local cluster anew, one at a time, without a request lost."""

import argparse
import asyncio

from kvferry.commands.base import Command, absolute_path
from kvferry.console import Console
from kvferry.control import send_order
from kvferry.run_dir import RunDir, live_state, newest_live_state
from kvferry_rpc.common_pb2 import ErrorCode
from runtime.errors import KvferryError


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rolling", action="store_true", required=True, help="Start each process's successor before the process leaves, one after the other, the router last. The only way there is.")  # fmt: skip # noqa: E501
    parser.add_argument("--state-dir", type=absolute_path, metavar="PATH", help="State directory of a cluster of this machine. Default: the one that was started last.")  # fmt: skip # noqa: E501


def _run(arguments: argparse.Namespace, console: Console) -> int:
    state = live_state(arguments.state_dir) if arguments.state_dir else newest_live_state()
    if state is None:
        raise KvferryError(ErrorCode.UNAVAILABLE, "no running cluster found on this machine")
    if "ray_cluster" in state:
        raise KvferryError(ErrorCode.INVALID_REQUEST, "the cluster found runs in Ray; restart is for one machine")
    path = RunDir.at(state).control_path
    done = asyncio.run(send_order(path, {"order": "restart"}, console.say))
    console.emit({"event": "restarted", **done})
    console.say(f"restarted: {', '.join(f'{old} by {new}' for old, new in done['replaced'].items())}, and the router")
    return 0


COMMAND = Command("restart", "Restart a running cluster, process by process.", _add_arguments, _run)

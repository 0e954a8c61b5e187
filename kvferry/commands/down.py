"""`kvferry down`: drain and stop a running cluster from another terminal."""

import argparse
import os
import signal
import time
from contextlib import suppress

from kvferry.commands.base import Command, absolute_path
from kvferry.commands.in_ray import add_ray_arguments, event_line, with_ray_cluster
from kvferry.console import Console
from kvferry.run_dir import live_state, newest_live_state, process_start_ticks
from kvferry_rpc.common_pb2 import ErrorCode
from runtime.errors import KvferryError

_LOOK_INTERVAL_S = 0.1


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--state-dir", type=absolute_path, metavar="PATH", help="State directory of a cluster of this machine. Default: the one that was started last.")  # fmt: skip # noqa: E501
    parser.add_argument("--timeout", type=float, default=120.0, metavar="SECONDS", help="Longest wait for a cluster of this machine to end. Default: %(default)g.")  # fmt: skip # noqa: E501
    add_ray_arguments(parser)


def _run(arguments: argparse.Namespace, console: Console) -> int:
    if not arguments.ray:
        state = live_state(arguments.state_dir) if arguments.state_dir else newest_live_state()
        if state is None:
            raise KvferryError(ErrorCode.UNAVAILABLE, "no running cluster found on this machine")
        if "ray_cluster" not in state:
            return _stop_local(int(state["launcher_pid"]), int(state["launcher_started"]), arguments.timeout, console)
        arguments.ray_cluster, arguments.ray_address = state["ray_cluster"], state["ray_address"]
    clean = with_ray_cluster(arguments, event_line(console), lambda cluster: cluster.stop())
    return 0 if clean else 1


def _stop_local(pid: int, started: int, timeout_s: float, console: Console) -> int:
    """Tell the launcher, which stops everything in order; a second call while it drains ends it at once."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    console.say(f"draining; the launcher is process {pid}")
    deadline = time.monotonic() + timeout_s
    while process_start_ticks(pid) == started:
        if time.monotonic() > deadline:
            console.complain(f"the launcher, process {pid}, still drains after {timeout_s:g} s")
            return 1
        time.sleep(_LOOK_INTERVAL_S)
    console.emit({"event": "stopped", "launcher_pid": pid})
    return 0


COMMAND = Command("down", "Drain and stop a running cluster.", _add_arguments, _run)

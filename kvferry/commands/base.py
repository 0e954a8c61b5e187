"""What commands have in common: how one is declared, how it finds a running cluster."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvferry.client import DEFAULT_TIMEOUT_S, Client
from kvferry.console import Console
from kvferry.run_dir import live_state, newest_live_state
from kvferry_rpc.common_pb2 import ErrorCode
from runtime.errors import KvferryError


@dataclass(frozen=True, slots=True)
class Command:
    """One subcommand. `run` returns the exit status and may raise KvferryError or LaunchError, which end with 1."""

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Console], int]


def absolute_path(text: str) -> Path:
    """Type of a flag that names a path: children of the launcher run in another directory."""
    return Path(text).expanduser().absolute()


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags by which a running cluster is found."""
    parser.add_argument("--address", metavar="HOST:PORT", help="gRPC address of the router. Default: the cluster that `kvferry up` started last on this machine, unless it was given a --state-dir.")  # fmt: skip # noqa: E501
    parser.add_argument(
        "--state-dir",
        type=absolute_path,
        metavar="PATH",
        help="State directory of a local cluster, as given to `kvferry up`.",
    )
    parser.add_argument("--timeout", type=float, default=DEFAULT_TIMEOUT_S, metavar="SECONDS", help="Longest wait for an answer. Default: %(default)g.")  # fmt: skip # noqa: E501


def connect(arguments: argparse.Namespace) -> Client:
    """A client of the cluster that the flags name. Raises KvferryError when no cluster can be found."""
    return Client(find_address(arguments.address, arguments.state_dir), timeout_s=arguments.timeout)


def find_address(address: str | None, state_dir: Path | None) -> str:
    """The gRPC address given, or that of a live local cluster. Raises KvferryError (UNAVAILABLE)."""
    if address:
        return address
    state = live_state(state_dir) if state_dir else newest_live_state()
    if state is None:
        where = f"in {state_dir}" if state_dir else "on this machine"
        raise KvferryError(
            ErrorCode.UNAVAILABLE,
            f"no running cluster found {where}: start one with `kvferry up --model MODEL`, "
            "or name one with --address HOST:PORT or --state-dir PATH",
        )
    return str(state["grpc_address"])

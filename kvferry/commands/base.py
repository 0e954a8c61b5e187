"""What commands have in common: how one is declared, how it finds a running cluster."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvferry.client import DEFAULT_TIMEOUT_S, ONE_TRY, Client
from kvferry.console import Console
from kvferry.run_dir import live_state, newest_live_state
from kvferry_rpc.common_pb2 import ErrorCode
from runtime.errors import KvferryError
from runtime.tls import TlsFiles

_MAX_KEY_BYTES = 512


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
    parser.add_argument("--tls-ca-file", type=absolute_path, metavar="PATH", help="Speak TLS; who has signed the router's certificate (PEM).")  # fmt: skip # noqa: E501
    parser.add_argument("--tls-cert-file", type=absolute_path, metavar="PATH", help="Certificate (PEM) for a router that asks for one.")  # fmt: skip # noqa: E501
    parser.add_argument("--tls-key-file", type=absolute_path, metavar="PATH", help="Its private key (PEM).")
    parser.add_argument("--api-key-file", type=absolute_path, metavar="PATH", help="File with the API key, if the router wants one.")  # fmt: skip # noqa: E501
    parser.add_argument("--timeout", type=float, default=DEFAULT_TIMEOUT_S, metavar="SECONDS", help="Longest wait for an answer. Default: %(default)g.")  # fmt: skip # noqa: E501


def connect(arguments: argparse.Namespace) -> Client:
    """A client of the cluster that the flags name. It tries each call once: a person at a terminal is to be told.

    Raises KvferryError when no cluster can be found, and ValueError for files that are no good.
    """
    address = find_address(arguments.address, arguments.state_dir)
    files = TlsFiles(arguments.tls_cert_file, arguments.tls_key_file, arguments.tls_ca_file)
    try:
        api_key = read_api_key(arguments.api_key_file) if arguments.api_key_file else ""
        tls = files if files.paths else None
        return Client(address, timeout_s=arguments.timeout, tls=tls, api_key=api_key, retry=ONE_TRY)
    except OSError as error:
        raise ValueError(str(error)) from None


def read_api_key(path: Path) -> str:
    """The key in a file, without surrounding white space. Raises OSError, and ValueError when there is none in it."""
    with path.open("rb") as file:
        data = file.read(_MAX_KEY_BYTES + 1).strip()
    if not data or len(data) > _MAX_KEY_BYTES or not data.isascii() or len(data.split()) != 1:
        raise ValueError(f"{path} does not hold an API key")
    return data.decode()


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

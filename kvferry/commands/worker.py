"""`kvferry worker`: what one worker of a running cluster is told to do: drain, work again, take the other role."""

import argparse
import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from kvferry.commands.base import Command, absolute_path
from kvferry.commands.passed import add_passed_flags, passed
from kvferry.console import Console
from kvferry.run_dir import live_state, newest_live_state
from kvferry.scaling.fleet_admin import FleetAdmin
from kvferry.scaling.fleet_view import FleetView
from kvferry_rpc.common_pb2 import ErrorCode
from runtime.clock import SystemClock
from runtime.errors import KvferryError
from runtime.secret import read_secret_file
from runtime.tls import InternalTlsOptions, internal_channel_tls

_ACTIONS = ("list", "drain", "undrain", "prefill", "decode")
_INTERNAL_TLS = ("internal_tls_cert_file", "internal_tls_key_file", "internal_tls_ca_file", "internal_tls_name")
_HEADER = ("worker", "role", "state", "requests", "sequences", "tokens waiting", "blocks used")

_T = TypeVar("_T")


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=_ACTIONS, help="list; drain: take no new work, what runs goes on or moves; undrain: take work again; prefill, decode: drain, then go on in this role.")  # fmt: skip # noqa: E501
    parser.add_argument("worker", nargs="?", help="Which one; all actions but list need it.")
    parser.add_argument("--force", action="store_true", help="Even if no other worker is ready to do its part.")
    parser.add_argument("--state-dir", type=absolute_path, metavar="PATH", help="State directory of a cluster of this machine. Default: the one that was started last.")  # fmt: skip # noqa: E501
    parser.add_argument("--internal-address", default="", metavar="HOST:PORT[,...]", help="Where workers attach, of a cluster elsewhere.")  # fmt: skip # noqa: E501
    parser.add_argument("--cluster-secret-file", type=absolute_path, metavar="PATH", help="The secret of that cluster.")
    add_passed_flags(parser, InternalTlsOptions, _INTERNAL_TLS)


def _run(arguments: argparse.Namespace, console: Console) -> int:
    if (arguments.action == "list") is not (arguments.worker is None):
        raise ValueError("name a worker, for every action but list")
    if arguments.action == "list":
        _show(asyncio.run(_with_admin(arguments, FleetAdmin.view)), console)
    else:
        asyncio.run(_with_admin(arguments, lambda admin: _order(admin, arguments)))
        console.emit({"event": "ordered", "worker": arguments.worker, "action": arguments.action})
        console.say(f"{arguments.worker} is told; `kvferry status` shows what becomes of it")
    return 0


async def _order(admin: FleetAdmin, arguments: argparse.Namespace) -> None:
    name, action, force = arguments.worker, arguments.action, arguments.force
    if action in ("drain", "undrain"):
        await admin.drain(name, over=action == "undrain", force=force)
    else:
        await admin.set_role(name, action, force=force)


async def _with_admin(arguments: argparse.Namespace, use: Callable[[FleetAdmin], Awaitable[_T]]) -> _T:
    addresses, secret_file = _find(arguments)
    options = InternalTlsOptions(**passed(arguments, _INTERNAL_TLS))
    options.validate()
    try:
        secret, tls = read_secret_file(secret_file), internal_channel_tls(options, SystemClock())
    except OSError as error:
        raise ValueError(str(error)) from None
    admin = FleetAdmin(addresses, secret, tls=tls)
    try:
        return await use(admin)
    finally:
        await admin.close()


def _find(arguments: argparse.Namespace) -> tuple[tuple[str, ...], Path]:
    if arguments.internal_address:
        if arguments.cluster_secret_file is None:
            raise ValueError("--internal-address needs --cluster-secret-file")
        return tuple(arguments.internal_address.split(",")), arguments.cluster_secret_file
    state = live_state(arguments.state_dir) if arguments.state_dir else newest_live_state()
    if state is None or "internal_addresses" not in state:
        where = "no running cluster found on this machine: name one with --internal-address"
        raise KvferryError(ErrorCode.UNAVAILABLE, where)
    return tuple(state["internal_addresses"]), Path(state["secret_file"])


def _show(view: FleetView, console: Console) -> None:
    rows: list[tuple[str, ...]] = [_HEADER]
    for one in view.workers:
        counts = (one.requests, one.sequences, one.tokens_waiting, one.blocks_used)
        rows.append((one.name, one.role, one.state, *map(str, counts)))
        keys = ("name", "role", "state", "requests", "sequences", "tokens_waiting", "blocks_used", "blocks_total")
        console.emit({key: getattr(one, key) for key in keys})
    console.table(rows)


COMMAND = Command("worker", "Show workers, drain one, or change its role.", _add_arguments, _run)

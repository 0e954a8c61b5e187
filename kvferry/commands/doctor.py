"""`kvferry doctor`: what this machine has, what is missing, and the command that gets it; with --model, how a model
would be served here; and, with a second machine that runs `kvferry doctor --listen`, which KV transports work between
the two and how fast they are."""

import argparse
import asyncio
import signal
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kv_transfer.options import AUTO, TransferOptions
from kv_transfer.region import available_memory_bytes
from kvferry.commands.base import Command, absolute_path
from kvferry.console import Console
from kvferry.machine import Level, examine
from kvferry.model_report import model_lines, report_model
from kvferry.peer_listener import ProbeListener
from kvferry.peer_probe import PeerReport, Trial, probe
from kvferry.probe_wire import DEFAULT_PORT, EndReport
from kvferry.references import run_in_process
from runtime.errors import ErrorCode, KvferryError
from runtime.grpc_life import join_host_port
from runtime.secret import read_secret_file

_MARKS = {Level.OK: "ok", Level.NOTE: "note", Level.WARNING: "warning", Level.MISSING: "MISSING"}
_LOOPBACK = "127.0.0.1"


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-devices", action="store_true", help="Do not load torch to look for GPUs.")
    ends = parser.add_mutually_exclusive_group()
    ends.add_argument("--model", metavar="MODEL", help="Say which code would run this model, what its weights and its KV cost, or why it cannot be served. Nothing is written.")  # fmt: skip # noqa: E501
    ends.add_argument(
        "--peer", metavar="HOST[:PORT]", help="Try every KV transport with the `kvferry doctor --listen` there."
    )
    ends.add_argument(
        "--listen",
        nargs="?",
        const=_LOOPBACK,
        metavar="HOST[:PORT]",
        help=f"Be the other end of --peer until Ctrl-C, at the address by which that one reaches this host. Default: {_LOOPBACK}:{DEFAULT_PORT}.",  # noqa: E501
    )
    parser.add_argument(
        "--cluster-secret-file",
        type=absolute_path,
        metavar="PATH",
        help="With --peer or --listen: the file with the secret that both ends share.",
    )
    parser.add_argument(
        "--transports",
        default=AUTO,
        metavar="NAME[,...]",
        help="With --peer or --listen: as for workers. Default: %(default)s.",
    )


def _run(arguments: argparse.Namespace, console: Console) -> int:
    if arguments.peer or arguments.listen:
        secret = _secret(arguments.cluster_secret_file)
        options = TransferOptions(transports=tuple(arguments.transports.split(",")))
        options.validate()
        if arguments.peer:
            return asyncio.run(_run_peer(arguments.peer, secret, options, console))
        return asyncio.run(_run_listener(arguments.listen, secret, options, console))
    if arguments.model:
        return _run_model(arguments.model, console)
    return _run_here(arguments, console)


def _run_here(arguments: argparse.Namespace, console: Console) -> int:
    findings = examine(look_for_devices=not arguments.no_devices)
    missing = [finding for finding in findings if finding.level is Level.MISSING]
    console.emit(
        {
            "ok": not missing,
            "findings": [{**asdict(finding), "level": finding.level.value} for finding in findings],
        }
    )
    rows = []
    for finding in findings:
        rows.append((finding.name, _MARKS[finding.level], finding.text))
        if finding.remedy:
            rows.append(("", "", f"-> {finding.remedy}"))
    console.table(rows)
    console.say(f"\n{len(missing)} needed things are missing." if missing else "\nEverything needed is here.")
    return 1 if missing else 0


def _run_model(model: str, console: Console) -> int:
    report = run_in_process(report_model, model, available_memory_bytes()).result()
    console.emit(report)
    for line in model_lines(report):
        console.say(line) if isinstance(line, str) else console.table(line)
    return 0 if report["ok"] else 1


async def _run_listener(where: str, secret: bytes, options: TransferOptions, console: Console) -> int:
    host, port = split_address(where)
    if host in ("0.0.0.0", "::"):
        raise ValueError("--listen is where the peer reaches this host: a wildcard address cannot be told to it")
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    listener = ProbeListener(host, port, secret, options)
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    try:
        address = await listener.start()
        console.emit({"event": "listening", "address": address, **_end_dict(listener.report)})
        console.say(
            f"listening at {address} with {', '.join(listener.report.transports)}; Ctrl-C ends it. On the other host:"
        )
        console.say(f"  kvferry doctor --peer {address} --cluster-secret-file PATH")
        await stop.wait()
    except OSError as error:
        raise KvferryError(ErrorCode.UNAVAILABLE, str(error)) from error
    finally:
        await listener.close()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
    return 0


async def _run_peer(where: str, secret: bytes, options: TransferOptions, console: Console) -> int:
    report = await probe(join_host_port(*split_address(where)), secret, options)
    console.emit(
        {
            "ok": report.chosen != "",
            "own": _end_dict(report.own),
            "peer": _end_dict(report.peer),
            "trials": [{**asdict(trial), "works": trial.works} for trial in report.trials],
            "chosen": report.chosen,
            "expected": report.expected,
            "warning": report.warning,
        }
    )
    for line in peer_lines(report):
        console.say(line) if isinstance(line, str) else console.table(line)
    if report.warning:
        console.complain(f"WARNING: {report.warning}")
    return 0 if report.chosen else 1


def peer_lines(report: PeerReport) -> "list[str | list[tuple[str, ...]]]":
    """What a person reads: lines, and one table."""
    rows: list[tuple[str, ...]] = [("transport", "works", "GB/s", "fixed ms", "detail"), *map(_row, report.trials)]
    return [
        f"here: {_end_text(report.own)}",
        f"peer: {_end_text(report.peer)}",
        "",
        rows,
        "",
        f"chosen: {report.chosen or 'none'}; expected: {report.expected or 'none'}",
    ]


def _row(trial: Trial) -> tuple[str, ...]:
    speed = "" if trial.gigabytes_per_s is None else f"{trial.gigabytes_per_s:.2f}"
    fixed = "" if trial.fixed_ms is None else f"{trial.fixed_ms:.1f}"
    return (trial.transport, "yes" if trial.works else "no", speed, fixed, trial.detail or trial.failure)


def _end_text(end: EndReport) -> str:
    rdma = f"RDMA by {', '.join(end.facts.rdma)}" if end.facts.rdma else "no RDMA"
    return f"{end.host_name}, kvferry {end.kvferry_version}, {rdma}"


def _end_dict(end: EndReport) -> dict[str, Any]:
    return {
        "host_name": end.host_name,
        "kvferry_version": end.kvferry_version,
        "transports": list(end.transports),
        "unusable": end.unusable,
        "rdma": list(end.facts.rdma),
    }


def split_address(text: str) -> tuple[str, int]:
    """HOST[:PORT], an IPv6 host in brackets. Raises ValueError."""
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, str(DEFAULT_PORT)
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{text!r}: an IPv6 address needs brackets")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{text!r} is not HOST[:PORT]")
    return host, int(port)


def _secret(path: Path | None) -> bytes:
    if path is None:
        raise ValueError(
            "--peer and --listen need --cluster-secret-file: `openssl rand -hex 32` makes one for both ends"
        )
    try:
        return read_secret_file(path)
    except OSError as error:
        raise ValueError(f"--cluster-secret-file: {error}") from error


COMMAND = Command("doctor", "Show what this machine has and what is missing.", _add_arguments, _run)

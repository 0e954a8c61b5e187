"""Flags of `kvferry up` and `kvferry demo` that say how KV may move between the workers."""

import argparse
from typing import Any, get_args

from kv_transfer.options import AUTO, TRANSPORTS, WireDtype

_BLOCK_SIZES = (8, 16, 32, 64, 128)


def add_transfer_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags; each goes to the processes that it concerns."""
    parser.add_argument(
        "--transports",
        "--transport",
        type=_names,
        default=(AUTO,),
        metavar="NAME[,...]",
        help=f"How KV may move: {AUTO} (all that are installed, the best that works), or some of {', '.join(TRANSPORTS)}. Default: {AUTO}.",  # noqa: E501
    )
    parser.add_argument(
        "--forbid-transports", type=_names, default=(), metavar="NAME[,...]", help="How KV may not move."
    )
    parser.add_argument(
        "--require-transport",
        type=_names,
        default=(),
        metavar="NAME[,...]",
        help="What KV must move over: anything else fails the request with --strict-handoff, and is a warning without.",
    )
    parser.add_argument(
        "--reuse-decode-kv",
        action=argparse.BooleanOptionalAction,
        help="Let prefill workers pull KV that only decode workers have cached. Default: they may.",
    )
    for role in ("prefill", "decode"):
        parser.add_argument(
            f"--{role}-block-size",
            type=int,
            choices=_BLOCK_SIZES,
            metavar="N",
            help=f"Tokens a KV block of {role} workers. Default: as --block-size.",
        )
    parser.add_argument(
        "--kv-wire-dtype",
        choices=[name for name in get_args(WireDtype) if name],
        help="Element type of KV on the wire only. Default: what the decode worker keeps.",
    )
    parser.add_argument(
        "--max-backlog-mb", type=int, metavar="MB", help="Most KV on its way from one worker to another."
    )
    parser.add_argument(
        "--lease-s", type=float, metavar="SECONDS", help="How long blocks are held for a writer that is silent."
    )


def transfer_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """The fields of a ClusterSpec that these flags set."""
    return {
        "transports": arguments.transports,
        "forbid_transports": arguments.forbid_transports,
        "require_transport": arguments.require_transport,
        "reuse_decode_kv": arguments.reuse_decode_kv,
        "prefill_block_size": arguments.prefill_block_size,
        "decode_block_size": arguments.decode_block_size,
        "kv_wire_dtype": arguments.kv_wire_dtype or "",
        "max_backlog_mb": arguments.max_backlog_mb,
        "lease_s": arguments.lease_s,
    }


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())

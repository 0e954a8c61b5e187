"""Flags of `kvferry up` about what its processes tell: logs and traces, as router and workers have them."""

import argparse
from typing import Any

from kvferry.commands.base import absolute_path

_NAMES = ("log_level", "log_json", "access_log", "otlp_endpoint", "trace_file")


def add_observing_arguments(parser: argparse.ArgumentParser) -> None:
    """Logs and traces."""
    group = parser.add_argument_group("logs and traces")
    group.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="Least severe log lines. Default: %(default)s.",
    )
    group.add_argument("--log-json", action="store_true", help="Write log lines as JSON.")
    group.add_argument("--access-log", action="store_true", help="Let the router log a line for each request.")
    group.add_argument(
        "--otlp-endpoint",
        default="",
        metavar="URL",
        help="OTLP collector (gRPC) for traces, such as http://127.0.0.1:4317. Default: none.",
    )
    group.add_argument(
        "--trace-file", type=absolute_path, metavar="PATH", help="File that gets the traces of all processes, as JSON."
    )


def observing_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """The same as fields of a ClusterSpec."""
    return {name: getattr(arguments, name) for name in _NAMES}

"""Flags of `kvferry up` about what processes tell: logs and traces, as router and workers have them."""

import argparse
from typing import Any

from kvferry.commands.passed import add_passed_flags, passed
from router.config import RouterConfig

_NAMES = ("log_level", "log_json", "access_log", "otlp_endpoint", "trace_file")


def add_observing_arguments(parser: argparse.ArgumentParser) -> None:
    """Logs and traces."""
    add_passed_flags(parser.add_argument_group("logs and traces"), RouterConfig, _NAMES)


def observing_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """What was given, as fields of a ClusterSpec."""
    return passed(arguments, _NAMES)

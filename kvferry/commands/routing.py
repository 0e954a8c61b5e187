"""The router's own flags, on the command line of `up`."""

import argparse
from typing import Any

from kvferry.commands.passed import add_passed_flags, passed
from router.config import RouterConfig

ROUTER_FLAGS = (
    "router_processes",
    "process_port",
    "tool_parser",
    "reasoning_parser",
    "kv_forecast_tokens",
    "slo_interactive_ttft_s",
    "slo_interactive_tpot_s",
    "slo_batch_ttft_s",
    "slo_batch_tpot_s",
)


def add_router_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the router that the launcher need not understand; a configuration file can give all the others too."""
    add_passed_flags(parser.add_argument_group("router"), RouterConfig, ROUTER_FLAGS)


def router_flags(arguments: argparse.Namespace) -> dict[str, Any]:
    """What was given."""
    return passed(arguments, ROUTER_FLAGS)

"""The router's own flags, on the command line of `up`."""

import argparse
from dataclasses import fields

from kvferry.router_flags import RouterFlags
from runtime.config import flag_name


def add_router_arguments(parser: argparse.ArgumentParser) -> None:
    """One for each field of RouterFlags."""
    group = parser.add_argument_group("router")
    for one in fields(RouterFlags):
        facts, choices = one.metadata, one.metadata["choices"]
        metavar = None if choices else {int: "N", float: "SECONDS"}[facts["kind"]]
        group.add_argument(
            flag_name(one.name), type=facts["kind"], choices=choices, metavar=metavar, help=facts["help"]
        )


def router_flags(arguments: argparse.Namespace) -> RouterFlags:
    """What was given."""
    return RouterFlags(**{one.name: getattr(arguments, one.name) for one in fields(RouterFlags)})

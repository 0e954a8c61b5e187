"""Flags of `kvferry up` about who may come in, as the router has them."""

import argparse
from typing import Any

from kvferry.commands.passed import add_passed_flags, passed
from router.config import RouterConfig

_NAMES = (
    "api_keys_file",
    "protect_metrics",
    "tls_cert_file",
    "tls_key_file",
    "tls_client_ca_file",
    "internal_tls_cert_file",
    "internal_tls_key_file",
    "internal_tls_ca_file",
)


def add_door_arguments(parser: argparse.ArgumentParser) -> None:
    """API keys, and TLS of the public and the internal ports."""
    add_passed_flags(parser.add_argument_group("keys and TLS"), RouterConfig, _NAMES)


def door_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """What was given, as fields of a ClusterSpec."""
    return passed(arguments, _NAMES)

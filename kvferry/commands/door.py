"""Flags of `kvferry up` about who may come in, as the router has them."""

import argparse
from typing import Any

from kvferry.commands.base import absolute_path
from runtime.config import flag_name

_INTERNAL = {
    "internal_tls_cert_file": "Certificate (PEM) that router and workers show each other. Default: no TLS among them.",
    "internal_tls_key_file": "Its private key (PEM).",
    "internal_tls_ca_file": "Who has signed it (PEM).",
}
_NAMES = ("api_keys_file", "tls_cert_file", "tls_key_file", "tls_client_ca_file", "protect_metrics", *_INTERNAL)


def add_door_arguments(parser: argparse.ArgumentParser) -> None:
    """API keys, and TLS of the public and the internal ports."""
    group = parser.add_argument_group("keys and TLS")
    group.add_argument(
        "--api-keys-file",
        type=absolute_path,
        metavar="PATH",
        help="Who may ask; see `kvferry keys`. Default: everybody.",
    )
    group.add_argument("--protect-metrics", action="store_true", help="Ask for a key on /metrics too.")
    group.add_argument(
        "--tls-cert-file",
        type=absolute_path,
        metavar="PATH",
        help="Certificate chain (PEM) of both APIs. Default: no TLS.",
    )
    group.add_argument("--tls-key-file", type=absolute_path, metavar="PATH", help="Its private key (PEM).")
    group.add_argument(
        "--tls-client-ca-file", type=absolute_path, metavar="PATH", help="Who signs what gRPC clients must show (PEM)."
    )
    for name, help_text in _INTERNAL.items():
        group.add_argument(flag_name(name), type=absolute_path, metavar="PATH", help=help_text)


def door_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """The same as fields of a ClusterSpec."""
    return {name: getattr(arguments, name) for name in _NAMES}

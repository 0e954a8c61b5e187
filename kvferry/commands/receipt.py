"""`kvferry receipt ID`: the KV receipt of a finished request."""

import argparse

from kvferry.commands.base import Command, add_cluster_arguments, connect
from kvferry.console import Console
from kvferry.receipt_view import receipt_dict, receipt_rows


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", help="The request's id, as in its answer.")
    add_cluster_arguments(parser)


def _run(arguments: argparse.Namespace, console: Console) -> int:
    with connect(arguments) as client:
        receipt = client.receipt(arguments.id)
    console.emit(receipt_dict(receipt))
    console.table(receipt_rows(receipt))
    return 0


COMMAND = Command("receipt", "Show the KV receipt of a request.", _add_arguments, _run)

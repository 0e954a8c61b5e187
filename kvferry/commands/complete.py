"""`kvferry complete PROMPT`: continue a text as it stands, without a chat template."""

import argparse
import sys

from kvferry.client import text_request
from kvferry.commands.base import Command, add_cluster_arguments, connect
from kvferry.commands.generation import add_generation_arguments, apply_sampling, show_answer, stream_answer
from kvferry.console import Console


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", help="The text to continue; - reads standard input.")
    add_generation_arguments(parser, max_tokens=128)
    add_cluster_arguments(parser)


def _run(arguments: argparse.Namespace, console: Console) -> int:
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    with connect(arguments) as client:
        model = arguments.model or client.default_model()
        answer = stream_answer(client, apply_sampling(text_request(model, prompt), arguments), console)
    show_answer(answer, console, receipt=arguments.receipt)
    return 0 if answer.finish else 130


COMMAND = Command("complete", "Continue a text.", _add_arguments, _run)

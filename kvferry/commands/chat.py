"""`kvferry chat [PROMPT]`: talk with the model; with no prompt and a terminal, turn by turn."""

import argparse
import sys

from kvferry.client import Client, chat_request
from kvferry.commands.base import Command, add_cluster_arguments, connect
from kvferry.commands.generation import Answer, add_generation_arguments, apply_sampling, show_answer, stream_answer
from kvferry.console import Console
from kvferry.receipt_view import receipt_rows

_INTRODUCTION = "Empty line or Ctrl-D ends, Ctrl-C stops an answer, /new starts over, /receipt shows the last receipt."


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", help="What to say. Default: a conversation, or standard input if piped.")
    parser.add_argument("--system", metavar="TEXT", help="Instructions that precede the conversation.")
    add_generation_arguments(parser, max_tokens=512)
    add_cluster_arguments(parser)


def _run(arguments: argparse.Namespace, console: Console) -> int:
    with connect(arguments) as client:
        conversation = _Conversation(client, arguments, console)
        if arguments.prompt is None and console.is_interactive:
            return conversation.loop()
        prompt = arguments.prompt if arguments.prompt is not None else sys.stdin.read()
        answer = conversation.turn(prompt)
        show_answer(answer, console, receipt=arguments.receipt)
        return 0 if answer.finish else 130


class _Conversation:
    def __init__(self, client: Client, arguments: argparse.Namespace, console: Console) -> None:
        self._client = client
        self._arguments = arguments
        self._console = console
        self._model = arguments.model or client.default_model()
        self._messages: list[tuple[str, str]] = []
        self._last: Answer | None = None
        self._reset()

    def loop(self) -> int:
        self._console.say(f"{self._model} at {self._client.address}. {_INTRODUCTION}")
        while True:
            try:
                line = self._console.ask("> ")
            except KeyboardInterrupt:
                line = None
            if not line:
                return 0
            if line == "/new":
                self._reset()
            elif line == "/receipt":
                self._show_receipt()
            else:
                self._last = self.turn(line)
                if self._arguments.receipt:
                    self._show_receipt()

    def turn(self, prompt: str) -> Answer:
        """One question and its answer, which becomes part of the history unless it was cut."""
        messages = [*self._messages, ("user", prompt)]
        request = apply_sampling(chat_request(self._model, messages), self._arguments)
        answer = stream_answer(self._client, request, self._console)
        if answer.finish is not None:
            self._messages = [*messages, ("assistant", answer.text)]
        return answer

    def _reset(self) -> None:
        self._messages = [("system", self._arguments.system)] if self._arguments.system else []

    def _show_receipt(self) -> None:
        if self._last is None or self._last.finish is None:
            self._console.say("  no finished answer yet")
        else:
            self._console.table(receipt_rows(self._last.finish.receipt), indent="  ")


COMMAND = Command("chat", "Talk with the model.", _add_arguments, _run)

"""The one place that writes to standard output and asks the person in front of it."""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any


class Console:
    """Text for people, or with `as_json` one JSON object a line and nothing else on standard output."""

    def __init__(self, *, as_json: bool = False) -> None:
        self.as_json = as_json

    @property
    def is_interactive(self) -> bool:
        """Whether a person types the input and reads the output."""
        return sys.stdin.isatty() and sys.stdout.isatty() and not self.as_json

    def say(self, text: str = "") -> None:
        """One line for people; silent under --json."""
        if not self.as_json:
            print(text, flush=True)  # noqa: T201

    def stream(self, text: str) -> None:
        """A piece of a line for people, shown at once; silent under --json."""
        if not self.as_json:
            print(text, end="", flush=True)  # noqa: T201

    def emit(self, value: Mapping[str, Any]) -> None:
        """One JSON object on a line; silent for people."""
        if self.as_json:
            print(json.dumps(value, ensure_ascii=False), flush=True)  # noqa: T201

    def table(self, rows: Sequence[Sequence[str]], *, indent: str = "") -> None:
        """Rows in aligned columns for people."""
        for line in format_table(rows):
            self.say(indent + line)

    def complain(self, text: str) -> None:
        """One line on standard error, in both forms."""
        print(text, file=sys.stderr, flush=True)  # noqa: T201

    def ask(self, prompt: str) -> str | None:
        """One line typed by a person; None at the end of input."""
        try:
            return input(prompt)
        except EOFError:
            return None


def format_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines with columns aligned to the left, two spaces apart."""
    if not rows:
        return []
    widths = [max(len(row[column]) for row in rows if column < len(row)) for column in range(max(map(len, rows)))]
    return ["  ".join(cell.ljust(widths[column]) for column, cell in enumerate(row)).rstrip() for row in rows]

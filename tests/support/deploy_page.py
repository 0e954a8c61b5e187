"""The commands of docs/deploy.md, for the tests that type them."""

import shlex
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text()


def page_commands(section: str) -> list[list[str]]:
    """The words of what stands behind a prompt there, in order. Raises AssertionError for a section without any."""
    text = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    found = [shlex.split(line[2:]) for line in text.splitlines() if line.startswith("$ ")]
    assert found, section
    return found


def page_command(section: str, name: str) -> list[str]:
    """The words of the one command `kvferry NAME` there, without `kvferry`."""
    (words,) = [words for words in page_commands(section) if words[:2] == ["kvferry", name]]
    return words[1:]

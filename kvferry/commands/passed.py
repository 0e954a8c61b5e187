"""Flags of `kvferry up` that are a process's own: declared there, and passed on only when they are given."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runtime.config import add_flag
from runtime.config_options import options_of


def add_passed_flags(parser: argparse._ActionsContainer, config: type, names: Sequence[str]) -> None:
    """The options of these names, which `config` declares. None: the process's default holds. No lists."""
    options = {option.name: option for option in options_of(config)}
    for name in names:
        add_flag(parser, options[name], default=None)


def passed(arguments: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """Those that were given, by name; paths absolute, since children of the launcher run in another directory."""
    values = {name: getattr(arguments, name) for name in names}
    return {
        name: value.absolute() if isinstance(value, Path) else value
        for name, value in values.items()
        if value is not None
    }

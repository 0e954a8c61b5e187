"""One frozen dataclass a process, and the command-line flags made from it.

A field is a flag: `http_port: int = flag(8000, "Port of the HTTP API.")` gives `--http-port`. The defaults live in the
dataclass alone. There are no environment variables and no configuration files behind it.
"""

import argparse
import dataclasses
import json
import math
import sys
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar


class Config(Protocol):
    """A frozen dataclass that can check itself."""

    __dataclass_fields__: typing.ClassVar[dict[str, "dataclasses.Field[Any]"]]

    def validate(self) -> None:
        """Raise ValueError, naming the flag, when fields are out of range or do not go together."""
        ...


_C = TypeVar("_C", bound=Config)
_T = TypeVar("_T")


def flag(default: _T, help_text: str) -> _T:
    """A dataclass field with its default and its help. `default` must be immutable."""
    return dataclasses.field(default=default, metadata={"help": help_text})


def required_flag(help_text: str) -> Any:
    """A dataclass field that must be given on the command line."""
    return dataclasses.field(metadata={"help": help_text})


def parse_config(cls: type[_C], argv: Sequence[str] | None = None, *, prog: str | None = None) -> _C:
    """The configuration that `argv` (default: the process's arguments) describes, validated.

    Field types: bool (`--x` / `--no-x`), int, float (finite), str, Path, Literal of strings, tuple[str | int, ...]
    (repeat the flag or separate by commas), and any of them `| None`. Flags cannot be abbreviated.
    Exits with status 2 and a message for a bad or unknown flag or when `validate()` raises ValueError; with 0 after
    `--help`, or after `--print-config`, which prints the validated configuration as one JSON object.
    """
    parser = argparse.ArgumentParser(prog=prog, description=_first_line(cls.__doc__), allow_abbrev=False)
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        _add_flag(parser, field, hints[field.name])
    parser.add_argument("--print-config", action="store_true", help="Print the configuration as JSON and exit.")
    values = vars(parser.parse_args(argv))
    print_config = values.pop("print_config")
    for field in dataclasses.fields(cls):
        if isinstance(values[field.name], list):
            values[field.name] = tuple(item for group in values[field.name] for item in group)
    config = cls(**values)
    try:
        config.validate()
    except ValueError as error:
        parser.error(str(error))
    if print_config:
        sys.stdout.write(config_json(config) + "\n")
        raise SystemExit(0)
    return config


def config_json(config: Config) -> str:
    """The configuration as one JSON object, fields in their order; paths become strings."""
    return json.dumps(dataclasses.asdict(config), default=str)


def flag_name(field_name: str) -> str:
    """`http_port` -> `--http-port`."""
    return "--" + field_name.replace("_", "-")


def _add_flag(parser: argparse.ArgumentParser, field: "dataclasses.Field[Any]", hint: Any) -> None:
    name = flag_name(field.name)
    help_text = str(field.metadata.get("help", "")).replace("%", "%%")
    required = field.default is dataclasses.MISSING
    default = None if required else field.default
    if default is not None and not isinstance(default, bool):
        shown = ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
        help_text += f" Default: {shown or 'none'}.".replace("%", "%%")
    hint = _without_none(hint)
    if hint is bool:
        parser.add_argument(
            name, action=argparse.BooleanOptionalAction, default=default, required=required, help=help_text
        )
        return
    if typing.get_origin(hint) is tuple:
        item, ellipsis = typing.get_args(hint)
        if ellipsis is not Ellipsis:
            raise TypeError(f"{field.name}: only tuples of any length can be flags, not {hint}")
        parser.add_argument(
            name, action=_Collect, type=_list_of(_scalar(field.name, item)), default=default, required=required,
            metavar=f"{_metavar(item)}[,...]", help=help_text,
        )  # fmt: skip
        return
    choices = typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else None
    convert = str if choices else _scalar(field.name, hint)
    parser.add_argument(
        name, type=convert, choices=choices, default=default, required=required,
        metavar=None if choices else _metavar(hint), help=help_text,
    )  # fmt: skip


class _Collect(argparse.Action):
    """Appends each use of the flag; the first one replaces the default instead of extending it."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        seen = getattr(namespace, self.dest)
        setattr(namespace, self.dest, [*seen, values] if isinstance(seen, list) else [values])


def _scalar(field_name: str, hint: Any) -> Callable[[str], Any]:
    converters: dict[Any, Callable[[str], Any]] = {str: str, int: int, float: _finite_float, Path: _path}
    if hint not in converters:
        raise TypeError(f"{field_name}: {hint} cannot be a flag")
    return converters[hint]


def _list_of(convert: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    def parse(text: str) -> list[Any]:
        return [convert(part.strip()) for part in text.split(",") if part.strip()]

    parse.__name__ = f"list of {_metavar(convert).lower()}"  # argparse shows it in its message
    return parse


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"must be a finite number, not {text!r}")
    return value


def _path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("must not be empty")
    return Path(text).expanduser()


def _without_none(hint: Any) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        members = [member for member in typing.get_args(hint) if member is not type(None)]
        if len(members) == 1:
            return members[0]
    return hint


def _metavar(hint: Any) -> str:
    names = {str: "TEXT", int: "N", _finite_float: "X", float: "X", Path: "PATH", _path: "PATH"}
    return names.get(hint, "VALUE")


def _first_line(docstring: str | None) -> str:
    return (docstring or "").strip().partition("\n")[0]

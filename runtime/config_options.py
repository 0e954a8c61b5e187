"""What the fields of a configuration say about themselves.

One declaration, `http_port: int = flag(8000, "Port of the HTTP API.")`, is the flag `--http-port`, the key `http_port`
of a file and a row of the reference page. No imports beyond the standard library: every process starts with this.
"""

import dataclasses
import types
import typing
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

KINDS: dict[type, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "a path"}
"""What an option's value, or each item of its list, can be; in words."""

_UNITS = {"_s": "seconds", "_mb": "megabytes", "_tokens": "tokens"}


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a process. `default` counts only where it need not be given. `many`: a list of `kind`."""

    name: str
    kind: type
    help: str = ""
    required: bool = False
    default: Any = None
    many: bool = False
    choices: tuple[str, ...] = ()
    nullable: bool = False
    unit: str = ""

    @property
    def type_words(self) -> str:
        """What a value must be, to be read behind "must be"."""
        if self.choices:
            return f"one of {', '.join(choice or repr('') for choice in self.choices)}"
        words = KINDS[self.kind]
        return f"a list, each item {words}" if self.many else words


def options_of(cls: Any) -> tuple[Option, ...]:
    """The options that a dataclass declares, in its order.

    Types: bool, int, float, str, Path, Literal of strings, tuple[..., ...] of one of them, any of them `| None`.
    Raises TypeError for a field of another type: a defect of the program.
    """
    hints = typing.get_type_hints(cls)
    return tuple(_option(field, hints[field.name]) for field in dataclasses.fields(cls))


def unit_of(option: Option) -> str:
    """What a number counts or measures: as declared, else as the end of its name says; "" when it has none."""
    if option.unit or option.kind not in (int, float):
        return option.unit
    return next((unit for ending, unit in _UNITS.items() if option.name.endswith(ending)), "")


def to_path(text: str) -> Path:
    """A path as a person writes it; `~` is a home directory. Raises ValueError when there is none in it."""
    if not text:
        raise ValueError("must not be empty")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ValueError("names a home directory that is not known") from None


def _option(field: "dataclasses.Field[Any]", hint: Any) -> Option:
    hint, nullable = _without_none(hint)
    many = typing.get_origin(hint) is tuple
    if many:
        hint, ellipsis = typing.get_args(hint)
        if ellipsis is not Ellipsis:
            raise TypeError(f"{field.name}: only tuples of any length can be options")
    choices = typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()
    kind = str if choices else hint
    if kind not in KINDS or (many and choices):
        raise TypeError(f"{field.name}: {hint} cannot be an option")
    return Option(
        name=field.name,
        kind=kind,
        help=field.metadata.get("help", ""),
        required=field.default is MISSING,
        default=None if field.default is MISSING else field.default,
        many=many,
        choices=choices,
        nullable=nullable,
        unit=field.metadata.get("unit", ""),
    )


def _without_none(hint: Any) -> tuple[Any, bool]:
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return hint, False
    members = [member for member in typing.get_args(hint) if member is not type(None)]
    return (members[0], True) if len(members) == 1 else (hint, False)

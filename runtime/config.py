"""One frozen dataclass a process; its command-line flags and the keys of its configuration file are made from it.

A field is an option: `http_port: int = flag(8000, "Port of the HTTP API.")` is the flag `--http-port` and the key
`http_port`. The defaults live in the dataclass alone; a file goes over them, and flags over the file. There are no
environment variables behind it, and no option holds a secret: those are in files, which options name.
"""

import argparse
import dataclasses
import math
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from runtime.config_options import Option, options_of, to_path
from runtime.config_text import as_yaml


class Config(Protocol):
    """A frozen dataclass that can check itself."""

    __dataclass_fields__: typing.ClassVar[dict[str, "dataclasses.Field[Any]"]]

    def validate(self) -> None:
        """Raise ValueError, naming the flag, when fields are out of range or do not go together."""
        ...


_C = TypeVar("_C", bound=Config)
_T = TypeVar("_T")

CONFIG_HELP = (
    "YAML file with more of these options, by key: --log-level is log_level. A flag goes over the file. "
    "See docs/configuration.md."
)
PRINT_CONFIG_HELP = "Print the whole configuration as such a file and exit."


def flag(default: _T, help_text: str, *, unit: str = "") -> _T:
    """A dataclass field with its default and its help. `default` must be immutable.

    `unit` is for the reference page, where the end of the name does not say it.
    """
    return dataclasses.field(default=default, metadata={"help": help_text, "unit": unit})


def required_flag(help_text: str) -> Any:
    """A dataclass field that must be given."""
    return dataclasses.field(metadata={"help": help_text})


def parse_config(cls: type[_C], argv: Sequence[str] | None = None, *, prog: str | None = None) -> _C:
    """The configuration that `argv` (default: the process's arguments) describes, validated.

    Field types: bool (`--x` / `--no-x`), int, float (finite), str, Path, Literal of strings, tuple[str | int, ...]
    (repeat the flag or separate by commas), and any of them `| None`. Flags cannot be abbreviated. `--config FILE`
    gives options by key; flags go over it.
    Exits with status 2 and a message for anything bad or unknown in flags or file, or when `validate()` raises
    ValueError; with 0 after `--help`, or after `--print-config`, which prints the validated configuration as YAML that
    `--config` takes.
    """
    parser = argparse.ArgumentParser(prog=prog, description=_first_line(cls.__doc__), allow_abbrev=False)
    options = options_of(cls)
    for option in options:
        add_flag(parser, option)
    parser.add_argument("--config", type=path_argument, action=Once, metavar="FILE", help=CONFIG_HELP)
    parser.add_argument("--print-config", action="store_true", help=PRINT_CONFIG_HELP)
    flags = vars(parser.parse_args(argv))
    file, print_config = flags.pop("config"), flags.pop("print_config")
    try:
        values = {**_read_file(file, options), **{name: _flat(value) for name, value in flags.items()}}
        missing = [option.name for option in options if option.required and option.name not in values]
        if missing:
            names = ", ".join(map(flag_name, missing))
            raise ValueError(f"the following options are required, as flags or in the --config file: {names}")
        config = cls(**values)
        config.validate()
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if print_config:
        sys.stdout.write(config_yaml(config))
        raise SystemExit(0)
    return config


def config_yaml(config: Config) -> str:
    """The whole configuration as a file that `--config` takes, fields in their order."""
    return as_yaml({field.name: getattr(config, field.name) for field in dataclasses.fields(config)})


def config_flags(config: Config) -> list[str]:
    """Flags that give the same configuration to another process of the same kind, whatever files say by then."""
    return flag_list({field.name: getattr(config, field.name) for field in dataclasses.fields(config)})


def flag_list(values: Mapping[str, Any]) -> list[str]:
    """Options by name as flags. None is left out: it stands for the default."""
    return [_flag_text(name, value) for name, value in values.items() if value is not None]


def flag_name(field_name: str) -> str:
    """`http_port` -> `--http-port`."""
    return "--" + field_name.replace("_", "-")


def add_flag(parser: "argparse._ActionsContainer", option: Option, *, default: Any = argparse.SUPPRESS) -> None:
    """The flag of one option. `default` is what parsing gives without it; as it is, nothing at all."""
    name = flag_name(option.name)
    help_text = (option.help + _default_words(option)).replace("%", "%%")
    if option.kind is bool:
        parser.add_argument(name, action=argparse.BooleanOptionalAction, default=default, help=help_text)
    elif option.many:
        parser.add_argument(
            name, action=_Collect, type=_list_of(option.kind), default=default,
            metavar=f"{_METAVARS[option.kind]}[,...]", help=help_text,
        )  # fmt: skip
    else:
        parser.add_argument(
            name, type=_CONVERTERS[option.kind], choices=option.choices or None, default=default,
            metavar=None if option.choices else _METAVARS[option.kind], help=help_text,
        )  # fmt: skip


class Once(argparse.Action):
    """A flag that may be given once: the first of two would be lost without a word."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if getattr(namespace, self.dest, None) is not None:
            raise argparse.ArgumentError(self, "may be given once")
        setattr(namespace, self.dest, values)


class _Collect(argparse.Action):
    """Appends each use of the flag; the first one replaces the default instead of extending it."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        seen = getattr(namespace, self.dest, None)
        setattr(namespace, self.dest, [*seen, values] if isinstance(seen, list) else [values])


def finite_number(text: str) -> float:
    """Type of a flag."""
    value = float(text)
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"must be a finite number, not {text!r}")
    return value


def path_argument(text: str) -> Path:
    """Type of a flag."""
    try:
        return to_path(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


_CONVERTERS: dict[type, Callable[[str], Any]] = {str: str, int: int, float: finite_number, Path: path_argument}
_METAVARS = {str: "TEXT", int: "N", float: "X", Path: "PATH"}


def _read_file(path: Path | None, options: Sequence[Option]) -> dict[str, Any]:
    if path is None:
        return {}
    # Here, so that a process without a file does not load a YAML reader.
    from runtime.config_file import Section, read_config_file

    return read_config_file(path, Section(options))


def _flat(value: Any) -> Any:
    return tuple(item for group in value for item in group) if isinstance(value, list) else value


def _list_of(kind: type) -> Callable[[str], list[Any]]:
    convert = _CONVERTERS[kind]

    def parse(text: str) -> list[Any]:
        return [convert(part.strip()) for part in text.split(",") if part.strip()]

    # argparse shows it in its message.
    parse.__name__ = f"list of {_METAVARS[kind].lower()}"
    return parse


def _flag_text(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return flag_name(name if value else f"no_{name}")
    # One argument, so that a value that starts with a dash stays a value.
    return f"{flag_name(name)}={','.join(map(str, value)) if isinstance(value, tuple) else value}"


def _default_words(option: Option) -> str:
    if option.required:
        return " Required."
    if option.default is None:
        return ""
    return f" Default: {default_text(option.default)}."


def default_text(default: Any) -> str:
    """A default as a person would write it."""
    if isinstance(default, bool):
        return "on" if default else "off"
    return (",".join(map(str, default)) if isinstance(default, tuple) else str(default)) or "none"


def _first_line(docstring: str | None) -> str:
    return (docstring or "").strip().partition("\n")[0]

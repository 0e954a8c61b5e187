"""`kvferry up --config cluster.yaml`: the flags of `up` by key, and sections for its processes.

At the top stand the keys of `up`: `--http-port` is `http_port`. The sections `router`, `prefill` and `decode` take the
keys of those processes, all of them but what the launcher itself decides. A section goes over the top, since it says
something about its own process alone; a flag goes over its key wherever the file has it.

A key that only one process can have, and that `up` knows too, may stand in either place and means the same.
"""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decode_worker.config import DecodeConfig
from kvferry.commands.base import absolute_path
from prefill_worker.config import PrefillConfig
from router.config import RouterConfig
from runtime.config import CONFIG_HELP, PRINT_CONFIG_HELP, Once, finite_number, flag_name, path_argument
from runtime.config_options import Option, options_of
from runtime.config_text import as_yaml

SECTIONS: Mapping[str, type] = {"router": RouterConfig, "prefill": PrefillConfig, "decode": DecodeConfig}

_BY_LAUNCHER = "the launcher decides this"
_AT_THE_TOP = "this belongs at the top: it concerns the whole cluster"
_RESERVED_IN_ALL = {
    "cluster_secret_file": _BY_LAUNCHER,
    "exit_on_stdin_close": _BY_LAUNCHER,
    "model": _AT_THE_TOP,
    "drain_timeout_s": _AT_THE_TOP,
}
_RESERVED = {
    "router": {**_RESERVED_IN_ALL, **dict.fromkeys(("internal_host", "internal_port", "share_ports"), _BY_LAUNCHER)},
    "prefill": {
        **_RESERVED_IN_ALL,
        **dict.fromkeys(("worker_id", "host", "port", "data_port", "routers", "role_file"), _BY_LAUNCHER),
        **dict.fromkeys(("cache_dir", "weight_dtype"), _AT_THE_TOP),
    },
}
_RESERVED["decode"] = _RESERVED["prefill"]

_KINDS: Mapping[Any, type] = {
    None: str,
    str: str,
    int: int,
    float: float,
    finite_number: float,
    absolute_path: Path,
    path_argument: Path,
}
_SWITCHES = (argparse.BooleanOptionalAction, argparse._StoreTrueAction)
_NOT_KEYS = ("help", "config", "print_config")


@dataclass(frozen=True, slots=True)
class UpKeys:
    """What the flags of `up` say about themselves."""

    options: tuple[Option, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Of all of them."""
        return tuple(option.name for option in self.options)


def add_config_flags(parser: argparse.ArgumentParser) -> None:
    """`--config` and `--print-config`. To be called last: every flag that the parser has by now becomes a key too."""
    options = []
    # argparse has no public list of what was added to a parser and its groups.
    for action in parser._actions:
        if action.option_strings and action.dest not in _NOT_KEYS:
            options.append(_option(action))
            # With the default in it, which goes now.
            action.help = (
                (action.help or "").removesuffix(" (default: %(default)s)") % {"default": action.default}
            ).replace("%", "%%")
            # So that parsing tells which flags were given; `settle` puts in what was not.
            action.default = argparse.SUPPRESS
            action.required = False
    parser.set_defaults(keys=UpKeys(tuple(options)))
    parser.add_argument("--config", type=absolute_path, action=Once, metavar="FILE", help=CONFIG_HELP)
    parser.add_argument("--print-config", action="store_true", help=PRINT_CONFIG_HELP)


def settle(arguments: argparse.Namespace) -> argparse.Namespace:
    """Every flag of `up` with its value, from the command line, the file or its default, and `sections`: by section
    the options that go to that process alone.

    Raises ValueError for a file that is no good or cannot be read, or an option that must be given. What is settled
    already comes back as it is.
    """
    if "sections" in arguments:
        return arguments
    keys: UpKeys = arguments.keys
    given = {name: value for name, value in vars(arguments).items() if name in keys.names}
    top, sections = _read(arguments.config, keys) if arguments.config else ({}, {})
    for name in given:
        for section, key in _places(name):
            sections.get(section, {}).pop(key, None)
    values: dict[str, Any] = {}
    for option in keys.options:
        name = option.name
        values[name] = given.get(name, top.get(name, option.default))
        if option.required and name not in given and name not in top:
            raise ValueError(f"{flag_name(name)} is required, as a flag or in the --config file")
    rest = {name: value for name, value in vars(arguments).items() if name not in values}
    empty: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    return argparse.Namespace(**rest, **values, sections={**empty, **sections})


def cluster_yaml(arguments: argparse.Namespace) -> str:
    """Settled arguments as a file that `--config` takes. Left out is what is left to the processes' defaults."""
    values = {name: getattr(arguments, name) for name in arguments.keys.names}
    sections = {name: options for name, options in arguments.sections.items() if options}
    return as_yaml({**{name: value for name, value in values.items() if value is not None}, **sections})


def section_options(section: str) -> tuple[Option, ...]:
    """What may stand in a section."""
    return tuple(option for option in options_of(SECTIONS[section]) if option.name not in _RESERVED[section])


def _read(path: Path, keys: UpKeys) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    # Here, so that nobody loads a YAML reader for nothing.
    from runtime.config_file import ConfigFileError, Section, read_config_file

    taken = {name: Section(section_options(name), _RESERVED[name]) for name in SECTIONS}
    try:
        values = read_config_file(path, Section(keys.options), taken)
    except OSError as error:
        raise ConfigFileError(str(error)) from None
    sections = {name: values.pop(name, {}) for name in SECTIONS}
    for section, options in sections.items():
        for name in [name for name in options if name in keys.names and _only_in(section, name)]:
            if name in values:
                raise ConfigFileError(f"{path}: {name} is there twice: at the top and in {section}")
            values[name] = options.pop(name)
    return {name: _absolute(value) for name, value in values.items()}, {
        section: {name: _absolute(value) for name, value in options.items()} for section, options in sections.items()
    }


def _only_in(section: str, name: str) -> bool:
    """Whether no other process may have this option."""
    others = (other for other in SECTIONS if other != section)
    return not any(name == option.name for other in others for option in section_options(other))


def _places(name: str) -> list[tuple[str, str]]:
    """Where in the sections a flag of `up` has its key."""
    for section in SECTIONS:
        if name == f"{section}_block_size":
            return [(section, "block_size")]
    return [(section, name) for section in SECTIONS]


def _absolute(value: Any) -> Any:
    return value.absolute() if isinstance(value, Path) else value


def _option(action: argparse.Action) -> Option:
    """The flag as a key. Raises TypeError for a type that a file cannot give: a defect of the program."""
    convert: Callable[[str], Any] | None = action.type if callable(action.type) else None
    many = isinstance(action.default, tuple)
    if not many and convert not in _KINDS:
        raise TypeError(f"{action.dest}: {convert} cannot be a key")
    return Option(
        name=action.dest,
        kind=bool if isinstance(action, _SWITCHES) else str if many else _KINDS[convert],
        help=_without_default(action),
        required=action.required,
        default=action.default,
        many=many,
        choices=tuple(map(str, action.choices or ())) if convert is not int else (),
        nullable=action.default is None and not action.required,
    )


def _without_default(action: argparse.Action) -> str:
    return (action.help or "").removesuffix(" (default: %(default)s)").partition(" Default: ")[0]

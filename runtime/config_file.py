"""Options from a YAML file: the keys are the names of the options, and nothing else is taken.

Values are what YAML 1.2 calls them: `true` and `false` alone are booleans, numbers are decimal, and `yes`, `010` or
`1:30` are text. There are no aliases, merge keys or tags, a file has a bounded size and depth, so that reading one
takes bounded time. Imported only by a process that is given `--config`: nobody else pays for PyYAML.
"""

import difflib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from runtime.config_options import Option, to_path

MAX_FILE_BYTES = 64 * 1024
_MAX_DEPTH = 4
_SHOWN_CHARS = 60
_TAG = "tag:yaml.org,2002:"
_KINDS = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "text", "null": "nothing"}


class ConfigFileError(ValueError):
    """A configuration file that cannot be taken. The message names the file, the line and the key, and never shows a
    value that could be a secret."""


@dataclass(frozen=True, slots=True)
class Section:
    """What may stand under one key, or at the top. `reserved`: names that are known and not to be set here, and why."""

    options: Sequence[Option]
    reserved: Mapping[str, str] = field(default_factory=dict)


def read_config_file(path: Path, top: Section, sections: Mapping[str, Section] | None = None) -> dict[str, Any]:
    """What the file gives, by key, each value of the option's type; a section that is there as a dict of its own.

    Any thread. Raises ConfigFileError for anything it should not hold, OSError when it cannot be read.
    """
    with path.open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise ConfigFileError(f"{path}: a configuration file has at most {MAX_FILE_BYTES} bytes")
    try:
        return _Reader(path).read(_root(data.decode()), top, sections or {})
    except UnicodeDecodeError:
        raise ConfigFileError(f"{path}: this is not UTF-8") from None
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        # Not the error's own text, which quotes the file.
        raise ConfigFileError(f"{path}{line}: {error.problem or error.context}") from None
    except yaml.YAMLError:
        raise ConfigFileError(f"{path}: there are characters in it that YAML does not allow") from None


class _Reader:
    """Walks the nodes of one file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self, root: Any, top: Section, sections: Mapping[str, Section]) -> dict[str, Any]:
        if root is None or _kind(root) == "null":
            return {}
        values: dict[str, Any] = {}
        for key, node in self._items(root, "", top, tuple(sections)):
            if key in sections:
                inner = sections[key]
                values[key] = {} if _kind(node) == "null" else self._options(node, f"{key}.", inner)
            else:
                values[key] = self._value(_named(top, key), node, key)
        return values

    def _options(self, node: Any, prefix: str, section: Section) -> dict[str, Any]:
        items = self._items(node, prefix, section, ())
        return {key: self._value(_named(section, key), value, prefix + key) for key, value in items}

    def _items(self, node: Any, prefix: str, section: Section, more: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
        """Keys that are known, none twice, with the nodes of their values."""
        if not isinstance(node, yaml.MappingNode):
            raise self._error(node, f"{prefix.rstrip('.')}: " if prefix else "", "must be keys with values")
        known = [*(option.name for option in section.options), *more]
        seen: set[str] = set()
        for key_node, value_node in node.value:
            key = key_node.value if _kind(key_node) == "str" else None
            if key is None:
                raise self._error(key_node, prefix, f"a key must be text, not {_described(key_node)}")
            if key in section.reserved:
                raise self._error(key_node, f"{prefix}{key}: ", section.reserved[key])
            if key not in known:
                raise self._error(key_node, "", _unknown(prefix, key, known))
            if key in seen:
                raise self._error(key_node, f"{prefix}{key}: ", "is there twice")
            seen.add(key)
            yield key, value_node

    def _value(self, option: Option, node: Any, where: str) -> Any:
        if option.nullable and _kind(node) == "null":
            return None
        if not option.many:
            return self._scalar(option, node, where)
        if not isinstance(node, yaml.SequenceNode):
            raise self._error(node, f"{where}: ", f"must be {option.type_words}, not {_described(node)}")
        return tuple(self._scalar(option, item, f"{where}[{index}]") for index, item in enumerate(node.value))

    def _scalar(self, option: Option, node: Any, where: str) -> Any:
        try:
            return _convert(option, _kind(node), node)
        except ValueError as error:
            raise self._error(node, f"{where}: ", str(error)) from None

    def _error(self, node: Any, where: str, what: str) -> ConfigFileError:
        return ConfigFileError(f"{self._path}, line {node.start_mark.line + 1}: {where}{what}")


def _convert(option: Option, kind: str, node: Any) -> Any:
    """The value of one scalar. Raises ValueError saying what is wrong."""
    takes = {bool: ("bool",), int: ("int",), float: ("int", "float"), str: ("str",), Path: ("str",)}[option.kind]
    if kind not in takes:
        words = Option(option.name, option.kind, choices=option.choices).type_words
        hint = "; put it in quotes" if option.kind is str and kind not in ("", "null") else ""
        raise ValueError(f"must be {words}, not {_described(node)}{hint}")
    text = node.value
    if option.kind is bool:
        return text.lower() == "true"
    if option.kind is int:
        return int(text)
    if option.kind is float:
        number = float(text)
        if not math.isfinite(number):
            raise ValueError("must be a finite number")
        return number
    if "\0" in text:
        raise ValueError("must not hold a NUL")
    if option.kind is Path:
        return to_path(text)
    if option.choices and text not in option.choices:
        raise ValueError(f"must be {option.type_words}, not {text[:_SHOWN_CHARS]!r}")
    return text


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Composes nodes and never makes an object of one."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        self._depth += 1
        problem = ""
        if isinstance(event, yaml.AliasEvent):
            problem = "aliases are not taken"
        elif event.tag is not None:
            problem = "tags are not taken"
        elif self._depth > _MAX_DEPTH:
            problem = "this is nested too deeply"
        if problem:
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


# The core schema of YAML 1.2, less octal and hexadecimal numbers, infinities and zeros in front, which readers of other
# versions take for other numbers. 18 digits are enough for everything.
_Loader.yaml_implicit_resolvers = {}
_Loader.add_implicit_resolver(f"{_TAG}null", re.compile(r"(~|null|Null|NULL|)\Z"), ["~", "n", "N", ""])
_Loader.add_implicit_resolver(f"{_TAG}bool", re.compile(r"(true|True|TRUE|false|False|FALSE)\Z"), list("tTfF"))
_Loader.add_implicit_resolver(f"{_TAG}int", re.compile(r"[-+]?(0|[1-9][0-9]{0,17})\Z"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    f"{_TAG}float",
    re.compile(r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?([eE][-+]?[0-9]+)?)\Z"),
    list("-+.0123456789"),
)


def _root(text: str) -> Any:
    loader = _Loader(text)
    try:
        return loader.get_single_node()
    finally:
        loader.dispose()


def _named(section: Section, key: str) -> Option:
    return next(option for option in section.options if option.name == key)


def _kind(node: Any) -> str:
    """The type that YAML sees in a scalar; "" for lists and mappings."""
    return str(node.tag).removeprefix(_TAG) if isinstance(node, yaml.ScalarNode) else ""


def _described(node: Any) -> str:
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    return _KINDS[_kind(node)] if isinstance(node, yaml.ScalarNode) else "keys with values"


def _unknown(prefix: str, key: str, known: Sequence[str]) -> str:
    where = f" in {prefix.removesuffix('.')}" if prefix else ""
    near = difflib.get_close_matches(key.replace("-", "_").lower()[:_SHOWN_CHARS], known, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"there is no key {key[:_SHOWN_CHARS]!r}{where}{hint}"

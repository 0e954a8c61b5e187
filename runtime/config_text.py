"""A configuration as YAML text: a key a line, read back as the same values by `config_file.py` and by any YAML 1.2."""

import json
import re
from collections.abc import Mapping
from typing import Any

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
# What some reader of YAML takes for something else than text, in whatever case.
_NOT_TEXT = frozenset(("true", "false", "null", "yes", "no", "on", "off", "y", "n"))


def as_yaml(values: Mapping[str, Any]) -> str:
    """Lines of `key: value`. Values are None, bool, int, float, text, paths, lists of them, or mappings one level down.

    Floats must be finite.
    """
    lines: list[str] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            lines.append(f"{key}:" if value else f"{key}: {{}}")
            lines += [f"  {name}: {_value(inner)}" for name, inner in value.items()]
        else:
            lines.append(f"{key}: {_value(value)}")
    return "".join(line + "\n" for line in lines)


def _value(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_value, value))}]"
    if value is None or isinstance(value, (bool, int, float)):
        return json.dumps(value)
    return _text(str(value))


def _text(text: str) -> str:
    if _PLAIN.fullmatch(text) and text.lower() not in _NOT_TEXT:
        return text
    return '"' + "".join(map(_escaped, text)) + '"'


def _escaped(char: str) -> str:
    if char in '"\\':
        return "\\" + char
    # Line ends of all kinds and whatever else cannot be seen; YAML's own escape has eight digits for any character.
    return char if char.isprintable() else f"\\U{ord(char):08x}"

"""Bounds on a grammar that a client sends, checked at the router's door and again at each worker's.

These are the checks that need no compiler. They are strict because compiling takes time that grows much faster than the
text: what passes here compiles in well under a second, but for texts made to be costly.
"""

import json
from typing import Any, Final

from kvferry_rpc.common_pb2 import Grammar
from runtime.errors import invalid
from runtime.json_schema import MAX_JSON_DEPTH, check_schema

MAX_GRAMMAR_BYTES: Final = 64 * 1024
MAX_REGEX_BYTES: Final = 4 * 1024
MAX_FIELD_CHARS: Final = 64
MAX_GRAMMAR_NESTING: Final = 64


def check_grammar(grammar: Grammar) -> None:
    """Raises KvferryError (INVALID_REQUEST) naming the field that the grammar came in. Quick for any text."""
    field = grammar_field(grammar)
    text = grammar.text
    limit = MAX_REGEX_BYTES if grammar.kind == Grammar.REGEX else MAX_GRAMMAR_BYTES
    if len(text) > limit or len(text.encode()) > limit:
        raise invalid(field, f"is longer than {limit} bytes")
    if "\0" in text:
        raise invalid(field, "has a NUL character")
    if grammar.kind == Grammar.JSON_SCHEMA:
        check_schema(field, parse_schema(field, text))
    elif grammar.kind == Grammar.JSON_OBJECT:
        if text:
            raise invalid(field, "takes no text")
    elif grammar.kind in (Grammar.REGEX, Grammar.EBNF):
        if not text.strip():
            raise invalid(field, "must not be empty")
        _check_nesting(field, text)
    else:
        raise invalid(field, "has no kind that this server knows")


def grammar_field(grammar: Grammar) -> str:
    """What errors call the grammar."""
    return grammar.field if 0 < len(grammar.field) <= MAX_FIELD_CHARS else "grammar"


def parse_schema(field: str, text: str) -> Any:
    """JSON text as Python values, whatever it holds; object keys in their order, of equal keys the last.

    Raises KvferryError for text that is no JSON, has NaN or an infinity, or is nested deeper than MAX_JSON_DEPTH.
    """
    try:
        document = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise _too_deep(field) from None
    except ValueError as error:
        raise invalid(field, f"is not valid JSON: {str(error)[:200]}") from None
    level = [document]
    for _ in range(MAX_JSON_DEPTH + 1):
        level = [container for container in level if isinstance(container, dict | list)]
        if not level:
            return document
        level = [
            inner for container in level for inner in (container.values() if isinstance(container, dict) else container)
        ]
    raise _too_deep(field)


def schema_text(field: str, document: Any) -> str:
    """A schema as the text of a Grammar, in the one form that all parsers read alike.

    Raises KvferryError when it is too long, too deep or no text. Never works longer than that takes to find out.
    """
    parts: list[str] = []
    num_chars = 0
    try:
        for part in json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).iterencode(document):
            parts.append(part)
            num_chars += len(part)
            if num_chars > MAX_GRAMMAR_BYTES:
                raise invalid(field, f"is longer than {MAX_GRAMMAR_BYTES} bytes")
        text = "".join(parts)
        text.encode()
    except RecursionError:
        raise _too_deep(field) from None
    except UnicodeEncodeError:
        raise invalid(field, "holds half of a surrogate pair, which is not text") from None
    return text


def _check_nesting(field: str, text: str) -> None:
    """Brackets that stand for themselves count too: a bound, not a parser."""
    depth = 0
    for char in text:
        if char in "([{":
            depth += 1
        elif char in ")]}":
            depth = max(0, depth - 1)
        if depth > MAX_GRAMMAR_NESTING:
            raise invalid(field, f"is nested deeper than {MAX_GRAMMAR_NESTING} brackets")


def _too_deep(field: str) -> Exception:
    return invalid(field, f"is nested deeper than {MAX_JSON_DEPTH} levels")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")

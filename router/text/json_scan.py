"""JSON read character by character: where a value ends, and the first character that cannot be right.

Strict (RFC 8259), in time linear in the text, with no more state than the nesting. Nothing is built from what is read.
"""

import re
from enum import Enum, auto
from typing import Final

from runtime.json_schema import MAX_JSON_DEPTH

BLANKS: Final = " \t\r\n"
_PLAIN: Final = re.compile(r'[^"\\\x00-\x1f]*')
_LITERALS: Final = {"t": "rue", "f": "alse", "n": "ull"}
_ESCAPES: Final = frozenset('"\\/bfnrt')
_HEX: Final = frozenset("0123456789abcdefABCDEF")

# Numbers, as a table: after which part of one (its key) which characters lead to which part.
_DIGIT: Final = "0123456789"
_NUMBER: Final[dict[str, tuple[tuple[str, str], ...]]] = {
    "start": (("-", "minus"), ("0", "zero"), ("123456789", "whole")),
    "minus": (("0", "zero"), ("123456789", "whole")),
    "zero": ((".", "point"), ("eE", "e")),
    "whole": ((_DIGIT, "whole"), (".", "point"), ("eE", "e")),
    "point": ((_DIGIT, "fraction"),),
    "fraction": ((_DIGIT, "fraction"), ("eE", "e")),
    "e": (("+-", "sign"), (_DIGIT, "exponent")),
    "sign": ((_DIGIT, "exponent"),),
    "exponent": ((_DIGIT, "exponent"),),
}
_WHOLE_NUMBERS: Final = frozenset(["zero", "whole", "fraction", "exponent"])


class _At(Enum):
    """What may come next."""

    VALUE = auto()
    FIRST_ITEM = auto()
    FIRST_KEY = auto()
    KEY = auto()
    COLON = auto()
    COMMA = auto()
    STRING = auto()
    ESCAPE = auto()
    HEX = auto()
    NUMBER = auto()
    LITERAL = auto()


class JsonScanner:
    """One value. After `feed`, at most one of `done` and `failed` is true; then nothing more is read."""

    def __init__(self) -> None:
        self.done = False
        self.failed = False
        self._at = _At.VALUE
        self._open: list[str] = []
        self._is_key = False
        self._hex_left = 0
        self._number = "start"
        self._literal = ""

    def feed(self, text: str, start: int, stop: int) -> int:
        """Read text[start:stop]. Returns where reading stopped: behind the value's end, at the character that cannot
        be right, or at `stop`. A number ends only where another character follows, which is not read."""
        index = start
        while index < stop and not (self.done or self.failed):
            if self._at is _At.STRING:
                plain = _PLAIN.match(text, index, stop)
                assert plain is not None
                index = plain.end()
                if index == stop:
                    break
            if self._takes(text[index]):
                index += 1
        return index

    def _takes(self, char: str) -> bool:
        """Whether `char` is read: not when it ends a number by following it, nor when it is wrong."""
        match self._at:
            case _At.STRING:
                return self._in_string(char)
            case _At.ESCAPE:
                return self._escaped(char)
            case _At.HEX:
                self._hex_left -= 1
                return self._go(_At.HEX if self._hex_left else _At.STRING) if char in _HEX else self._fail()
            case _At.NUMBER:
                return self._in_number(char)
            case _At.LITERAL:
                if not self._literal.startswith(char):
                    return self._fail()
                self._literal = self._literal[1:]
                return self._literal != "" or self._end_value()
            case _:
                return char in BLANKS or self._structure(char)

    def _structure(self, char: str) -> bool:
        match self._at:
            case _At.FIRST_KEY | _At.KEY:
                if char == '"':
                    self._is_key = True
                    return self._go(_At.STRING)
                return self._close(char) if self._at is _At.FIRST_KEY else self._fail()
            case _At.COLON:
                return self._go(_At.VALUE) if char == ":" else self._fail()
            case _At.COMMA:
                if char == ",":
                    return self._go(_At.KEY if self._open[-1] == "}" else _At.VALUE)
                return self._close(char)
            case _At.FIRST_ITEM if char == "]":
                return self._close(char)
            case _:
                return self._begin_value(char)

    def _begin_value(self, char: str) -> bool:
        if char == '"':
            self._is_key = False
            return self._go(_At.STRING)
        if char in ("{", "["):
            if len(self._open) == MAX_JSON_DEPTH:
                return self._fail()
            self._open.append("}" if char == "{" else "]")
            return self._go(_At.FIRST_KEY if char == "{" else _At.FIRST_ITEM)
        if char in _LITERALS:
            self._literal = _LITERALS[char]
            return self._go(_At.LITERAL)
        self._number = "start"
        self._at = _At.NUMBER
        return self._in_number(char)

    def _in_string(self, char: str) -> bool:
        if char == '"':
            return self._go(_At.COLON) if self._is_key else self._end_value()
        return self._go(_At.ESCAPE) if char == "\\" else self._fail()

    def _escaped(self, char: str) -> bool:
        if char == "u":
            self._hex_left = 4
            return self._go(_At.HEX)
        return self._go(_At.STRING) if char in _ESCAPES else self._fail()

    def _in_number(self, char: str) -> bool:
        for chars, after in _NUMBER[self._number]:
            if char in chars:
                self._number = after
                return True
        if self._number in _WHOLE_NUMBERS:
            self._end_value()
            return False
        return self._fail()

    def _close(self, char: str) -> bool:
        if char != self._open[-1]:
            return self._fail()
        self._open.pop()
        return self._end_value()

    def _end_value(self) -> bool:
        self._at = _At.COMMA
        self.done = not self._open
        return True

    def _go(self, at: _At) -> bool:
        self._at = at
        return True

    def _fail(self) -> bool:
        self.failed = True
        return False

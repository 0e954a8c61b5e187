"""The common part of all formats of tool calls: one call as a JSON object, and the events that calls become."""

import json
from collections.abc import Callable, Set
from enum import Enum, auto
from typing import Final

from router.text.chat_events import ChatEvent, ContentDelta, ToolCallArguments, ToolCallStart
from router.text.json_scan import BLANKS, JsonScanner
from router.text.markers import Trimmed

_ARGUMENT_KEYS: Final = frozenset(["arguments", "parameters"])
# In JSON, where a character may take six. Longer ones are not held back: they cannot be names of tools.
_MAX_NAME_CHARS: Final = 6 * 64 + 2


class CallWriter:
    """Collects the events of one answer. Blanks next to calls are dropped; other text stays as it is."""

    def __init__(self, call_id: Callable[[int], str]) -> None:
        """`call_id` names the call of an index; a pure function, so that an answer begun anew has the same names."""
        self._call_id = call_id
        self._events: list[ChatEvent] = []
        self._content = Trimmed(at_start=False)
        self.num_calls = 0

    def content(self, text: str) -> None:
        """Text outside of calls."""
        if text and (final := self._content.push(text)):
            self._events.append(ContentDelta(final))

    def start(self, name: str) -> None:
        """The next call begins."""
        self._content.cut()
        self._events.append(ToolCallStart(self.num_calls, self._call_id(self.num_calls), name))
        self.num_calls += 1

    def arguments(self, fragment: str) -> None:
        """More of the last call's arguments."""
        if fragment:
            self._events.append(ToolCallArguments(self.num_calls - 1, fragment))

    def finish(self) -> None:
        """No text follows."""
        if rest := self._content.finish():
            self._events.append(ContentDelta(rest))

    def take(self) -> list[ChatEvent]:
        """The events since the last time."""
        events, self._events = self._events, []
        return events


class _At(Enum):
    """What may come next in the object."""

    START = auto()
    FIRST_KEY = auto()
    KEY = auto()
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()
    IN_VALUE = auto()
    COMMA = auto()


class CallObject:
    """`{"name": "...", "arguments": {...}}` as it arrives, its members in any order; `parameters` for `arguments`.

    It is a call once its name, one of `names`, and the brace that opens its arguments are there (`is_call`); or at its
    end if it has no arguments. Other members are read over. `arguments` may be null: that is none.
    """

    def __init__(self, names: Set[str]) -> None:
        self._names = names
        self._at = _At.START
        self._scanner = JsonScanner()
        self._key = ""
        self._short: list[str] = []  # the key or the name that is being read
        self._num_short = 0
        self._fragments: list[str] = []
        self._has_arguments = False
        self._seen: set[str] = set()
        self.name = ""
        self.done = False
        self.failed = False

    @property
    def is_call(self) -> bool:
        """Whether this is a call, whatever follows."""
        return self.name != "" and (self._has_arguments or self.done)

    def take_arguments(self) -> str:
        """What of the arguments arrived since the last time. Ask only for a call."""
        fragment = "".join(self._fragments)
        self._fragments.clear()
        return fragment

    def feed(self, text: str, start: int) -> int:
        """Read on at text[start]. Returns where reading stopped: behind the object, at the character that cannot be
        right, or at the end of `text`."""
        index = start
        while index < len(text) and not (self.done or self.failed):
            if self._at in (_At.IN_KEY, _At.IN_VALUE):
                index = self._inside(text, index)
            elif text[index] in BLANKS or self._structure(text[index]):
                index += 1
        return index

    def _inside(self, text: str, start: int) -> int:
        """Go on with a key or a value."""
        is_short = self._at is _At.IN_KEY or self._key == "name"
        room = _MAX_NAME_CHARS - self._num_short if is_short else len(text)
        end = self._scanner.feed(text, start, min(start + room, len(text)))
        if is_short:
            self._short.append(text[start:end])
            self._num_short += end - start
        elif self._has_arguments and self._key in _ARGUMENT_KEYS:
            self._fragments.append(text[start:end])
        if self._scanner.done:
            self._end_scan()
        elif self._scanner.failed or self._num_short == _MAX_NAME_CHARS:
            self.failed = True
        return end

    def _end_scan(self) -> None:
        if self._at is _At.IN_KEY:
            self._key = json.loads("".join(self._short))
            # Two of the same, or of the same meaning, would leave open which one counts.
            kind = "arguments" if self._key in _ARGUMENT_KEYS else self._key
            self.failed = kind in ("name", "arguments") and kind in self._seen
            self._seen.add(kind)
            self._at = _At.COLON
            return
        if self._key == "name":
            self.name = json.loads("".join(self._short))
            self.failed = self.name not in self._names
        self._at = _At.COMMA

    def _structure(self, char: str) -> bool:
        """Whether `char` is read here; else it begins a key or value, or fails."""
        match self._at:
            case _At.START if char == "{":
                self._at = _At.FIRST_KEY
            case _At.COLON if char == ":":
                self._at = _At.VALUE
            case _At.COMMA if char == ",":
                self._at = _At.KEY
            case _At.FIRST_KEY | _At.COMMA if char == "}":
                return self._end()
            case _At.FIRST_KEY | _At.KEY if char == '"':
                self._scan(_At.IN_KEY)
                return False
            case _At.VALUE if self._may_begin(char):
                self._has_arguments = self._has_arguments or (self._key in _ARGUMENT_KEYS and char == "{")
                self._scan(_At.IN_VALUE)
                return False
            case _:
                self.failed = True
                return False
        return True

    def _may_begin(self, char: str) -> bool:
        if self._key == "name":
            return char == '"'
        return self._key not in _ARGUMENT_KEYS or char in "{n"

    def _scan(self, at: _At) -> None:
        self._at = at
        self._scanner = JsonScanner()
        self._short.clear()
        self._num_short = 0

    def _end(self) -> bool:
        """The closing brace. Without a name it is wrong."""
        self.done = self.name != ""
        self.failed = not self.done
        if self.done and not self._has_arguments:
            self._fragments.append("{}")
        return self.done

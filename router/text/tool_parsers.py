"""Readers of tool calls in the text of an answer, one for each format that models are trained on.

* hermes (Hermes, Qwen): `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them
* llama3: `{"name": ..., "parameters": {...}}` as the whole answer or behind `<|python_tag|>`, several apart by `;`
* mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or `[TOOL_CALLS]name[ARGS]{...}` for each call
* forced: `[{"name": ..., "arguments": {...}}, ...]` and nothing else: what a grammar makes of a forced call

All go through the text once, in pieces of any size, with the same events. What begins like a call and is none, because
its JSON is wrong, has no name or not that of a tool, or never gets to its arguments, is ordinary content, markers
included. Once the arguments have begun they are passed on as they come; should their JSON break, the call keeps what
was right and the rest is content. Text inside a call that is read over (blanks, separators, members such as `id`) and
the markers of good calls are no content.
"""

from collections.abc import Callable, Set
from typing import ClassVar, Final

from router.text.chat_events import ChatEvent
from router.text.json_scan import BLANKS, JsonScanner
from router.text.markers import held_chars
from router.text.tool_calls import CallObject, CallWriter

_NAME_CHARS: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.")
_MAX_HEADER_CHARS: Final = 256
_SEPARATORS: Final = BLANKS + ",;"


class ToolCallParser:
    """What the formats have in common. A state is a method that reads on at text[index] and returns how far it came;
    it leaves text unread only when it has changed the state. One thread at a time."""

    marker: ClassVar[str] = ""
    """What opens a call in the middle of content; "" for nothing."""
    special_tokens: ClassVar[frozenset[str]] = frozenset()
    """Markers that may be special tokens, which must become text to be read here."""

    def __init__(self, names: Set[str], call_id: Callable[[int], str], *, single: bool = False) -> None:
        """`names` are those of the tools. `single`: the answer ends with its first call."""
        self._names = names
        self._single = single
        self._writer = CallWriter(call_id)
        self._state = self._first_state()
        self._held = ""  # unread, because more of it must be seen
        self._raw: list[str] = []  # read, and content unless it becomes a call
        self._call = CallObject(names)
        self._is_started = False
        self.is_done = False
        """Whether the answer is over although text may follow."""

    @property
    def num_calls(self) -> int:
        """Calls begun."""
        return self._writer.num_calls

    def push(self, text: str) -> list[ChatEvent]:
        """What this piece of the text makes final."""
        text, self._held = self._held + text, ""
        index = 0
        while index < len(text) and not self.is_done:
            index = self._state(text, index)
        return self._writer.take()

    def finish(self) -> list[ChatEvent]:
        """What was held back, once no text follows."""
        if self._state == self._behind_call or self.is_done:
            self._held = ""  # part of a closing marker
        if self.num_calls and not "".join(self._raw).strip(_SEPARATORS):
            self._raw.clear()
        self._give_up()
        self._writer.content(self._held)
        self._writer.finish()
        return self._writer.take()

    # ---- states ----

    def _first_state(self) -> Callable[[str, int], int]:
        return self._text

    def _text(self, text: str, index: int) -> int:
        """Content, up to a marker."""
        marker = "" if self._single and self.num_calls else self.marker
        found = text.find(marker, index) if marker else -1
        if found >= 0:
            self._writer.content(text[index:found])
            self._raw.append(marker)
            self._state = self._behind_marker
            return found + len(marker)
        final = len(text) - held_chars(text, marker, index)
        self._writer.content(text[index:final])
        self._held = text[final:]
        return len(text)

    def _behind_marker(self, text: str, index: int) -> int:
        """Blanks, then an object."""
        return self._blanks(text, index) or self._begin_object(text, index)

    def _object(self, text: str, index: int) -> int:
        """Inside a call in JSON."""
        call = self._call
        end = call.feed(text, index)
        if not self._is_started:
            self._raw.append(text[index:end])
            if call.is_call:
                self._start(call.name)
        if self._is_started:
            self._writer.arguments(call.take_arguments())
        if call.failed:
            self._give_up()
        elif call.done:
            self._end_call(self._behind_call)
        return end

    def _behind_call(self, text: str, index: int) -> int:
        """Whatever follows a call that was whole."""
        self._state = self._text
        return index

    # ---- steps ----

    def _blanks(self, text: str, index: int) -> int:
        """The end of the blanks at text[index]; 0 when there are none."""
        end = index
        while end < len(text) and text[end] in BLANKS:
            end += 1
        if end > index:
            self._raw.append(text[index:end])
        return end if end > index else 0

    def _begin_object(self, text: str, index: int) -> int:
        if text[index] != "{":
            self._give_up()
            return index
        self._call = CallObject(self._names)
        self._state = self._object
        return index

    def _start(self, name: str) -> None:
        """What was read is a call now."""
        self._raw.clear()
        self._is_started = True
        self._writer.start(name)

    def _end_call(self, state: Callable[[str, int], int]) -> None:
        self._is_started = False
        self._state = state
        self.is_done = self._single

    def _give_up(self) -> None:
        """What was read is no call: content, as is all up to the next marker."""
        self._writer.content("".join(self._raw))
        self._raw.clear()
        self._is_started = False
        self._state = self._text

    def _literal(self, text: str, index: int, literal: str) -> bool | None:
        """Whether `literal` stands at text[index]; None when more text must be seen, which is then held."""
        if text.startswith(literal, index):
            return True
        if len(text) - index < len(literal) and literal.startswith(text[index:]):
            self._held = text[index:]
            return None
        return False


class HermesParser(ToolCallParser):
    """Hermes 2 Pro, Qwen 2.5 and 3, and many others. The closing marker may be missing."""

    marker = "<tool_call>"
    special_tokens = frozenset(["<tool_call>", "</tool_call>"])
    _closing: Final = "</tool_call>"

    def _behind_call(self, text: str, index: int) -> int:
        if end := self._blanks(text, index):
            return end
        closes = self._literal(text, index, self._closing)
        if closes is None:
            return len(text)
        if closes:
            self._raw.clear()
        self._give_up()
        return index + len(self._closing) if closes else index


class Llama3Parser(ToolCallParser):
    """Llama 3.1 to 3.3. Without a marker only the start of an answer can be a call."""

    marker = "<|python_tag|>"
    special_tokens = frozenset(["<|python_tag|>"])

    def _first_state(self) -> Callable[[str, int], int]:
        return self._opening

    def _opening(self, text: str, index: int) -> int:
        if text[index] == "{":
            return self._begin_object(text, index)
        if end := self._blanks(text, index):
            return end
        self._give_up()
        return index

    def _behind_call(self, text: str, index: int) -> int:
        """Blanks and one separator before the next call."""
        if end := self._blanks(text, index):
            return end
        if text[index] == ";" and ";" not in self._raw:
            self._raw.append(";")
            return index + 1
        return self._begin_object(text, index)


class ArrayParser(ToolCallParser):
    """Calls as the elements of a JSON array: what a forced call is, without any marker."""

    def _first_state(self) -> Callable[[str, int], int]:
        return self._before_array

    def _before_array(self, text: str, index: int) -> int:
        if text[index] == "[":
            self._raw.append("[")
            self._state = self._behind_marker
            return index + 1
        if end := self._blanks(text, index):
            return end
        self._give_up()
        return index

    def _behind_call(self, text: str, index: int) -> int:
        """A comma and the next element, or the end of the array."""
        if end := self._blanks(text, index):
            return end
        if text[index] == ",":
            self._raw.append(",")
            self._state = self._behind_marker
            return index + 1
        if text[index] == "]":
            self._raw.clear()
            self._state = self._text
            return index + 1
        self._give_up()
        return index


class MistralParser(ArrayParser):
    """Mistral: the array of the older models, and name and arguments apart of the newer ones."""

    marker = "[TOOL_CALLS]"
    special_tokens = frozenset(["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"])

    def __init__(self, names: Set[str], call_id: Callable[[int], str], *, single: bool = False) -> None:
        super().__init__(names, call_id, single=single)
        self._header = ""
        self._arguments = JsonScanner()

    def _first_state(self) -> Callable[[str, int], int]:
        return self._text

    def _behind_marker(self, text: str, index: int) -> int:
        if end := self._blanks(text, index):
            return end
        is_first = "".join(self._raw).rstrip(BLANKS) == self.marker
        if text[index] == "[" and is_first:
            self._raw.append("[")
            return index + 1
        if text[index] in _NAME_CHARS and is_first:
            self._header = ""
            self._state = self._in_header
            return index
        return self._begin_object(text, index)

    def _in_header(self, text: str, index: int) -> int:
        """A name, perhaps `[CALL_ID]` and an id, perhaps `[ARGS]`, up to the brace that opens the arguments."""
        char = text[index]
        if char == "{":
            name = self._header.partition("[")[0].rstrip(BLANKS)
            marks = self._header[len(name) :].strip(BLANKS)
            if name in self._names and _is_header_end(marks):
                self._start(name)
                self._arguments = JsonScanner()
                self._state = self._in_arguments
                return index
        elif char in _NAME_CHARS or char in "[]" or char in BLANKS:
            self._header += char
            self._raw.append(char)
            if len(self._header) <= _MAX_HEADER_CHARS:
                return index + 1
            self._give_up()
            return index + 1
        self._give_up()
        return index

    def _in_arguments(self, text: str, index: int) -> int:
        end = self._arguments.feed(text, index, len(text))
        self._writer.arguments(text[index:end])
        if self._arguments.failed:
            self._give_up()
        elif self._arguments.done:
            self._end_call(self._text)
        return end


def _is_header_end(marks: str) -> bool:
    """Whether this may stand between a name and its arguments."""
    if marks.startswith("[CALL_ID]"):
        marks = "[ARGS]" if marks.endswith("[ARGS]") else marks[:0]
    return marks in ("", "[ARGS]")

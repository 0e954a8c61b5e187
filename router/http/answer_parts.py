"""The events of a chat as the parts that newer APIs show: reasoning, text and calls, one after the other.

A part lasts as long as events of its kind follow each other; a call is a part of its own. What a stream shows part by
part and what a whole answer lists are the same parts, since both come from here.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from router.text.chat_events import ChatEvent, ContentDelta, ReasoningDelta, ToolCallArguments, ToolCallStart


class PartKind(Enum):
    """What a part is."""

    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


@dataclass(slots=True)
class AnswerPart:
    """`index` counts the parts of an answer. `text` of a call is its arguments; only calls have an id and a name."""

    kind: PartKind
    index: int
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class Change(Enum):
    """What happens to a part."""

    OPENED = "opened"
    GREW = "grew"
    CLOSED = "closed"


# The piece is what a part grew by, else empty.
PartStep = tuple[Change, AnswerPart, str]


class PartCutter:
    """Cuts the events of one answer into `parts`. One task at a time."""

    def __init__(self, *, never_empty: bool = False) -> None:
        """`never_empty`: an answer without events has one empty text."""
        self.parts: list[AnswerPart] = []
        self._open: AnswerPart | None = None
        self._never_empty = never_empty

    def push(self, event: ChatEvent) -> list[PartStep]:
        """The next event: what it does to the parts, in order."""
        match event:
            case ContentDelta(text):
                return self._grow(PartKind.TEXT, text)
            case ReasoningDelta(text):
                return self._grow(PartKind.REASONING, text)
            case ToolCallStart(_, call_id, name):
                return self._begin(PartKind.CALL, call_id, name)
            case ToolCallArguments(_, fragment):
                return self._grow(PartKind.CALL, fragment)

    def finish(self) -> list[PartStep]:
        """The answer has ended."""
        opened = self._begin(PartKind.TEXT) if self._never_empty and not self.parts else []
        return opened + self._close()

    def _grow(self, kind: PartKind, piece: str) -> list[PartStep]:
        steps = [] if self._open is not None and self._open.kind is kind else self._begin(kind)
        part = self.parts[-1]
        part.pieces.append(piece)
        return [*steps, (Change.GREW, part, piece)]

    def _begin(self, kind: PartKind, call_id: str = "", name: str = "") -> list[PartStep]:
        closed = self._close()
        self._open = AnswerPart(kind, len(self.parts), call_id, name)
        self.parts.append(self._open)
        return [*closed, (Change.OPENED, self._open, "")]

    def _close(self) -> list[PartStep]:
        closed, self._open = self._open, None
        return [] if closed is None else [(Change.CLOSED, closed, "")]


def parts_of(events: Iterable[ChatEvent], *, never_empty: bool = False) -> list[AnswerPart]:
    """The parts of a whole answer."""
    cutter = PartCutter(never_empty=never_empty)
    for event in events:
        cutter.push(event)
    cutter.finish()
    return cutter.parts

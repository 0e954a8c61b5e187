"""Texts cut into pieces, and events joined again, for tests that no cut matters."""

from collections.abc import Iterable

from router.text.chat_events import ChatEvent, ContentDelta, ReasoningDelta, ToolCallArguments, ToolCallStart


def pieces_of(text: str, sizes: list[int]) -> list[str]:
    """`text` in pieces of the given sizes, used in turn."""
    pieces, start, turn = [], 0, 0
    while start < len(text):
        size = sizes[turn % len(sizes)]
        pieces.append(text[start : start + size])
        start, turn = start + size, turn + 1
    return pieces


def merged(events: Iterable[ChatEvent]) -> list[ChatEvent]:
    """The same events with neighbours of one kind as one."""
    joined: list[ChatEvent] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, ContentDelta) and isinstance(last, ContentDelta):
            joined[-1] = ContentDelta(last.text + event.text)
        elif isinstance(event, ReasoningDelta) and isinstance(last, ReasoningDelta):
            joined[-1] = ReasoningDelta(last.text + event.text)
        elif isinstance(event, ToolCallArguments) and isinstance(last, ToolCallArguments) and last.index == event.index:
            joined[-1] = ToolCallArguments(last.index, last.fragment + event.fragment)
        else:
            joined.append(event)
    return joined


def content_of(events: Iterable[ChatEvent]) -> str:
    """All content."""
    return "".join(event.text for event in events if isinstance(event, ContentDelta))


def calls_of(events: Iterable[ChatEvent]) -> list[tuple[str, str]]:
    """(name, arguments) of each call."""
    calls: list[tuple[str, str]] = []
    for event in events:
        if isinstance(event, ToolCallStart):
            assert event.index == len(calls)
            calls.append((event.name, ""))
        elif isinstance(event, ToolCallArguments):
            name, arguments = calls[event.index]
            assert event.fragment
            assert event.index == len(calls) - 1
            calls[event.index] = (name, arguments + event.fragment)
    return calls

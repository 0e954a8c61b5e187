"""What an answer in a conversation consists of: the seam between the text of a model and every API that shows chats.

`ChatReader` (chat_reader.py) makes these events from text; the front doors dress them. The events of an answer come in
the order of its text, and are the same however the text was cut into pieces, but for how long their fragments are.
"""

from dataclasses import dataclass

from msgspec import Struct

from router.generation import TextChunk, TextEnd


class ContentDelta(Struct, frozen=True, gc=False):
    """The next piece of what the assistant says; never empty."""

    text: str


class ReasoningDelta(Struct, frozen=True, gc=False):
    """The next piece of what the model thinks before it answers; never empty."""

    text: str


class ToolCallStart(Struct, frozen=True, gc=False):
    """A call begins. `index` counts the calls of an answer from 0; `name` is one of the request's tools."""

    index: int
    call_id: str
    name: str


class ToolCallArguments(Struct, frozen=True, gc=False):
    """The next piece of a call's arguments, as the model wrote them. All pieces of an index make one JSON object,
    unless the answer ended within it or its JSON broke. A call's pieces follow its start; calls never interleave."""

    index: int
    fragment: str


ChatEvent = ContentDelta | ReasoningDelta | ToolCallStart | ToolCallArguments


class ChatChunk(TextChunk, frozen=True, gc=False):
    """A TextChunk and the events that it made final. `text` is the model's own, markers included."""

    events: tuple[ChatEvent, ...] = ()


@dataclass(frozen=True, slots=True)
class ChatEnd(TextEnd):
    """The last item of a chat: a TextEnd, whether there were tool calls, and how many tokens came up to the last piece
    of reasoning (with those of the same step)."""

    made_calls: bool = False
    reasoning_tokens: int = 0

"""The events of a chat in OpenAI's shapes: deltas of a stream, and whole messages."""

from collections.abc import Sequence
from typing import Any

from router.text.chat_events import ChatEvent, ContentDelta, ReasoningDelta, ToolCallArguments, ToolCallStart


def chat_delta(events: Sequence[ChatEvent]) -> dict[str, Any]:
    """Events as one delta; empty for none. A call has its id, type and name only where it begins.

    Content, reasoning and each call are of their own in a delta, so events of different kinds need no order in it.
    """
    if len(events) == 1 and isinstance(event := events[0], ContentDelta):  # most deltas by far
        return {"content": event.text}
    delta: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for key, texts in _texts(events).items():
        delta[key] = "".join(texts)
    for event in events:
        if isinstance(event, ToolCallStart):
            function = {"name": event.name, "arguments": ""}
            calls[event.index] = {
                "index": event.index,
                "id": event.call_id,
                "type": "function",
                "function": function,
            }
        elif isinstance(event, ToolCallArguments):
            call = calls.setdefault(event.index, {"index": event.index, "function": {"arguments": ""}})
            call["function"]["arguments"] += event.fragment
    if calls:
        delta["tool_calls"] = list(calls.values())
    return delta


def chat_message(events: Sequence[ChatEvent]) -> dict[str, Any]:
    """The message of a whole answer. `content` is null where there are only calls."""
    texts = _texts(events)
    content = "".join(texts.get("content", ()))
    calls = _calls(events)
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if "reasoning_content" in texts:
        message["reasoning_content"] = "".join(texts["reasoning_content"])
    if calls:
        message["content"] = content or None
        message["tool_calls"] = calls
    return message


def _texts(events: Sequence[ChatEvent]) -> dict[str, list[str]]:
    texts: dict[str, list[str]] = {}
    for event in events:
        if isinstance(event, ContentDelta):
            texts.setdefault("content", []).append(event.text)
        elif isinstance(event, ReasoningDelta):
            texts.setdefault("reasoning_content", []).append(event.text)
    return texts


def _calls(events: Sequence[ChatEvent]) -> list[dict[str, Any]]:
    heads = [event for event in events if isinstance(event, ToolCallStart)]
    fragments: list[list[str]] = [[] for _ in heads]
    for event in events:
        if isinstance(event, ToolCallArguments):
            fragments[event.index].append(event.fragment)
    return [
        {
            "id": head.call_id,
            "type": "function",
            "function": {"name": head.name, "arguments": "".join(fragments[head.index])},
        }
        for head in heads
    ]

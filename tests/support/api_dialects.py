"""The APIs beside chat completions that speak of the same chats: their smallest bodies, and their streams."""

import json
from typing import Any

from tests.support.http_door import MODEL

MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"


def messages_body(**fields: Any) -> dict[str, Any]:
    """The smallest request of `/v1/messages`, and what is to be added to it."""
    return {"model": MODEL, "max_tokens": 64, "messages": [{"role": "user", "content": "Say something."}], **fields}


def responses_body(**fields: Any) -> dict[str, Any]:
    """The smallest request of `/v1/responses`, and what is to be added to it."""
    return {"model": MODEL, "input": "Say something.", **fields}


def named_events(body: bytes) -> list[dict[str, Any]]:
    """The events of a stream whose names are the types of their data; comments are left out."""
    assert body.endswith(b"\n\n")
    found = []
    for block in body.decode().removesuffix("\n\n").split("\n\n"):
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def message_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream of `/v1/messages` makes, block by block; the order of its events is checked."""
    first, *blocks, delta, stop = events
    assert (first["type"], delta["type"], stop["type"]) == ("message_start", "message_delta", "message_stop")
    message = first["message"]
    assert (message["content"], message["stop_reason"], message["stop_sequence"]) == ([], None, None)
    opened: list[dict[str, Any]] = []
    texts: list[str] = []
    is_open = False
    for event in blocks:
        assert event["index"] == len(opened) - (event["type"] != "content_block_start")
        assert is_open != (event["type"] == "content_block_start")
        if event["type"] == "content_block_start":
            opened.append(event["content_block"])
            texts.append("")
        elif event["type"] == "content_block_delta":
            assert event["delta"].pop("type") in ("text_delta", "thinking_delta", "input_json_delta")
            (piece,) = event["delta"].values()
            assert piece
            texts[-1] += piece
        is_open = event["type"] != "content_block_stop"
    assert not is_open
    for block, text in zip(opened, texts, strict=True):
        name = {"text": "text", "thinking": "thinking", "tool_use": "input"}[block["type"]]
        block[name] = json.loads(text or "{}") if name == "input" else text
    return {**message, "content": opened, **delta["delta"], "usage": delta["usage"]}


def response_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The response that a stream of `/v1/responses` ends with; its deltas are checked against it."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    response: dict[str, Any] = events[-1]["response"]
    assert events[-1]["type"] == f"response.{response['status']}"
    done: list[dict[str, Any]] = []
    text = ""
    for event in events[2:-1]:
        kind = event["type"].removeprefix("response.")
        assert event["output_index"] == len(done)
        if kind == "output_item.added":
            text = ""
            item_id = event["item"]["id"]
        elif kind.endswith(".delta"):
            assert event["item_id"] == item_id
            text += event["delta"]
        elif kind.endswith(("_text.done", "_arguments.done")):
            assert event.get("text", event.get("arguments")) == text
        elif kind == "output_item.done":
            done.append(event["item"])
            content = event["item"].get("content")
            assert text == (content[0]["text"] if content else event["item"]["arguments"])
    assert done == response["output"]
    return response


def without_ids(value: Any) -> Any:
    """An answer without what differs each time."""
    if isinstance(value, list):
        return [without_ids(entry) for entry in value]
    if isinstance(value, dict):
        return {
            name: without_ids(entry) for name, entry in value.items() if name not in ("id", "call_id", "created_at")
        }
    return value

"""Text streams as the messages of the gRPC API."""

from collections.abc import Iterator, Sequence
from typing import Final

from kvferry_rpc.common_pb2 import FinishReason
from kvferry_rpc.public_pb2 import Finish, GenerateResponse, ToolCallDelta
from router.generation import TextChunk, TextEnd
from router.text.chat_events import (
    ChatChunk,
    ChatEnd,
    ChatEvent,
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)

MAX_PROMPT_POSITIONS: Final = 256
"""Of one message."""


def responses(
    request_id: str, index: int, item: TextChunk | TextEnd, *, with_receipt: bool
) -> Iterator[GenerateResponse]:
    """The next item of choice `index`: one message, and before it those with log probabilities of the prompt."""
    if isinstance(item, TextEnd):
        yield GenerateResponse(request_id=request_id, index=index, finish=_finish(item, with_receipt))
        return
    for first in range(0, len(item.prompt_logprobs), MAX_PROMPT_POSITIONS):
        positions = item.prompt_logprobs[first : first + MAX_PROMPT_POSITIONS]
        yield GenerateResponse(request_id=request_id, index=index, prompt_logprobs=positions)
    message = GenerateResponse(request_id=request_id, index=index, tokens=item.tokens)
    if not isinstance(item, ChatChunk):
        message.text = item.text
    elif len(item.events) == 1 and isinstance(event := item.events[0], ContentDelta):  # most chunks by far
        message.text = event.text
    else:
        message.text = "".join(event.text for event in item.events if isinstance(event, ContentDelta))
        message.reasoning = "".join(event.text for event in item.events if isinstance(event, ReasoningDelta))
        message.tool_calls.extend(_calls(item.events))
    yield message


def _calls(events: Sequence[ChatEvent]) -> list[ToolCallDelta]:
    """One delta for each call that the events are of."""
    deltas: dict[int, ToolCallDelta] = {}
    for event in events:
        if isinstance(event, ToolCallStart):
            deltas[event.index] = ToolCallDelta(index=event.index, id=event.call_id, name=event.name)
        elif isinstance(event, ToolCallArguments):
            deltas.setdefault(event.index, ToolCallDelta(index=event.index)).arguments += event.fragment
    return list(deltas.values())


def _finish(end: TextEnd, with_receipt: bool) -> Finish:
    finish = Finish(
        reason=end.reason,
        prompt_tokens=end.prompt_tokens,
        completion_tokens=end.completion_tokens,
        cached_tokens=end.cached_tokens,
        stop_string=end.stop_string,
    )
    if isinstance(end, ChatEnd):
        # An answer cut short says so, calls or not: the last one may be incomplete.
        if end.made_calls and end.reason == FinishReason.STOP:
            finish.reason = FinishReason.TOOL_CALLS
        finish.reasoning_tokens = end.reasoning_tokens
    if with_receipt:
        finish.receipt.CopyFrom(end.receipt)
    return finish

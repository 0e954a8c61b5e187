"""From a stream of tokens to the events of a chat: `text_generation.py`, and a `ChatReader` behind it."""

from dataclasses import fields

from router.generation import GenerationRequest, Sink, TextChunk, TextEnd, TokenSource
from router.text.chat_events import ChatChunk, ChatEnd, ChatEvent, ReasoningDelta
from router.text.chat_reader import ChatReader, ChatSyntax
from router.text.text_generation import generate
from router.text.tokenizer import Tokenizer


async def generate_chat(
    source: TokenSource, request: GenerationRequest, tokenizer: Tokenizer, syntax: ChatSyntax, sink: Sink[TextChunk]
) -> ChatEnd:
    """As `generate`, with ChatChunks: each with its tokens, also if it has no events.

    When the answer is over although the model may go on, the source is told to stop and the rest of the text dropped.
    """
    events = _EventsOfText(ChatReader(syntax, request.request_id), sink)
    return await events.finish(await generate(source, request, tokenizer, events))


class _EventsOfText:
    """A sink of text that hands on the events in it."""

    def __init__(self, reader: ChatReader, sink: Sink[TextChunk]) -> None:
        self._reader = reader
        self._sink = sink
        self._received = 0
        self._reasoning_tokens = 0

    def push(self, chunk: TextChunk) -> bool:
        self._received += len(chunk.tokens)
        events = tuple(self._reader.push(chunk.text))
        return self._hand_on(chunk, events) and not self._reader.is_done

    async def wants_more(self) -> bool:
        return await self._sink.wants_more() and not self._reader.is_done

    async def finish(self, end: TextEnd) -> ChatEnd:
        """No text follows: push what was held back."""
        if (rest := self._reader.finish()) and not self._hand_on(TextChunk("", ()), tuple(rest)):
            await self._sink.wants_more()
        known = {field.name: getattr(end, field.name) for field in fields(TextEnd)}
        return ChatEnd(**known, made_calls=self._reader.made_calls, reasoning_tokens=self._reasoning_tokens)

    def _hand_on(self, chunk: TextChunk, events: tuple[ChatEvent, ...]) -> bool:
        if events and isinstance(events[0], ReasoningDelta):
            self._reasoning_tokens = self._received
        return self._sink.push(ChatChunk(chunk.text, chunk.tokens, chunk.prompt_logprobs, events))

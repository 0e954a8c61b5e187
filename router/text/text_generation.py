"""From a stream of tokens to a stream of text: the one path of both front doors."""

from dataclasses import replace

from kvferry_rpc.common_pb2 import FinishReason, TokenOutput
from router.generation import GenerationRequest, Sink, TextChunk, TextEnd, TokenBatch, TokenEnd, TokenSource
from router.text.detokenizer import TextStream
from router.text.tokenizer import Tokenizer


async def generate(
    source: TokenSource, request: GenerationRequest, tokenizer: Tokenizer, sink: Sink[TextChunk]
) -> TextEnd:
    """Push text to `sink` as it becomes final.

    A stop string ends the answer before its first character; so does a sink that wants no more. The source is told
    then. Raises KvferryError when the request cannot be finished, and what the sink raises. Cancelling the task cancels
    the request. Event-loop task only.
    """
    text = _TextOfTokens(request, tokenizer, sink)
    return await text.finish(await source.run(request, text))


class _TextOfTokens:
    """A sink of tokens that hands on their text."""

    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer, sink: Sink[TextChunk]) -> None:
        self._text = TextStream(tokenizer, request.stop, shown_tokens=request.shown_tokens)
        self._has_stop = bool(request.stop)
        self._prompt_only = request.prompt_only
        self._sink = sink
        self._received = 0
        self._cut = False  # By a stop string, or because the reader has enough.

    def push(self, batch: TokenBatch) -> bool:
        tokens = () if self._prompt_only else batch.tokens
        if self._has_stop:
            piece, tokens = self._up_to_stop(tokens)
        else:
            piece, _ = self._text.push([token.token_id for token in tokens])
        self._received += len(tokens)
        has_room = self._sink.push(TextChunk(piece, tokens, batch.prompt_logprobs))
        return has_room and not self._cut

    async def wants_more(self) -> bool:
        if not await self._sink.wants_more():
            self._cut = True
        return not self._cut

    async def finish(self, end: TokenEnd) -> TextEnd:
        """The source has ended: push what was held back. A stop string overrules the source's reason, and its count
        where it cut a batch in two."""
        text = self._text
        if not self._cut and (rest := text.finish()) and not self._sink.push(TextChunk(rest, ())):
            # A reader that has enough of this takes nothing from anybody.
            await self._sink.wants_more()
        if self._prompt_only:
            end = replace(end, reason=FinishReason.LENGTH, completion_tokens=0)
        stopped = self._cut or text.stopped
        return TextEnd(
            reason=FinishReason.STOP if stopped else end.reason,
            prompt_tokens=end.prompt_tokens,
            completion_tokens=self._received if stopped else end.completion_tokens,
            cached_tokens=end.cached_tokens,
            receipt=end.receipt,
            stop_string=text.stop_string,
        )

    def _up_to_stop(self, tokens: tuple[TokenOutput, ...]) -> tuple[str, tuple[TokenOutput, ...]]:
        """Decode one token at a time, so that none behind a stop string is counted or shown."""
        pieces = []
        for count, token in enumerate(tokens, start=1):
            piece, self._cut = self._text.push([token.token_id])
            pieces.append(piece)
            if self._cut:
                return "".join(pieces), tokens[:count]
        return "".join(pieces), tokens

"""From a stream of tokens to a stream of text: the one path of both front doors."""

from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import cast

from kvferry_rpc.common_pb2 import ErrorCode, FinishReason, TokenOutput
from router.generation import EnoughTokens, GenerationRequest, TextChunk, TextEnd, TokenBatch, TokenEnd, TokenSource
from router.text.detokenizer import TextStream
from router.text.tokenizer import Tokenizer
from runtime.errors import KvferryError


async def generate(
    source: TokenSource, request: GenerationRequest, tokenizer: Tokenizer
) -> AsyncGenerator[TextChunk | TextEnd, None]:
    """Yield text as it becomes final, then exactly one TextEnd.

    A stop string ends the answer before its first character, and the source is told to stop (EnoughTokens). A reader
    that has what it wanted throws EnoughTokens into this iterator too, at a TextChunk, and reads on to the TextEnd.
    Close the iterator (as `contextlib.aclosing` does) to cancel early. Raises KvferryError when the request cannot be
    finished. Event-loop task only.
    """
    text = TextStream(tokenizer, request.stop, shown_tokens=request.shown_tokens)
    received = 0
    stopped = False
    end: TokenEnd | None = None
    # A TokenSource is an async generator: closing it is how a request is cancelled.
    tokens = cast(AsyncGenerator[TokenBatch | TokenEnd, None], source.tokens(request))
    async with aclosing(tokens):
        async for item in tokens:
            if isinstance(item, TokenEnd):
                end = item  # Read on to the end proper: closing the source now would look like a cancellation.
                continue
            if request.prompt_only:
                item = replace(item, tokens=())
            chunk, stopped = _push(text, item.tokens, split=bool(request.stop))
            if item.prompt_logprobs:
                chunk = replace(chunk, prompt_logprobs=item.prompt_logprobs)
            received += len(chunk.tokens)
            if stopped:
                end = await _enough(tokens)
            try:
                yield chunk
            except EnoughTokens:
                if not stopped:
                    stopped, end = True, await _enough(tokens)
            if stopped:
                break
    if end is None:
        raise KvferryError(ErrorCode.INTERNAL, "the token stream ended without saying why")
    if not stopped and (rest := text.finish()):
        # The source has ended: a reader that has enough of this takes nothing from it.
        with suppress(EnoughTokens):
            yield TextChunk(rest, ())
    if request.prompt_only:
        end = replace(end, reason=FinishReason.LENGTH, completion_tokens=0)
    yield _end(end, received, stopped=stopped or text.stopped, stop_string=text.stop_string)


async def _enough(tokens: AsyncGenerator[TokenBatch | TokenEnd, None]) -> TokenEnd | None:
    """Tell the source that the answer is complete: it cancels the request on its workers and sums up."""
    item = await tokens.athrow(EnoughTokens())
    return item if isinstance(item, TokenEnd) else None


def _push(text: TextStream, tokens: tuple[TokenOutput, ...], *, split: bool) -> tuple[TextChunk, bool]:
    """Decode a batch. With stop strings one token at a time, so that none behind the match is counted or shown."""
    if not split:
        piece, stopped = text.push([token.token_id for token in tokens])
        return TextChunk(piece, tokens), stopped
    pieces = []
    for count, token in enumerate(tokens, start=1):
        piece, stopped = text.push([token.token_id])
        pieces.append(piece)
        if stopped:
            return TextChunk("".join(pieces), tokens[:count]), True
    return TextChunk("".join(pieces), tokens), False


def _end(end: TokenEnd, received: int, *, stopped: bool, stop_string: str | None) -> TextEnd:
    """The source's account. A stop string overrules its reason, and its count when it cut a batch in two."""
    return TextEnd(
        reason=FinishReason.STOP if stopped else end.reason,
        prompt_tokens=end.prompt_tokens,
        completion_tokens=received if stopped else end.completion_tokens,
        cached_tokens=end.cached_tokens,
        receipt=end.receipt,
        stop_string=stop_string,
    )

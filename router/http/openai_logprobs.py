"""Logprobs in the shapes of OpenAI's two endpoints."""

import codecs
from collections.abc import Sequence
from typing import Any, Protocol

from kvferry_rpc.common_pb2 import TokenOutput

# JSON has no infinity; OpenAI uses this value for "practically impossible" too.
_LOWEST = -9999.0


class TokenTexts(Protocol):
    """What a single token stands for. `token_text` may hold replacement marks where the bytes are no whole text."""

    def token_text(self, token_id: int) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...


def chat_logprobs(tokens: Sequence[TokenOutput], texts: TokenTexts) -> dict[str, Any]:
    """`{"content": [{token, logprob, bytes, top_logprobs}, ...]}`, one entry a token."""
    return {
        "content": [
            {
                **_entry(token.token_id, token.logprob, texts),
                "top_logprobs": [_entry(top.token_id, top.logprob, texts) for top in token.top_logprobs],
            }
            for token in tokens
        ],
        "refusal": None,
    }


class CompletionLogprobs:
    """Shapes the logprobs of one choice of `/v1/completions`, whole or piece by piece."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        # A character split over tokens counts where it is complete, as in the text itself.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def shape(self, tokens: Sequence[TokenOutput]) -> dict[str, Any]:
        """Four parallel lists for the next tokens.

        The chosen token is always among its `top_logprobs`, so there may be one more of them than was asked for.
        """
        names = [self._texts.token_text(token.token_id) for token in tokens]
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(self._texts.token_bytes(token.token_id)))
        return {
            "tokens": names,
            "token_logprobs": [max(token.logprob, _LOWEST) for token in tokens],
            "top_logprobs": [self._top(token, name) for token, name in zip(tokens, names, strict=True)],
            "text_offset": offsets,
        }

    def _top(self, token: TokenOutput, name: str) -> dict[str, float]:
        top = {self._texts.token_text(entry.token_id): max(entry.logprob, _LOWEST) for entry in token.top_logprobs}
        return {**top, name: max(token.logprob, _LOWEST)}


def _entry(token_id: int, logprob: float, texts: TokenTexts) -> dict[str, Any]:
    return {
        "token": texts.token_text(token_id),
        "logprob": max(logprob, _LOWEST),
        "bytes": list(texts.token_bytes(token_id)),
    }

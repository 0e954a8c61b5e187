"""Logprobs in the shapes of OpenAI's two endpoints, and those of prompts in vLLM's."""

from collections.abc import Sequence
from typing import Any, Protocol

from kvferry_rpc.common_pb2 import PromptTokenLogprob, TokenLogprob, TokenOutput
from runtime.token_pieces import PieceDecoder, TokenPieces

# JSON has no infinity; OpenAI uses this value for "practically impossible" too.
_LOWEST = -9999.0


class TokenTexts(Protocol):
    """What a single token stands for. `token_text` may hold replacement marks where the bytes are no whole text."""

    @property
    def pieces(self) -> TokenPieces: ...

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
    """Shapes the logprobs of one choice of `/v1/completions`, whole or piece by piece.

    Offsets count characters of the choice's text. A character split over tokens counts where it is complete, and a
    special token, which is not part of the text, for nothing.
    """

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._decoder = PieceDecoder(texts.pieces)
        self._offset = 0

    def shape_prompt(
        self, token_ids: Sequence[int], entries: Sequence[PromptTokenLogprob], num_alternatives: int
    ) -> dict[str, Any]:
        """Four parallel lists for an echoed prompt, before any other; its first token has nulls.

        `entries` are those of all tokens but the first, maybe with more alternatives than are to be shown.
        """
        names = [self._texts.token_text(token_id) for token_id in token_ids]
        decoder = PieceDecoder(self._texts.pieces)
        offsets = self._offsets(decoder, token_ids)
        self._offset += len(decoder.finish())
        tops = [
            _top(entry, entry.top_logprobs[:num_alternatives], name, self._texts)
            for entry, name in zip(entries, names[1:], strict=True)
        ]
        return {
            "tokens": names,
            "token_logprobs": [None, *(max(entry.logprob, _LOWEST) for entry in entries)],
            "top_logprobs": [None, *tops],
            "text_offset": offsets,
        }

    def shape(self, tokens: Sequence[TokenOutput]) -> dict[str, Any]:
        """Four parallel lists for the next tokens.

        The chosen token is always among its `top_logprobs`, so there may be one more of them than was asked for.
        """
        names = [self._texts.token_text(token.token_id) for token in tokens]
        return {
            "tokens": names,
            "token_logprobs": [max(token.logprob, _LOWEST) for token in tokens],
            "top_logprobs": [
                _top(token, token.top_logprobs, name, self._texts) for token, name in zip(tokens, names, strict=True)
            ],
            "text_offset": self._offsets(self._decoder, [token.token_id for token in tokens]),
        }

    def _offsets(self, decoder: PieceDecoder, token_ids: Sequence[int]) -> list[int]:
        offsets = []
        for token_id in token_ids:
            offsets.append(self._offset)
            self._offset += len(decoder.push((token_id,)))
        return offsets


def prompt_logprobs(
    entries: Sequence[PromptTokenLogprob], num_alternatives: int, texts: TokenTexts
) -> list[dict[str, Any] | None]:
    """vLLM's form: null for the first token of a prompt, then for each token an object of token ids, its own first."""
    return [None, *(_by_id(entry, num_alternatives, texts) for entry in entries)]


def _by_id(entry: PromptTokenLogprob, num_alternatives: int, texts: TokenTexts) -> dict[str, Any]:
    found = {str(entry.token_id): _ranked(entry.token_id, entry.logprob, entry.rank, texts)}
    for rank, top in enumerate(entry.top_logprobs[:num_alternatives], start=1):
        found.setdefault(str(top.token_id), _ranked(top.token_id, top.logprob, rank, texts))
    return found


def _ranked(token_id: int, logprob: float, rank: int, texts: TokenTexts) -> dict[str, Any]:
    return {"logprob": max(logprob, _LOWEST), "rank": rank, "decoded_token": texts.token_text(token_id)}


def _top(
    token: TokenOutput | PromptTokenLogprob, entries: Sequence[TokenLogprob], name: str, texts: TokenTexts
) -> dict[str, float]:
    top = {texts.token_text(entry.token_id): max(entry.logprob, _LOWEST) for entry in entries}
    return {**top, name: max(token.logprob, _LOWEST)}


def _entry(token_id: int, logprob: float, texts: TokenTexts) -> dict[str, Any]:
    return {
        "token": texts.token_text(token_id),
        "logprob": max(logprob, _LOWEST),
        "bytes": list(texts.token_bytes(token_id)),
    }

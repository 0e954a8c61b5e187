"""What each token adds to the text, as bytes.

A tokenizer's decoder is a function of the whole token list. For the two kinds that decoder-only models use, it comes
apart into one piece a token, which makes streaming exact and cheap, and gives log probabilities their `bytes`:

* BYTE_LEVEL (GPT-2, Llama 3, Qwen, SmolLM): a piece is raw bytes; the text is the UTF-8 reading of all pieces joined,
  with U+FFFD for what is malformed.
* BYTE_FALLBACK (SentencePiece: Llama 2, Gemma, TinyLlama): a piece is text, but for tokens `<0x00>` to `<0xFF>`, which
  are one byte each. A run of such bytes is read as a whole: text if it is valid UTF-8, else one U+FFFD a byte.

Other decoders are refused when the tokenizer is loaded.
"""

import codecs
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

_REPLACEMENT = "�"
_UTF8 = codecs.getincrementaldecoder("utf-8")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class DecoderKind(Enum):
    """How pieces become text."""

    BYTE_LEVEL = "byte_level"
    BYTE_FALLBACK = "byte_fallback"


@dataclass(frozen=True, slots=True)
class TokenPieces:
    """The pieces of a vocabulary. Immutable; any thread.

    `pieces[token_id]` is None for an id without a token; `visible` is the same with special tokens None as well.
    `num_leading_spaces` are removed from the very start of a text. Use `build_pieces`.
    """

    kind: DecoderKind
    pieces: tuple[bytes | None, ...]
    visible: tuple[bytes | None, ...]
    byte_tokens: frozenset[int]
    num_leading_spaces: int

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a whole token list. Ids without a token add nothing."""
        decoder = PieceDecoder(self, skip_special_tokens=skip_special_tokens)
        return decoder.push(token_ids) + decoder.finish()


def build_pieces(decoder: Mapping[str, Any] | None, tokens: Mapping[str, int], special: Iterable[int]) -> TokenPieces:
    """Take apart the `decoder` section of a tokenizer.json for the vocabulary `tokens` (text to id).

    Raises ValueError for a decoder that does not come apart into pieces.
    """
    steps = _steps(decoder)
    kinds = [step.get("type") for step in steps]
    pieces: list[bytes | None] = [None] * (max(tokens.values(), default=-1) + 1)
    byte_tokens: set[int] = set()
    if kinds == ["ByteLevel"]:
        kind = DecoderKind.BYTE_LEVEL
        num_leading_spaces = 0
        alphabet = _byte_alphabet()
        for token, token_id in tokens.items():
            pieces[token_id] = _byte_level_piece(token, alphabet)
    else:
        kind = DecoderKind.BYTE_FALLBACK
        (mark, blank), has_bytes, num_leading_spaces = _sentencepiece_settings(steps, kinds)
        for token, token_id in tokens.items():
            if has_bytes and (match := _BYTE_TOKEN.fullmatch(token)):
                pieces[token_id] = bytes([int(match[1], 16)])
                byte_tokens.add(token_id)
            else:
                pieces[token_id] = token.replace(mark, blank).encode()
    visible = list(pieces)
    for token_id in special:
        visible[token_id] = None
    return TokenPieces(kind, tuple(pieces), tuple(visible), frozenset(byte_tokens), num_leading_spaces)


class PieceDecoder:
    """Incremental decoding of one token stream: pushes plus finish give exactly the text of the whole list.

    Holds back only bytes that later tokens can still change: an unfinished character, or an open run of byte tokens.
    One thread at a time.
    """

    def __init__(self, pieces: TokenPieces, *, skip_special_tokens: bool = True) -> None:
        self._table = pieces.visible if skip_special_tokens else pieces.pieces
        self._byte_tokens = pieces.byte_tokens
        self._is_byte_level = pieces.kind is DecoderKind.BYTE_LEVEL
        self._utf8 = _UTF8("replace")
        self._run = bytearray()
        self._leading_spaces = pieces.num_leading_spaces

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens make final."""
        if self._is_byte_level:
            return self._utf8.decode(b"".join([self._piece(token_id) or b"" for token_id in token_ids]))
        parts: list[str] = []
        for token_id in token_ids:
            piece = self._piece(token_id)
            if piece is None:
                continue
            if token_id in self._byte_tokens:
                self._run += piece
            else:
                parts.append(self._close_run())
                parts.append(piece.decode())
        return self._without_leading_spaces("".join(parts))

    def finish(self) -> str:
        """The rest; nothing may be pushed after it."""
        if self._is_byte_level:
            return self._utf8.decode(b"", final=True)
        return self._without_leading_spaces(self._close_run())

    def _piece(self, token_id: int) -> bytes | None:
        # A model's output layer may be wider than its vocabulary; ids beyond it have no text.
        return self._table[token_id] if token_id < len(self._table) else None

    def _close_run(self) -> str:
        run = bytes(self._run)
        self._run.clear()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return _REPLACEMENT * len(run)

    def _without_leading_spaces(self, text: str) -> str:
        while self._leading_spaces and text:
            if text[0] != " ":
                self._leading_spaces = 0
                break
            text = text[1:]
            self._leading_spaces -= 1
        return text


def _steps(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        raise ValueError("the tokenizer has no decoder")
    if decoder.get("type") == "Sequence":
        return list(decoder["decoders"])
    return [decoder]


def _sentencepiece_settings(steps: list[Mapping[str, Any]], kinds: list[Any]) -> tuple[tuple[str, str], bool, int]:
    """((mark, what it stands for), whether there are byte tokens, leading spaces to remove)."""
    order = [kind for kind in ("Replace", "ByteFallback", "Fuse", "Strip") if kind in kinds]
    if kinds != order or "Replace" not in kinds or ("Strip" in kinds and "Fuse" not in kinds):
        raise ValueError(f"decoder {' + '.join(map(str, kinds))} is not supported")
    settings = dict(zip(kinds, steps, strict=True))
    pattern, content = settings["Replace"]["pattern"].get("String"), settings["Replace"]["content"]
    if not isinstance(pattern, str):
        raise ValueError("a decoder that replaces a regular expression is not supported")
    strip = settings.get("Strip", {"content": " ", "start": 0, "stop": 0})
    if strip["content"] != " " or strip["stop"] != 0:
        raise ValueError("a decoder that strips anything but leading spaces is not supported")
    return (pattern, content), "ByteFallback" in kinds, int(strip["start"])


def _byte_level_piece(token: str, alphabet: Mapping[str, int]) -> bytes:
    try:
        return bytes([alphabet[char] for char in token])
    except KeyError:  # an added token in plain text
        return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level vocabularies.

    Printable bytes of Latin-1 stand for themselves; the others are numbered from U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(hidden)})
    return alphabet

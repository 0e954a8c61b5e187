"""How few tokens a text can become: what is clearly too long need not be tokenised to be refused.

Tokenising takes about a hundred bytes of memory for each byte of text, and a second for a megabyte.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from runtime.token_pieces import DecoderKind, TokenPieces

# No sequence that NFC composes is more than three and a half times as long, in UTF-8, as what it becomes.
_NFC_SHRINKS: Final = 4
# They cut a text into parts and drop nothing of it; but see "Removed".
_CUTTERS: Final = frozenset(["ByteLevel", "Digits", "Split", "Metaspace", "UnicodeScripts"])
_NUM_BYTES: Final = 256
_MOST_BYTES_A_CHAR: Final = 4
_NEVER_IN_UTF8: Final = bytes([0xC0, 0xC1, *range(0xF5, 0x100)])


@dataclass(frozen=True, slots=True)
class TextBound:
    """A token stands for at most `most_bytes` bytes of UTF-8, not counting those of `unknown`, which become no token.
    Immutable; any thread."""

    most_bytes: int
    unknown: bytes = b""

    def least_tokens(self, text: str, max_tokens: int) -> int:
        """No more than the tokens that `text` becomes, exact enough to tell whether they are over `max_tokens`; 0 when
        they may not be. `text` is valid Unicode. A millisecond for megabytes."""
        if len(text) * _MOST_BYTES_A_CHAR <= max_tokens * self.most_bytes:
            return 0
        least = -(-len(text.encode().translate(None, self.unknown)) // self.most_bytes)
        return least if least > max_tokens else 0


def text_bound(description: Mapping[str, Any], pieces: TokenPieces) -> TextBound | None:
    """The bound of a tokenizer; None where there is none that is known.

    It is known where a text comes back as the pieces of its tokens, byte by byte: no token swallows what stands beside
    it, no part of a text is dropped but bytes that the vocabulary lacks, and nothing is normalised but to NFC.
    `description` is what is in tokenizer.json.
    """
    shrinks, unknown = _shrinks(description.get("normalizer")), _unknown_bytes(description, pieces)
    if shrinks is None or unknown is None or not _drops_nothing(description):
        return None
    if shrinks > 1 and unknown.strip(_NEVER_IN_UTF8):
        return None  # What is known of a text may become what is not.
    return TextBound(shrinks * max(len(piece) for piece in pieces.pieces if piece is not None), unknown)


def _shrinks(normalizer: Mapping[str, Any] | None) -> int | None:
    """By how much normalising makes a text shorter at most."""
    if normalizer is None:
        return 1
    kind = normalizer.get("type")
    if kind == "Sequence":
        total = 1
        for step in normalizer["normalizers"]:
            if (shrinks := _shrinks(step)) is None:
                return None
            total *= shrinks
        return total
    if kind == "NFC":
        return _NFC_SHRINKS
    # SentencePiece's mark for a blank, which is longer; the pieces have the blank.
    is_mark = kind == "Replace" and normalizer["pattern"] == {"String": " "} and normalizer["content"] == "▁"
    return 1 if is_mark or kind == "Prepend" else None


def _drops_nothing(description: Mapping[str, Any]) -> bool:
    if any(token["lstrip"] or token["rstrip"] for token in description["added_tokens"]):
        return False
    return all(step["type"] in _CUTTERS and step.get("behavior") != "Removed" for step in _cutters(description))


def _unknown_bytes(description: Mapping[str, Any], pieces: TokenPieces) -> bytes | None:
    """Bytes that are dropped because the vocabulary lacks them; None where that cannot be said of single bytes."""
    model = description["model"]
    if model.get("type") != "BPE" or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return None
    if pieces.kind is DecoderKind.BYTE_FALLBACK:
        return b"" if model.get("byte_fallback") and len(pieces.byte_tokens) == _NUM_BYTES else None
    if model.get("unk_token") or all(step["type"] != "ByteLevel" for step in _cutters(description)):
        return None
    known = {piece for piece in pieces.pieces if piece is not None and len(piece) == 1}
    return bytes(byte for byte in range(_NUM_BYTES) if bytes([byte]) not in known)


def _cutters(description: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    cutter = description.get("pre_tokenizer")
    if cutter is None:
        return ()
    steps: Sequence[Mapping[str, Any]] = cutter["pretokenizers"] if cutter["type"] == "Sequence" else (cutter,)
    return steps

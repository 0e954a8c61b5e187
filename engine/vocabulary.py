"""What each token id adds to a text, read from the model's tokenizer.json as data.

A worker has no tokenizer. Matching a grammar needs only the bytes of each token, which come from the same function that
the router detokenises with (`runtime.token_pieces`), so the two cannot disagree on what an answer says.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.model_config import read_json_object, unusable
from runtime.token_pieces import build_pieces

# JSON has no raw control characters in strings, and between values only these of them.
_JSON_CONTROLS = b"\n\r"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`tokens[token_id]` are the bytes that a token adds; b"" for special tokens and for ids without a token, which
    no grammar allows. As long as a row of logits. `eos_token_ids` end a text."""

    tokens: tuple[bytes, ...]
    eos_token_ids: frozenset[int]

    def for_json(self) -> "Vocabulary":
        """Without the tokens that hold a control character other than the ends of lines.

        xgrammar lets them into strings of bounded length, where they are no JSON.
        """
        banned = bytes(byte for byte in range(0x20) if byte not in _JSON_CONTROLS)
        tokens = (b"" if token.translate(None, banned) != token else token for token in self.tokens)
        return Vocabulary(tuple(tokens), self.eos_token_ids)


def read_vocabulary(
    tokenizer_path: Path, settings_path: Path, *, vocab_size: int, eos_token_ids: Iterable[int]
) -> Vocabulary:
    """From tokenizer.json and tokenizer_config.json, for logits [.., vocab_size]. Takes tens of milliseconds or, for
    large vocabularies, some tenths of a second. Raises KvferryError for files that are no use."""
    settings = read_json_object(settings_path)
    try:
        tokenizer = json.loads(tokenizer_path.read_bytes())
        tokens, special = _token_ids(tokenizer)
        special.update(tokens[name] for name in _special_names(settings) if name in tokens)
        pieces = build_pieces(tokenizer.get("decoder"), tokens, special).visible
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise unusable(f"{tokenizer_path} cannot be read as a vocabulary: {error!r}") from error
    known = [piece or b"" for piece in pieces[:vocab_size]]
    known.extend(b"" for _ in range(vocab_size - len(known)))
    eos = frozenset(eos_token_ids)
    for token_id in eos:
        known[token_id] = b""
    return Vocabulary(tuple(known), eos)


def _token_ids(tokenizer: dict[str, Any]) -> tuple[dict[str, int], set[int]]:
    """(text of each token, as the file writes it, to its id; ids of special tokens)."""
    vocab = tokenizer["model"]["vocab"]
    # Unigram models list [text, score] by id.
    tokens = dict(vocab) if isinstance(vocab, dict) else {entry[0]: index for index, entry in enumerate(vocab)}
    special = set()
    for added in tokenizer.get("added_tokens", ()):
        tokens[added["content"]] = added["id"]
        if added["special"]:
            special.add(added["id"])
    return tokens, special


def _special_names(settings: dict[str, Any]) -> list[str]:
    """Texts of the tokens that tokenizer_config.json makes special: the rule of the router's tokenizer."""
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    named = [value for key, value in settings.items() if key.endswith("_token")]
    named.extend(extra.values() if isinstance(extra, dict) else extra)
    contents = [value.get("content") if isinstance(value, dict) else value for value in named]
    return [content for content in contents if isinstance(content, str)]

"""The text that benchmarks read: the first chapters of Alice's Adventures in Wonderland (Lewis Carroll, 1865; in the
public domain), in bench/data."""

from pathlib import Path

from tokenizers import Tokenizer

from engine.prepared_model import PreparedModel

TEXT = Path(__file__).resolve().parents[1] / "data" / "alice.txt"


def text_tokens(model: PreparedModel) -> list[int]:
    """The token ids of the text, about 4,500 for common tokenizers, with nothing added."""
    tokenizer = Tokenizer.from_file(str(model.tokenizer_path))
    ids: list[int] = tokenizer.encode(TEXT.read_text(encoding="utf-8"), add_special_tokens=False).ids
    return ids


def excerpt(tokens: list[int], start: int, count: int) -> list[int]:
    """So many tokens of the text from `start` on; behind its end it begins again."""
    return [tokens[(start + offset) % len(tokens)] for offset in range(count)]

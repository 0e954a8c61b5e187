"""The bytes of tokens, read as data, against those who have a tokenizer: the router and transformers."""

import json
from pathlib import Path

import pytest
import tokenizers
import transformers

from engine.vocabulary import read_vocabulary
from router.text.tokenizer import Tokenizer
from runtime.errors import KvferryError
from tests.support.tiny_tokenizers import TINY_REAL, write_sentencepiece_model

CACHE = Path.home() / ".cache" / "kvferry"
PREPARED = sorted(path.parent for path in CACHE.glob("smollm2*/tokenizer.json"))


def read(directory: Path, vocab_size: int, eos: frozenset[int] = frozenset()) -> tuple[bytes, ...]:
    paths = directory / "tokenizer.json", directory / "tokenizer_config.json"
    return read_vocabulary(*paths, vocab_size=vocab_size, eos_token_ids=eos).tokens


def check_against_both(directory: Path) -> None:
    tokenizer = Tokenizer.load(directory)
    size = tokenizer.vocab_size
    tokens = read(directory, size, tokenizer.eos_token_ids)
    assert tokens == tuple(piece or b"" for piece in tokenizer.pieces.visible)
    other = transformers.PreTrainedTokenizerFast.from_pretrained(str(directory))
    # A token that is part of a character decodes to a replacement mark in both.
    for token_id in range(0, size, max(1, size // 500)):
        text = other.decode([token_id], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert tokens[token_id].decode(errors="replace") == text, token_id


def test_a_byte_level_vocabulary_is_read_as_the_router_and_transformers_read_it() -> None:
    check_against_both(TINY_REAL)


@pytest.mark.skipif(not PREPARED, reason="no prepared smollm2 in ~/.cache/kvferry")
def test_a_large_vocabulary_is_read_as_the_router_and_transformers_read_it() -> None:
    check_against_both(PREPARED[0])


def test_a_vocabulary_with_byte_fallback_is_read_as_the_router_reads_it(tmp_path: Path) -> None:
    directory = write_sentencepiece_model(tmp_path)
    tokens = read(directory, 272)
    assert tokens == tuple(piece or b"" for piece in Tokenizer.load(directory).pieces.visible)
    assert tokens[:6] == (b"", b"", b"", b"\x00", b"\x01", b"\x02")
    assert b" the" in tokens
    assert "日本".encode() in tokens


def test_an_added_token_has_text_unless_it_is_special(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(TINY_REAL / "tokenizer.json"))
    backend.add_tokens([tokenizers.AddedToken("<tool>", special=False), tokenizers.AddedToken("<named>")])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"sep_token": {"content": "<named>"}}))
    tokens = read(tmp_path, 4034)
    assert tokens[4032:] == (b"<tool>", b"")


def test_the_vocabulary_is_as_long_as_the_logits_are_wide() -> None:
    assert read(TINY_REAL, 5000)[4032:] == (b"",) * 968
    assert len(read(TINY_REAL, 100)) == 100


def test_ends_of_text_have_no_bytes_and_json_has_no_control_characters() -> None:
    paths = TINY_REAL / "tokenizer.json", TINY_REAL / "tokenizer_config.json"
    vocabulary = read_vocabulary(*paths, vocab_size=4032, eos_token_ids={2, 500})
    assert vocabulary.tokens[500] == b""
    for_json = vocabulary.for_json()
    assert for_json.eos_token_ids == {2, 500}
    assert b"\t" in vocabulary.tokens
    assert {byte for token in for_json.tokens for byte in token if byte < 0x20} == {10, 13}


@pytest.mark.parametrize(
    "content", ["{", "{}", '{"model": {}}', '{"model": {"vocab": {"a": 0}}, "decoder": {"type": "WordPiece"}}']
)
def test_a_file_that_is_no_use_is_refused_by_name(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(KvferryError, match=r"tokenizer\.json"):
        read(tmp_path, 10)

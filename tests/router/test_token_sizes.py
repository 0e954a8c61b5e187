"""How long a text that becomes so many tokens can be: a bound that no text may break, or none at all."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers, pre_tokenizers

from kvferry_rpc.common_pb2 import ErrorCode
from router.text.token_sizes import TextBound, text_bound
from router.text.tokenizer import Tokenizer
from runtime.errors import KvferryError
from tests.support.http_door import CONTEXT, Door, chat_body, completion_body, says
from tests.support.tiny_tokenizers import TINY_REAL, sentencepiece_backend, short_prompts, tiny_real


def bound_of(backend: tokenizers.Tokenizer) -> TextBound | None:
    return text_bound(json.loads(backend.to_str()), Tokenizer(backend).pieces)


def byte_level(**changes: Any) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer.from_file(str(TINY_REAL / "tokenizer.json"))
    for name, value in changes.items():
        setattr(backend, name, value)
    return backend


def with_token(**options: Any) -> tokenizers.Tokenizer:
    backend = byte_level()
    backend.add_tokens([tokenizers.AddedToken("<mark>", **options)])
    return backend


def lacking(*letters: str) -> tokenizers.Tokenizer:
    """Without the tokens of some bytes, as vocabularies made of little text are. A byte has a letter of its own."""
    description = json.loads(byte_level().to_str())
    vocabulary = description["model"]["vocab"]
    for number, letter in enumerate(letters):
        vocabulary[f"qqqq{number}"] = vocabulary.pop(letter)
    return tokenizers.Tokenizer.from_str(json.dumps(description))


KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte level": byte_level,
    "composed": lambda: byte_level(normalizer=normalizers.NFC()),
    # 0x04 and 0xf1, with which characters of other planes begin.
    "some bytes unknown": lambda: lacking("\u0104", "\u00f1"),
    "sentencepiece": sentencepiece_backend,
}
# What composing shortens most, marks alone, and special tokens.
ODD = [
    "\u1fbe\u0308\u0341",
    "\u1112\u1161\u11ab",
    "\u0301" * 50,
    "<|assistant|>" * 9,
    " " * 99,
    "\u212b\u0301",
    "=" * 70,
]


@pytest.mark.parametrize("kind", KINDS)
def test_no_text_has_fewer_tokens_than_the_bound_says(kind: str) -> None:
    backend = KINDS[kind]()
    tokenizer, bound = Tokenizer(backend), bound_of(backend)
    assert bound is not None
    assert (b"\x04" in bound.unknown) == (kind == "some bytes unknown")

    @settings(deadline=None, max_examples=60)
    @given(text=st.text(max_size=80) | st.lists(st.sampled_from(ODD), max_size=6).map("".join))
    def check(text: str) -> None:
        num_tokens = len(tokenizer.encode(text, add_special_tokens=False))
        assert bound.least_tokens(text, num_tokens) == 0
        assert all(bound.least_tokens(text, fewer) <= num_tokens for fewer in range(num_tokens))

    check()
    for text in (*short_prompts(), *ODD):
        assert bound.least_tokens(text, len(tokenizer.encode(text, add_special_tokens=False))) == 0


def cut_by(first: Any) -> tokenizers.Tokenizer:
    return byte_level(pre_tokenizer=pre_tokenizers.Sequence([first, pre_tokenizers.ByteLevel(False)]))


def composing(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    backend.normalizer = normalizers.NFC()
    return backend


UNBOUNDED: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "lower case": lambda: byte_level(normalizer=normalizers.Lowercase()),
    "NFKC": lambda: byte_level(normalizer=normalizers.NFKC()),
    "stripped": lambda: byte_level(normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])),
    "blanks dropped": lambda: cut_by(pre_tokenizers.WhitespaceSplit()),
    "a character dropped": lambda: cut_by(pre_tokenizers.Split(" ", "removed")),
    "no bytes": lambda: byte_level(pre_tokenizer=pre_tokenizers.Digits(True)),
    "blanks before a token": lambda: with_token(lstrip=True),
    "blanks behind a token": lambda: with_token(rstrip=True),
    "composed to unknown bytes": lambda: composing(lacking("\u0104")),
}


@pytest.mark.parametrize("kind", UNBOUNDED)
def test_where_a_token_may_stand_for_any_length_there_is_no_bound(kind: str) -> None:
    backend = UNBOUNDED[kind]()
    assert bound_of(backend) is None
    # And so no text is refused for its length before it is tokenised.
    assert len(Tokenizer(backend).encode("x" * 200, max_tokens=1)) >= 1


def test_a_text_is_refused_only_when_it_cannot_come_to_so_few_tokens() -> None:
    tokenizer = tiny_real()
    longest = max((piece for piece in tokenizer.pieces.pieces if piece is not None), key=len).decode()
    for count in (1, 7):
        text = longest * count
        assert len(tokenizer.encode(text, max_tokens=count)) >= count
        with pytest.raises(KvferryError, match=f"at least {count + 1} tokens, and {count} are the most") as caught:
            tokenizer.encode(text + "x", field="text", max_tokens=count)
        assert (caught.value.code, caught.value.field) == (ErrorCode.CONTEXT_LENGTH_EXCEEDED, "text")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_what_is_far_too_long_is_refused_before_it_is_tokenised(path: str) -> None:
    door = Door(says("never"))
    text = "word " * (CONTEXT * 30)
    body = (
        completion_body(prompt=text) if "chat" not in path else chat_body(messages=[{"role": "user", "content": text}])
    )
    answer = await door.post(path, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "at least" in error["message"]
    assert error["param"] == ("messages" if "chat" in path else "prompt")
    # Its tokens can still be counted.
    counted = await door.post("/tokenize", {"prompt": text})
    assert counted.json()["count"] > CONTEXT

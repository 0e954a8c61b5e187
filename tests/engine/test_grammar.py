"""Masks are exactly what the grammar allows, however an answer came to where it stands."""

import json
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.grammar import GrammarConstraint
from engine.grammar_backend import GrammarBackend
from engine.sequence import SamplingParams, Sequence, TokenSample
from engine.vocabulary import Vocabulary, read_vocabulary
from kvferry_rpc.common_pb2 import Grammar
from tests.support.json_schemas import SCHEMAS, obj
from tests.support.tiny_tokenizers import TINY_REAL

# Tokens overlap, so that there are many ways to one text; 0 is special, 1 ends the text, 9 has no token.
TOY = Vocabulary((b"", b"", b"a", b"b", b"ab", b"ba", b"aab", b"bb", b"abab", b""), frozenset({1}))
EOS = 1
# (pattern, every text that it matches)
Language = tuple[str, frozenset[str]]


@cache
def toy() -> GrammarBackend:
    return GrammarBackend(TOY)


@cache
def real() -> GrammarBackend:
    return GrammarBackend(
        read_vocabulary(
            TINY_REAL / "tokenizer.json", TINY_REAL / "tokenizer_config.json", vocab_size=4032, eos_token_ids={2}
        )
    )


def constraint(backend: GrammarBackend, text: str, kind: "Grammar.Kind.ValueType" = Grammar.REGEX) -> GrammarConstraint:
    compiled = backend.compile(Grammar(kind=kind, text=text))
    return GrammarConstraint(backend.matcher(compiled), backend.new_mask())


def allowed(constraint: GrammarConstraint, vocab_size: int = len(TOY.tokens)) -> set[int]:
    bits = constraint.allowed()
    if bits is None:
        return set(range(vocab_size))
    return set(np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")[:vocab_size]).tolist())


def _join(left: Language, right: Language) -> Language:
    return left[0] + right[0], frozenset(a + b for a in left[1] for b in right[1])


def _either(left: Language, right: Language) -> Language:
    return f"({left[0]}|{right[0]})", left[1] | right[1]


def _repeat(inner: Language, low: int, high: int) -> Language:
    texts: frozenset[str] = frozenset()
    power = frozenset({""})
    for count in range(high + 1):
        texts |= power if count >= low else frozenset()
        power = frozenset(a + b for a in power for b in inner[1])
    return f"({inner[0]}){{{low},{high}}}", texts


LANGUAGES = st.recursive(
    st.sampled_from(["a", "b", "ab", "bba"]).map(lambda text: (text, frozenset({text}))),
    lambda inner: st.one_of(
        st.builds(_join, inner, inner),
        st.builds(_either, inner, inner),
        st.builds(_repeat, inner, st.integers(0, 1), st.integers(1, 2)),
    ),
    max_leaves=5,
).filter(lambda language: len(language[1]) < 300)


@settings(deadline=None, max_examples=60)
@given(language=LANGUAGES, data=st.data())
def test_a_mask_allows_exactly_the_tokens_that_some_text_of_the_grammar_goes_on_with(
    language: Language, data: st.DataObject
) -> None:
    pattern, texts = language
    state = constraint(toy(), pattern)
    prefix = ""
    for _ in range(12):
        expected = {
            token_id
            for token_id, token in enumerate(TOY.tokens)
            if token and any(text.startswith(prefix + token.decode()) for text in texts)
        }
        if prefix in texts:
            expected.add(EOS)
        assert allowed(state) == expected
        token_id = data.draw(st.sampled_from(sorted(expected)))
        state.advance(token_id)
        if token_id == EOS:
            break
        prefix += TOY.tokens[token_id].decode()
    if token_id == EOS:
        assert allowed(state) == set()


@settings(deadline=None, max_examples=40)
@given(language=LANGUAGES, data=st.data())
def test_going_back_is_as_if_it_had_not_gone_on_and_replaying_as_if_it_had(
    language: Language, data: st.DataObject
) -> None:
    straight = constraint(toy(), language[0])
    tokens: list[int] = []
    masks = [allowed(straight)]
    while masks[-1] and len(tokens) < 6:
        tokens.append(data.draw(st.sampled_from(sorted(masks[-1]))))
        straight.advance(tokens[-1])
        masks.append(allowed(straight))
    back = data.draw(st.integers(0, len(tokens)))
    straight.rewind(back)
    assert allowed(straight) == masks[len(tokens) - back]
    replayed = constraint(toy(), language[0])
    for token_id in tokens[: len(tokens) - back]:
        replayed.advance(token_id)
    assert allowed(replayed) == allowed(straight)
    for token_id, mask in zip(tokens[len(tokens) - back :], masks[len(tokens) - back + 1 :], strict=True):
        straight.advance(token_id)
        assert allowed(straight) == mask


def test_a_token_that_is_not_allowed_leaves_nothing_until_it_is_taken_back() -> None:
    state = constraint(toy(), "ab")
    state.advance(2)
    state.advance(2)
    state.advance(3)
    assert state.is_lost
    assert allowed(state) == set()
    state.rewind(2)
    assert not state.is_lost
    assert allowed(state) == {3}
    with pytest.raises(ValueError, match="go back"):
        state.rewind(2)


def test_tokens_behind_the_end_are_not_allowed_and_can_be_taken_back() -> None:
    state = constraint(toy(), "b")
    for token_id in (3, EOS, EOS, 2):
        state.advance(token_id)
    assert allowed(state) == set()
    state.rewind(3)
    assert allowed(state) == {EOS}


def test_where_everything_may_come_there_is_no_mask_or_one_with_every_token_that_has_text() -> None:
    state = constraint(toy(), "[ab]*")
    assert allowed(state) >= {EOS, 2, 3, 4, 5, 6, 7, 8}
    assert allowed(state).isdisjoint({0, 9})


def test_the_mask_is_kept_until_the_text_goes_on() -> None:
    state = constraint(toy(), "ab")
    first = state.allowed()
    assert state.allowed() is first


def test_a_sequence_leads_its_constraint_along() -> None:
    state = constraint(toy(), "aab")
    seq = Sequence("s", [5], SamplingParams(max_tokens=9), max_context_tokens=20, constraint=state)
    seq.append_token(TokenSample(2))
    assert allowed(state) == {2, 4}


def walk(state: GrammarConstraint, rng: np.random.Generator, tokens: tuple[bytes, ...]) -> bytes:
    """A text of the grammar, chosen at random among short ones."""
    text = b""
    for _ in range(400):
        choices = sorted(allowed(state, len(tokens)))
        assert choices, text
        if 2 in choices and (len(choices) == 1 or rng.random() < 0.5):
            return text
        closing = [token_id for token_id in choices if tokens[token_id][:1] in (b'"', b"}", b"]")]
        usable = closing if closing and rng.random() < 0.5 else [token_id for token_id in choices if token_id != 2]
        token_id = int(rng.choice(usable))
        state.advance(token_id)
        text += tokens[token_id]
    raise AssertionError(f"no end: {text!r}")


@pytest.mark.parametrize("index", range(len(SCHEMAS)))
def test_whatever_the_model_chooses_the_text_is_json_under_the_schema(index: int) -> None:
    schema: dict[str, Any] = SCHEMAS[index]
    compiled = real().compile(Grammar(kind=Grammar.JSON_SCHEMA, text=json.dumps(schema)))
    validator = jsonschema.Draft202012Validator(schema)
    rng = np.random.default_rng(index)
    for _ in range(6):
        state = GrammarConstraint(real().matcher(compiled), real().new_mask())
        text = walk(state, rng, real().tokens)
        # As the router reads bytes: what is no UTF-8 becomes replacement marks.
        validator.validate(json.loads(text.decode(errors="replace")))


def test_no_special_token_is_allowed_inside_a_string() -> None:
    state = constraint(real(), json.dumps(obj({"a": {"type": "string"}})), Grammar.JSON_SCHEMA)
    for char in b'{"a":"':
        state.advance(real().tokens.index(bytes([char])))
    assert allowed(state, 4032).isdisjoint(range(6))
    assert len(allowed(state, 4032)) > 1000


def test_control_characters_are_not_allowed_in_bounded_strings_either() -> None:
    state = constraint(real(), '{"type":"string","minLength":1,"maxLength":3}', Grammar.JSON_SCHEMA)
    state.advance(real().tokens.index(b'"'))
    chosen = [real().tokens[token_id] for token_id in allowed(state, 4032)]
    assert chosen
    assert not [token for token in chosen if min(token) < 0x20]


def test_a_grammar_that_is_too_slow_for_the_others_ends_its_own_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    state = constraint(toy(), "ab")
    monkeypatch.setattr("engine.grammar._MAX_STEP_S", -1.0)
    assert allowed(state) == set()
    monkeypatch.undo()
    state.advance(2)
    assert allowed(state) == set()

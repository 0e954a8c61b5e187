"""Streamed text equals buffered text, whatever the chunking; stop strings cut exactly and hold little back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry_rpc.common_pb2 import ErrorCode
from router.text.detokenizer import StopMatcher, TextStream, cut_at_stop
from router.text.tokenizer import Tokenizer
from runtime.errors import KvferryError
from tests.support.tiny_tokenizers import sentencepiece, short_prompts, tiny_real

MARK = "\ufffd"


def stream(tokenizer: Tokenizer, pushes: list[list[int]], stop: tuple[str, ...] = (), skip: bool = True) -> list[str]:
    """The deltas of a stream, the last of them from `finish`."""
    text = TextStream(tokenizer, stop, skip_special_tokens=skip)
    return [text.push(ids)[0] for ids in pushes] + [text.finish()]


def one_by_one(ids: list[int]) -> list[list[int]]:
    return [[token_id] for token_id in ids]


def cut(ids: list[int], sizes: list[int]) -> list[list[int]]:
    """`ids` in chunks of the given sizes, used in turn."""
    chunks, start, turn = [], 0, 0
    while start < len(ids):
        size = sizes[turn % len(sizes)]
        chunks.append(ids[start : start + size])
        start, turn = start + size, turn + 1
    return chunks


# --- characters -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokenizer", [tiny_real(), sentencepiece()], ids=["byte-level", "sentencepiece"])
def test_every_prompt_streams_to_its_text_without_replacement_marks(tokenizer: Tokenizer) -> None:
    for prompt in short_prompts():
        ids = tokenizer.encode(prompt)
        deltas = stream(tokenizer, one_by_one(ids))
        assert "".join(deltas) == tokenizer.decode(ids) == prompt
        assert not any(MARK in delta for delta in deltas)


@given(st.lists(st.integers(0, 4100), max_size=40), st.lists(st.integers(1, 5), min_size=1), st.booleans())
@settings(deadline=None, max_examples=150)
def test_random_byte_level_ids_stream_to_their_decoding(ids: list[int], sizes: list[int], skip: bool) -> None:
    deltas = stream(tiny_real(), cut(ids, sizes), skip=skip)
    assert "".join(deltas) == tiny_real().decode(ids, skip_special_tokens=skip)


# Words, single bytes, and the bytes of whole characters or all but the last of them.
sentencepiece_ids = st.lists(
    st.one_of(
        st.integers(0, 2).map(lambda token_id: [token_id]),
        st.integers(3, 258).map(lambda token_id: [token_id]),
        st.integers(259, 280).map(lambda token_id: [token_id]),
        st.sampled_from("\n é日🚢").map(lambda char: [3 + byte for byte in char.encode()]),
        st.sampled_from("é日🚢").map(lambda char: [3 + byte for byte in char.encode()[:-1]]),
    ),
    max_size=12,
).map(lambda groups: [token_id for group in groups for token_id in group])


@given(sentencepiece_ids, st.lists(st.integers(1, 5), min_size=1), st.booleans(), st.booleans())
@settings(deadline=None, max_examples=200)
def test_random_sentencepiece_ids_stream_to_their_decoding(
    ids: list[int], sizes: list[int], skip: bool, strip: bool
) -> None:
    tokenizer = sentencepiece(strip)
    deltas = stream(tokenizer, cut(ids, sizes), skip=skip)
    assert "".join(deltas) == tokenizer.decode(ids, skip_special_tokens=skip)


@given(st.binary(max_size=24), st.lists(st.integers(1, 4), min_size=1))
@settings(deadline=None, max_examples=150)
def test_any_bytes_stream_to_their_decoding(data: bytes, sizes: list[int]) -> None:
    byte_ids = byte_level_ids()
    ids = [byte_ids[byte] for byte in data]
    assert "".join(stream(tiny_real(), cut(ids, sizes))) == tiny_real().decode(ids) == data.decode(errors="replace")


def byte_level_ids() -> dict[int, int]:
    """The token of each single byte."""
    pieces = tiny_real().pieces.pieces
    return {piece[0]: token_id for token_id, piece in enumerate(pieces) if piece is not None and len(piece) == 1}


def test_a_split_character_is_held_back_until_it_is_whole() -> None:
    byte_ids = byte_level_ids()
    ids = [byte_ids[byte] for byte in "a🚢é".encode()]
    assert stream(tiny_real(), one_by_one(ids)) == ["a", "", "", "", "🚢", "", "é", ""]


def test_an_unfinished_character_is_flushed_at_the_end() -> None:
    byte_ids = byte_level_ids()
    ids = [byte_ids[byte] for byte in b"a\xf0\x9f"]
    assert stream(tiny_real(), one_by_one(ids)) == ["a", "", "", MARK]


def test_malformed_bytes_are_not_held_back_beyond_the_next_character() -> None:
    byte_ids = byte_level_ids()
    ids = [byte_ids[byte] for byte in b"\xf0\x9fa\x80b"]
    assert stream(tiny_real(), one_by_one(ids)) == ["", "", MARK + "a", MARK, "b", ""]


def test_special_tokens_are_left_out_or_shown() -> None:
    ids = tiny_real().encode("a<|end|>b")
    assert "".join(stream(tiny_real(), one_by_one(ids))) == "ab"
    assert "".join(stream(tiny_real(), one_by_one(ids), skip=False)) == "a<|end|>b"


def test_only_the_first_space_of_a_sentencepiece_text_is_removed() -> None:
    word = sentencepiece().encode("the")[1:]
    assert "".join(stream(sentencepiece(), one_by_one([1, *word, *word]))) == "the the"


def test_tokens_are_worked_off_in_constant_time_each() -> None:
    """Endless malformed bytes must not pile up: what is held back never exceeds one character."""
    text = TextStream(tiny_real())
    byte_ids = byte_level_ids()
    given_out = 0
    for count in range(1, 3000):
        given_out += len(text.push([byte_ids[0x80]])[0])
        assert count - given_out <= 3


# --- stop strings ---------------------------------------------------------------------------------------------------


def naive_cut(text: str, stop: tuple[str, ...]) -> tuple[str, bool]:
    """Stopping after every character: the first end at which any stop string ends, the longest of those there."""
    for end in range(1, len(text) + 1):
        lengths = [len(s) for s in stop if text[:end].endswith(s)]
        if lengths:
            return text[: end - max(lengths)], True
    return text, False


def naive_held(text: str, stop: tuple[str, ...]) -> int:
    """Length of the longest end of `text` that is a proper beginning of a stop string."""
    return max((n for s in stop for n in range(1, len(s)) if text.endswith(s[:n])), default=0)


stop_lists = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4).map(tuple)


@given(st.text("abc", max_size=30), stop_lists)
@settings(deadline=None, max_examples=300)
def test_a_buffered_text_is_cut_by_the_plain_definition(text: str, stop: tuple[str, ...]) -> None:
    assert cut_at_stop(text, stop) == naive_cut(text, stop)


@given(st.text("abc", max_size=30), stop_lists, st.lists(st.integers(1, 4), min_size=1))
@settings(deadline=None, max_examples=300)
def test_a_streamed_text_equals_the_buffered_one_and_holds_back_no_more_than_due(
    text: str, stop: tuple[str, ...], sizes: list[int]
) -> None:
    matcher = StopMatcher(stop)
    expected, stopped = naive_cut(text, stop)
    sent, read = "", 0
    for size in sizes * len(text):
        chunk = text[read : read + size]
        read += len(chunk)
        sent += matcher.push(chunk)
        seen, now_stopped = naive_cut(text[:read], stop)
        assert matcher.matched == now_stopped
        assert sent == (seen if now_stopped else seen[: len(seen) - naive_held(seen, stop)])
    sent += matcher.push(text[read:]) + matcher.finish()
    assert (sent, matcher.matched) == (expected, stopped)


@given(
    st.sampled_from(short_prompts()),
    st.data(),
    st.lists(st.integers(1, 5), min_size=1),
    st.booleans(),
)
@settings(deadline=None, max_examples=100)
def test_stop_strings_taken_from_a_real_text_cut_it_the_same_streamed_and_buffered(
    prompt: str, data: st.DataObject, sizes: list[int], whole: bool
) -> None:
    start = data.draw(st.integers(0, len(prompt) - 1))
    length = data.draw(st.integers(1, 12))
    stop = (prompt[start : start + length], prompt[-3:] + "…")
    ids = tiny_real().encode(prompt)
    deltas = stream(tiny_real(), [ids] if whole else cut(ids, sizes), stop)
    assert "".join(deltas) == naive_cut(prompt, stop)[0]


def test_a_stop_string_over_many_tokens_leaks_nothing_and_ends_the_stream() -> None:
    text = TextStream(tiny_real(), ("beta gamma",))
    ids = tiny_real().encode("alpha beta gamma delta")
    sent, stopped_at = "", None
    for count, token_id in enumerate(ids):
        delta, stopped = text.push([token_id])
        sent += delta
        assert "alpha ".startswith(sent)
        if stopped and stopped_at is None:
            stopped_at = count
    assert sent == "alpha "
    assert stopped_at is not None
    assert stopped_at < len(ids) - 1
    assert text.push(ids) == ("", True)
    assert text.finish() == ""
    assert text.stopped


def test_the_start_of_a_stop_string_that_is_not_completed_comes_out_at_the_end() -> None:
    matcher = StopMatcher(("beta gamma",))
    assert matcher.push("alpha beta ga") == "alpha "
    assert matcher.finish() == "beta ga"
    assert not matcher.matched


def test_a_stream_gives_out_the_start_of_a_stop_string_at_the_end() -> None:
    for prompt in short_prompts():
        text = TextStream(tiny_real(), (prompt[-5:] + "…", "never in any prompt"))
        sent = [text.push([token_id])[0] for token_id in tiny_real().encode(prompt)]
        assert "".join(sent) == prompt[:-5]
        assert (text.finish(), text.stopped) == (prompt[-5:], False)


def test_a_marker_is_not_split_by_a_stop_string_it_does_not_begin() -> None:
    matcher = StopMatcher(("zzzzzz",))
    assert matcher.push("thinking") == "thinking"
    assert matcher.push("</think>") == "</think>"
    assert matcher.push("done z") == "done "
    assert matcher.push("oo") == "zoo"


def test_the_stop_string_that_is_complete_first_wins_and_then_the_longest() -> None:
    assert cut_at_stop("xabcd", ("abcd", "c")) == ("xab", True)
    assert cut_at_stop("xabcd", ("cd", "abcd", "d")) == ("x", True)
    for stop, found in ((("abcd", "c"), "c"), (("cd", "abcd", "d"), "abcd"), (("y",), None)):
        matcher = StopMatcher(stop)
        for char in "xabcd":
            matcher.push(char)
        assert matcher.found == found


def test_a_stop_string_can_be_completed_by_what_is_flushed_at_the_end() -> None:
    text = TextStream(tiny_real(), ("b" + MARK,))
    byte_ids = byte_level_ids()
    assert text.push([byte_ids[byte] for byte in b"ab\xf0"]) == ("a", False)
    assert text.finish() == ""
    assert text.stopped


def test_an_empty_stop_string_is_refused() -> None:
    for make in (lambda: StopMatcher(("a", "")), lambda: TextStream(tiny_real(), ("",))):
        with pytest.raises(KvferryError) as caught:
            make()
        assert (caught.value.code, caught.value.field) == (ErrorCode.INVALID_REQUEST, "stop")


@given(st.sampled_from(short_prompts()), st.lists(st.integers(1, 5), min_size=1))
@settings(deadline=None, max_examples=40)
def test_the_text_never_runs_ahead_of_the_tokens_shown_beside_it(prompt: str, sizes: list[int]) -> None:
    ids = tiny_real().encode(prompt)
    text = TextStream(tiny_real(), (prompt[len(prompt) // 2 :] + "!",))
    shown, tokens = "", b""
    for chunk in cut(ids, sizes):
        shown += text.push(chunk)[0]
        tokens += b"".join(tiny_real().token_bytes(token_id) for token_id in chunk)
        assert tokens.startswith(shown.encode())

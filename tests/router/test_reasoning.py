"""Thoughts apart from the answer: markers whole however they arrive, nothing else held back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.text.reasoning import ReasoningSplitter, opens_in_prompt
from tests.support.cuts import pieces_of

PARTS = ["<think>", "</think>", "<", "</", "think>", "</thin", " ", "\n\n", "Hm.", "42", "<tool_call>"]
TEXTS = st.lists(st.sampled_from(PARTS), max_size=10).map("".join)
SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=3)


def split(text: str, sizes: list[int], *, is_open: bool = False) -> tuple[str, str]:
    splitter = ReasoningSplitter(is_open=is_open)
    pairs = [splitter.push(piece) for piece in pieces_of(text, sizes)] + [splitter.finish()]
    return "".join(reasoning for reasoning, _ in pairs), "".join(answer for _, answer in pairs)


@pytest.mark.parametrize(
    ("text", "is_open", "expected"),
    [
        ("<think>\nHm. \n</think>\n\nForty-two.\n", False, ("Hm.", "Forty-two.\n")),
        (" \n<think>Hm.</think>42", False, ("Hm.", "42")),
        ("\nHm.\n</think>\n42", True, ("Hm.", "42")),
        ("<think></think>42", False, ("", "42")),
        ("<think>Hm. And so", False, ("Hm. And so", "")),
        ("<think>Hm.</thin", False, ("Hm.</thin", "")),
        ("<think>a < b </ think></think>42", False, ("a < b </ think>", "42")),
        ("<think>Hm.</think><think>Again</think>", False, ("Hm.", "<think>Again</think>")),
        ("42 <think>Hm.</think>", False, ("", "42 <think>Hm.</think>")),
        ("Hm.</think>42", False, ("", "Hm.</think>42")),
        (" \n42 ", False, ("", " \n42 ")),
        ("<thi", False, ("", "<thi")),
        (" \n", False, ("", " \n")),
        ("", False, ("", "")),
        ("", True, ("", "")),
        ("\n", True, ("", "")),
    ],
)
def test_the_block_is_told_apart(text: str, is_open: bool, expected: tuple[str, str]) -> None:
    for sizes in ([1], [2], [5], [100]):
        assert split(text, sizes, is_open=is_open) == expected


@settings(deadline=None, max_examples=150)
@given(text=TEXTS, sizes=SIZES, is_open=st.booleans())
def test_no_cut_changes_the_parts_and_no_text_is_lost(text: str, sizes: list[int], is_open: bool) -> None:
    reasoning, answer = split(text, sizes, is_open=is_open)
    assert (reasoning, answer) == split(text, [1000], is_open=is_open)
    whole = "".join((reasoning + answer).split())
    missing = len("".join(text.split())) - len(whole)
    assert missing in (0, len("<think>"), len("</think>"), len("<think></think>"))


def test_a_piece_that_cannot_begin_a_marker_is_passed_on_at_once() -> None:
    splitter = ReasoningSplitter(is_open=True)
    assert splitter.push("So a <b") == ("So a <b", "")
    assert splitter.push(" then <") == (" then", "")
    assert splitter.push("/") == ("", "")
    assert splitter.push("x") == (" </x", "")
    # A marker that came as one piece is never given out in two.
    assert splitter.push("</think>") == ("", "")
    assert splitter.push("</think>") == ("", "</think>")


@pytest.mark.parametrize(
    ("prompt", "is_open"), [("...<think>\n", True), ("<think>\n\n</think>\n\n", False), ("", False)]
)
def test_a_prompt_may_open_the_block(prompt: str, is_open: bool) -> None:
    assert opens_in_prompt(prompt) is is_open

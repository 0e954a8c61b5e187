"""The scanner takes what Python's JSON parser takes and ends where it ends, the same in every cut."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.text.json_scan import JsonScanner
from tests.support.cuts import pieces_of

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=12
)  # fmt: skip
SIZES = st.lists(st.integers(1, 7), min_size=1, max_size=4)


def scan(text: str, sizes: list[int]) -> tuple[int, bool, bool]:
    """(characters read, done, failed)."""
    scanner, read = JsonScanner(), 0
    for piece in pieces_of(text, sizes):
        end = scanner.feed(piece, 0, len(piece))
        read += end
        if end < len(piece):
            break
    return read, scanner.done, scanner.failed


@settings(deadline=None, max_examples=40)
@given(value=VALUES, ascii_only=st.booleans(), indent=st.sampled_from([None, 1]), sizes=SIZES)
def test_what_python_writes_is_read_to_its_end_and_no_further(
    value: Any, ascii_only: bool, indent: int | None, sizes: list[int]
) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    assert scan(text + " x", sizes) == (len(text), True, False)


@settings(deadline=None, max_examples=100)
@given(text=st.text('{}[]":,\\ \nabtrufalsen0123456789.eE+-/', max_size=14), sizes=SIZES)
def test_it_takes_what_python_takes_and_fails_alike_in_all_cuts(text: str, sizes: list[int]) -> None:
    text = f"[{text}]"
    read, done, failed = scan(text, sizes)
    assert (read, done, failed) == scan(text, [100])
    try:
        json.loads(text)
    except ValueError:
        assert not done or read < len(text)
    else:
        assert (read, done) == (len(text), True)


@pytest.mark.parametrize(
    "text",
    ["[01]", "-", "1.", ".5", "+1", "1e", '"\t"', '"\\x"', '"\\u12g', "[1,]", '{"a":1,}', "{a", "nul!", "[1}", "{]"],
)
def test_what_is_nearly_json_fails(text: str) -> None:
    assert scan(text + ";", [1])[1:] == (False, True)


def test_the_nesting_is_bounded() -> None:
    assert scan("[" * 64 + "]" * 64, [9])[1:] == (True, False)
    assert scan("[" * 65, [9]) == (64, False, True)

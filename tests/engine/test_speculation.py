from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.speculation import Drafter, NgramIndex, draft_length, propose


def by_looking_everywhere(text: list[int], count: int) -> list[int]:
    """The definition, without an index."""
    for size in (4, 3, 2):
        for end in range(len(text) - 1, size - 1, -1):
            if text[end - size : end] == text[-size:]:
                copied = list(text)
                for _ in range(count):
                    copied.append(copied[end + len(copied) - len(text)])
                return copied[len(text) :]
    return []


texts = st.lists(st.integers(0, 3), min_size=1, max_size=40)


@settings(deadline=None, max_examples=60)
@given(texts, st.lists(st.integers(1, 7), max_size=8), st.integers(1, 9))
def test_an_index_that_grows_finds_what_looking_everywhere_finds(text: list[int], steps: list[int], count: int) -> None:
    index, seen = NgramIndex(), 0
    for step in [*steps, len(text)]:
        seen = min(len(text), seen + step)
        index.extend(text[:seen])
        assert propose(text[:seen], count, index) == by_looking_everywhere(text[:seen], count)


def test_a_copy_may_run_into_its_own_beginning() -> None:
    index = NgramIndex()
    text = [9, 1, 2, 3, 1, 2, 3, 1, 2]
    index.extend(text)
    assert propose(text, 8, index) == [3, 1, 2, 3, 1, 2, 3, 1]


def test_the_longest_suffix_wins_and_among_equals_the_latest() -> None:
    before = [5, 1, 2, 3, 40, 7, 2, 3, 50, 8, 2, 3, 60]
    for suffix, follows in (([5, 1, 2, 3], 40), ([1, 2, 3], 40), ([9, 2, 3], 60), ([8, 2, 3], 60), ([7, 2, 3], 50)):
        index, text = NgramIndex(), [*before, *suffix]
        index.extend(text)
        assert propose(text, 1, index) == [follows]


def test_a_text_without_repetition_gets_no_guess() -> None:
    index = NgramIndex()
    text = list(range(50))
    index.extend(text)
    assert propose(text, 4, index) == []


def test_an_index_stays_small_and_remembers_what_is_near() -> None:
    index = NgramIndex(generation_entries=60)
    text = list(range(1000))
    for end in range(1, len(text), 7):
        index.extend(text[:end])
        assert len(index) <= 2 * 62
    near, far = [*text, 985, 986, 987], [*text, 10, 11, 12]
    index.extend(near)
    assert propose(near, 2, index) == [988, 989]
    index.extend(far)
    assert propose(far, 2, index) == []


@pytest.mark.parametrize("num_decoding", [1, 8, 64])
def test_more_likely_guesses_make_longer_drafts(num_decoding: int) -> None:
    lengths = [draft_length(rate / 100, 12, num_decoding) for rate in range(101)]
    assert lengths == sorted(lengths)
    assert (lengths[0], lengths[-1]) == (0, 12)


@pytest.mark.parametrize("rate", [0.3, 0.6, 0.9, 0.99])
def test_more_sequences_in_a_step_make_shorter_drafts(rate: float) -> None:
    lengths = [draft_length(rate, 12, count) for count in (1, 2, 4, 8, 16, 32, 64, 256)]
    assert lengths == sorted(lengths, reverse=True)
    for count in (1, 8, 64):
        assert all(rate**k >= count / (16 + count) for k in range(1, draft_length(rate, 12, count) + 1))


def test_wrong_guesses_end_the_guessing_until_after_a_pause() -> None:
    drafter, text = Drafter(), [1, 2] * 20
    drafted = []
    for _ in range(200):
        draft = drafter.propose(text, 8, 8)
        drafted.append(len(draft))
        if draft:
            drafter.learn(len(draft), 0)
    assert drafted[0] > 1
    assert all(count <= 1 for count in drafted[4:])
    assert 2 <= sum(drafted[50:]) <= 20, "tried again now and then, and no more than that"


def test_right_guesses_make_the_drafts_as_long_as_allowed() -> None:
    drafter, text = Drafter(), [1, 2] * 20
    lengths = []
    for _ in range(12):
        draft = drafter.propose(text, 8, 4)
        drafter.learn(len(draft), len(draft))
        lengths.append(len(draft))
    assert all(earlier <= later for earlier, later in pairwise(lengths))
    assert lengths[-1] == 8


def test_guesses_behind_the_first_wrong_one_say_nothing() -> None:
    one, many = Drafter(), Drafter()
    one.learn(3, 2)
    many.learn(9, 2)
    assert one.rate == many.rate

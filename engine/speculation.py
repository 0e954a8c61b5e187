"""Guessing the next tokens of a text from the text itself (prompt lookup), and how many guesses pay. Pure.

A text that repeats itself, or its prompt, goes on now as it went on then. So the last few tokens are looked up among
the tokens before them, and what followed there is a *draft*: guesses that one step computes beside the token they
follow. A token is a function of (logits, seed, position) alone, so a guess is right exactly when it is the token that
is sampled at its place anyway; the first one that is not ends the draft. The text is the same with and without.

One `Drafter` a sequence; the thread that owns the sequence.
"""

import math
from collections.abc import Sequence
from typing import Final

# The longest suffix that is found counts; one token alone says too little.
_GRAM_SIZES: Final = (4, 3, 2)
# Entries of one generation of an index: as many n-grams as about 5,000 tokens have.
_GENERATION_ENTRIES: Final = 1 << 14
# What is known of earlier drafts fades: by this factor with each draft, and with each step that went without one.
_FADE_A_DRAFT: Final = 0.9
_FADE_A_PAUSE: Final = 0.98
# Before anything is known, drafts count as this often right, with the weight of so many guesses.
_FIRST_RATE: Final = 0.8
_FIRST_WEIGHT: Final = 2.0
# Computing this many tokens takes about as long as what a step costs whatever it computes (reading the weights).
_FREE_TOKENS: Final = 16
_LEAST_CHANCE: Final = 0.2


class NgramIndex:
    """Where each n-gram of a growing text last ended: updated a token at a time, asked in constant time.

    Bounded: entries live in two generations. When the younger is full it becomes the older, and the older is
    forgotten: what was seen in the last 5,000 tokens or so is always found.
    """

    def __init__(self, generation_entries: int = _GENERATION_ENTRIES) -> None:
        self._limit = generation_entries
        self._young: dict[tuple[int, ...], int] = {}
        self._old: dict[tuple[int, ...], int] = {}
        self._num_tokens = 0  # indexed: n-grams that end before this position

    def __len__(self) -> int:
        """Entries held."""
        return len(self._young) + len(self._old)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take in the tokens that `token_ids` has grown by. An n-gram enters once a token follows it."""
        for end in range(max(self._num_tokens, _GRAM_SIZES[-1]), len(token_ids)):
            for size in _GRAM_SIZES:
                if size <= end:
                    self._young[tuple(token_ids[end - size : end])] = end
            if len(self._young) >= self._limit:
                self._young, self._old = {}, self._young
        self._num_tokens = max(self._num_tokens, len(token_ids))

    def find(self, token_ids: Sequence[int]) -> int | None:
        """Where the text went on after the latest earlier place that ended as it ends now; None = nowhere.

        The longest suffix wins; among its places the latest, for a text is most like itself nearby.
        """
        for size in _GRAM_SIZES:
            suffix = tuple(token_ids[-size:])
            end = self._young.get(suffix)
            if end is None:
                end = self._old.get(suffix)
            if end is not None:
                return end
        return None


def propose(token_ids: Sequence[int], num_tokens: int, index: NgramIndex) -> list[int]:
    """`num_tokens` guesses of what follows `token_ids`, all of which `index` has taken in; [] when nothing is found.

    A copy may run into its own beginning: a text of one period goes on with that period.
    """
    found = index.find(token_ids)
    if found is None:
        return []
    draft = list(token_ids[found : found + num_tokens])
    period = len(token_ids) - found
    while len(draft) < num_tokens:
        draft.append(draft[len(draft) - period])
    return draft


def draft_length(rate: float, most: int, num_decoding: int) -> int:
    """How many guesses pay, up to `most`, when each is right with probability `rate`: the k-th is with rate**k.

    A step costs F + n for n tokens, with F for reading the weights. With B = `num_decoding` tokens in it, one guess
    more makes it longer by 1 / (F + B) of itself; it makes B tokens become B + rate**k. So it pays while rate**k is at
    least B / (F + B): nearly always for a few sequences, hardly ever for many.
    """
    chance = max(_LEAST_CHANCE, num_decoding / (_FREE_TOKENS + num_decoding))
    if rate < chance:
        return 0
    if rate >= 1.0:
        return most
    return min(most, int(math.log(chance) / math.log(rate)))


class Drafter:
    """The drafts of one sequence, as long as its earlier ones say that it pays."""

    def __init__(self) -> None:
        self._index = NgramIndex()
        self._right = 0.0
        self._tried = 0.0

    @property
    def rate(self) -> float:
        """How likely the next guess is right, by the recent ones."""
        return (self._right + _FIRST_RATE * _FIRST_WEIGHT) / (self._tried + _FIRST_WEIGHT)

    def propose(self, token_ids: Sequence[int], most: int, num_decoding: int) -> list[int]:
        """Up to `most` guesses for a sequence that is one of `num_decoding` in a step. [] = rather none now.

        `token_ids` is the sequence's whole text, which only grows from call to call.
        """
        self._index.extend(token_ids)
        length = draft_length(self.rate, most, num_decoding)
        if length == 0:
            # What did not pay is tried again after a while.
            self._right *= _FADE_A_PAUSE
            self._tried *= _FADE_A_PAUSE
            return []
        return propose(token_ids, length, self._index)

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        """The first `num_accepted` of `num_drafted` guesses were right. Behind the first wrong one they say nothing."""
        self._right = _FADE_A_DRAFT * self._right + num_accepted
        self._tried = _FADE_A_DRAFT * self._tried + min(num_accepted + 1, num_drafted)

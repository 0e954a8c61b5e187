"""Prompts made of words, no two alike."""

import random

_WORDS = (
    "the",
    "old",
    "grey",
    "quick",
    "fox",
    "crow",
    "river",
    "mill",
    "bread",
    "winter",
    "door",
    "road",
    "sees",
    "and",
)


def some_words(rng: random.Random, num_words: int) -> str:
    """So many words, drawn with `rng`."""
    return " ".join(rng.choice(_WORDS) for _ in range(num_words))

"""Markers in text that arrives in pieces, and the blanks around them."""


def held_chars(text: str, marker: str, start: int = 0) -> int:
    """How many characters at the end of text[start:] may be the beginning of `marker`: as few as possible, so that a
    marker is never cut in two and nothing else is held back. At most len(marker) - 1."""
    longest = min(len(marker) - 1, len(text) - start)
    for num_chars in range(longest, 0, -1):
        if text.endswith(marker[:num_chars]):
            return num_chars
    return 0


class Trimmed:
    """Text without the blanks at its start, and without those at its end if it is `cut` there. One thread at a time."""

    def __init__(self, *, at_start: bool) -> None:
        """`at_start`: whether to drop blanks before the first text too."""
        self._skips = at_start
        self._held: list[str] = []

    def push(self, text: str) -> str:
        """The text that is now known not to stand at the end."""
        if self._skips:
            text = text.lstrip()
            if not text:
                return ""
            self._skips = False
        kept = text.rstrip()
        if not kept:
            self._held.append(text)
            return ""
        blanks = "".join(self._held)
        self._held = [text[len(kept) :]]
        return blanks + kept

    def cut(self) -> None:
        """The text is over at a marker: drop the blanks before it, and those that follow it."""
        self._held.clear()
        self._skips = True

    def finish(self) -> str:
        """The blanks at the end of an answer that ends without a marker."""
        blanks, self._held = "".join(self._held), []
        return blanks

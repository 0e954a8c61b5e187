"""What a model thinks before it answers, told apart from the answer: `<think> ... </think>` at the start.

Only blanks may come before `<think>`, and the prompt may have opened the block already. Blanks next to the markers
belong to neither part. A block that is never closed makes all of the answer reasoning.
"""

from typing import Final

from router.text.markers import Trimmed, held_chars

OPEN: Final = "<think>"
CLOSE: Final = "</think>"


def opens_in_prompt(end_of_prompt: str) -> bool:
    """Whether the prompt leaves the model inside a block: its last characters but blanks are the opening marker."""
    return end_of_prompt.rstrip().endswith(OPEN)


class ReasoningSplitter:
    """One answer's text in two parts. One thread at a time; linear in the text."""

    def __init__(self, *, is_open: bool) -> None:
        """`is_open`: the prompt ended inside a block."""
        self._state = self._thinking if is_open else self._starting
        self._held = ""
        self._lead: list[str] = []  # blanks before the block, or before an answer without one
        self._reasoning = Trimmed(at_start=True)
        self._skips_blanks = False

    def push(self, text: str) -> tuple[str, str]:
        """(reasoning, text of the answer) that this piece makes final. Held back is only what may begin a marker, and
        blanks that one may follow."""
        text, self._held = self._held + text, ""
        return self._state(text)

    def finish(self) -> tuple[str, str]:
        """What was held back, once no text follows."""
        held, self._held = self._held, ""
        if self._state == self._thinking:
            return self._reasoning.push(held) + self._reasoning.finish(), ""
        return "", "".join(self._lead) + held if self._state == self._starting else held

    def _starting(self, text: str) -> tuple[str, str]:
        behind = text.lstrip()
        self._lead.append(text[: len(text) - len(behind)])
        if behind.startswith(OPEN):
            self._state = self._thinking
            return self._thinking(behind[len(OPEN) :])
        if OPEN.startswith(behind):  # also where there are only blanks yet
            self._held = behind
            return "", ""
        self._state = self._answering
        return "", "".join(self._lead) + behind

    def _thinking(self, text: str) -> tuple[str, str]:
        end = text.find(CLOSE)
        if end < 0:
            final = len(text) - held_chars(text, CLOSE)
            self._held = text[final:]
            return self._reasoning.push(text[:final]), ""
        self._state = self._answering
        self._skips_blanks = True
        return self._reasoning.push(text[:end]), self._answering(text[end + len(CLOSE) :])[1]

    def _answering(self, text: str) -> tuple[str, str]:
        if self._skips_blanks:
            text = text.lstrip()
            self._skips_blanks = not text
        return "", text

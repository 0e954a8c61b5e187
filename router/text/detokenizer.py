"""Streaming text: from token ids to text that is final, cut at stop strings.

Text leaves here only once no later token can change it. Held back are: bytes of an unfinished character (see
token_pieces), and the longest end of the text that is the beginning of a stop string, never a fixed number of
characters. So every way of cutting the tokens into pushes gives the same text, and a buffered answer is the same as a
streamed one.
"""

from collections.abc import Iterable, Sequence

from router.text.tokenizer import Tokenizer
from runtime.errors import invalid
from runtime.token_pieces import PieceDecoder


class TextStream:
    """The text of one answer. One thread at a time; microseconds a token, so it may run on the event loop."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        skip_special_tokens: bool = True,
        shown_tokens: frozenset[str] = frozenset(),
    ) -> None:
        """`shown_tokens` are special tokens that become text though others are skipped.

        Raises KvferryError (INVALID_REQUEST) for an empty stop string.
        """
        pieces = tokenizer.pieces_showing(shown_tokens)
        self._decoder = PieceDecoder(pieces, skip_special_tokens=skip_special_tokens)
        self._stop = StopMatcher(stop) if stop else None

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the text. It stays ended: later tokens add nothing."""
        return self._stop is not None and self._stop.matched

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text; None while none has."""
        return None if self._stop is None else self._stop.found

    def push(self, token_ids: Iterable[int]) -> tuple[str, bool]:
        """(text that these tokens make final, whether a stop string has now ended the text)."""
        if self._stop is None:
            return self._decoder.push(token_ids), False
        if self.stopped:
            return "", True
        return self._stop.push(self._decoder.push(token_ids)), self.stopped

    def finish(self) -> str:
        """What was held back, once no token follows. Unfinished characters become U+FFFD; `stopped` may turn true.

        The caller pushes nothing afterwards.
        """
        if self._stop is None:
            return self._decoder.finish()
        if self.stopped:
            return ""
        return self._stop.push(self._decoder.finish()) + self._stop.finish()


class StopMatcher:
    """Finds the first stop string in a text that arrives in pieces (Aho-Corasick: constant time a character).

    First is the one that is complete first; of those complete at the same character, the longest. So the cut does not
    depend on how the text was cut into pieces, and equals what stopping after every character would give.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        """Raises KvferryError (INVALID_REQUEST) for an empty stop string."""
        if "" in stop:
            raise invalid("stop", "must not hold an empty string")
        # A node is a beginning of a stop string; node 0 is the empty one.
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._match_chars = [0]  # length of the longest stop string that ends at this node; 0 for none
        for text in stop:
            self._add(text)
        self._fallback = self._link()
        self._first_chars = frozenset(text[0] for text in stop)
        self._node = 0
        self._held = ""  # always the text of the current node
        self.found: str | None = None

    @property
    def matched(self) -> bool:
        """Whether a stop string, `found`, has ended the text."""
        return self.found is not None

    def push(self, text: str) -> str:
        """The part of the text so far that is final and was not returned before. Nothing after a match."""
        if self.matched:
            return ""
        if self._node == 0 and self._first_chars.isdisjoint(text):
            return text
        start = len(self._held)
        text = self._held + text
        for index in range(start, len(text)):
            self._node = self._step(self._node, text[index])
            if self._match_chars[self._node]:
                begin = index + 1 - self._match_chars[self._node]
                self.found = text[begin : index + 1]
                self._held = ""
                return text[:begin]
        final = len(text) - self._depth[self._node]
        self._held = text[final:]
        return text[:final]

    def finish(self) -> str:
        """What was held back and turned out not to be a stop string."""
        held, self._held, self._node = self._held, "", 0
        return held

    def _add(self, text: str) -> None:
        node = 0
        for char in text:
            child = self._next[node].get(char)
            if child is None:
                child = len(self._next)
                self._next[node][char] = child
                self._next.append({})
                self._depth.append(self._depth[node] + 1)
                self._match_chars.append(0)
            node = child
        self._match_chars[node] = len(text)

    def _link(self) -> list[int]:
        """For each node the longest proper suffix of its text that is a node too. Breadth first, so that shorter
        nodes are done before those that build on them."""
        fallback = [0] * len(self._next)
        self._fallback = fallback
        order = list(self._next[0].values())
        for node in order:
            for char, child in self._next[node].items():
                fallback[child] = self._step(fallback[node], char)
                order.append(child)
            self._match_chars[node] = max(self._match_chars[node], self._match_chars[fallback[node]])
        return fallback

    def _step(self, node: int, char: str) -> int:
        while node and char not in self._next[node]:
            node = self._fallback[node]
        return self._next[node].get(char, 0)


def cut_at_stop(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """(text up to the first stop string, whether there is one), by the rule of StopMatcher."""
    matcher = StopMatcher(stop)
    return matcher.push(text) + matcher.finish(), matcher.matched

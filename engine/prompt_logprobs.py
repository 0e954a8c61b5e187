"""How likely the tokens of a prompt were: what one sequence was asked for, has, and has not yet given away. Pure.

The logits behind token p - 1 say how likely token p was, so position 0 has no log probability, and a position whose
predecessor came out of the prefix cache has none either: what is cached is KV, not logits.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PromptToken:
    """One token of a prompt, and the model's own distribution there, before temperature and filters.

    Log probabilities are natural logarithms. `rank` 1: no token was more likely. `top_logprobs`: most likely first.
    """

    position: int
    token_id: int
    logprob: float
    rank: int
    top_logprobs: tuple[tuple[int, float], ...] = ()


class PromptLogprobs:
    """Collects the positions of one prompt in order, each once, however often they are computed. Owner thread only.

    Holds what `take` has not taken: with a `take` after each step, at most what one step computes.
    """

    def __init__(self, num_alternatives: int, prompt_token_ids: Sequence[int]) -> None:
        """`num_alternatives`: how many of the most likely tokens each position names beside its own."""
        self.num_alternatives = num_alternatives
        self._token_ids = prompt_token_ids
        self._next = 1
        self._pending: list[PromptToken] = []

    @property
    def is_complete(self) -> bool:
        """Whether every position has been added."""
        return self._next >= len(self._token_ids)

    @property
    def most_cached_tokens(self) -> int:
        """Until it is complete: so many leading tokens may come out of a prefix cache without one being missed."""
        return self._next - 1

    def wanted(self, start: int, end: int) -> range:
        """Which of the positions [start, end) a step must give the logits behind."""
        return range(max(start, self._next - 1), min(end, len(self._token_ids) - 1))

    def token_behind(self, position: int) -> int:
        """The prompt's token after a wanted position: the one that its logits are about."""
        return self._token_ids[position + 1]

    def add(self, token: PromptToken) -> None:
        """The next position. Raises ValueError for any other."""
        if token.position != self._next:
            raise ValueError(f"position {token.position} of a prompt after position {self._next - 1}")
        self._pending.append(token)
        self._next += 1

    def take(self) -> tuple[PromptToken, ...]:
        """What was added since the last call."""
        taken = tuple(self._pending)
        self._pending.clear()
        return taken

"""The best of several answers to one prompt."""

from collections.abc import Sequence

from router.http.openai_responses import Answer


def best_answers(answers: Sequence[Answer], num_choices: int, num_returned: int) -> list[Answer]:
    """Of each prompt's `num_choices` neighbours, the `num_returned` with the highest mean log probability a token, best
    first; among equals those that come first."""
    if num_returned == num_choices:
        return list(answers)
    best: list[Answer] = []
    for first in range(0, len(answers), num_choices):
        best += sorted(answers[first : first + num_choices], key=_mean_logprob, reverse=True)[:num_returned]
    return best


def _mean_logprob(answer: Answer) -> float:
    # An answer whose first token already ended it has that token.
    return sum(token.logprob for token in answer.tokens) / max(1, len(answer.tokens))

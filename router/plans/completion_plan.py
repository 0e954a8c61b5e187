"""What the fields of a completion request mean together: prompts, prompts alone, and the best of several answers."""

from typing import cast

from router.http.openai_requests import CompletionBody
from runtime.errors import invalid
from runtime.limits import MAX_PROMPTS, check_token_ids


def completion_prompts(prompt: str | list[int | str | list[int]], vocab_size: int) -> tuple[str | tuple[int, ...], ...]:
    """Each prompt as text or as token ids. Raises KvferryError (INVALID_REQUEST) for anything else, mixtures too."""
    if isinstance(prompt, str):
        return (prompt,)
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return (_checked_ids(cast(list[int], prompt), vocab_size),)
    if len(prompt) > MAX_PROMPTS:
        raise invalid("prompt", f"has {len(prompt)} entries, more than the limit of {MAX_PROMPTS}")
    if kinds == {str}:
        return tuple(cast(list[str], prompt))
    if kinds == {list}:
        return tuple(_checked_ids(ids, vocab_size) for ids in cast(list[list[int]], prompt))
    raise invalid("prompt", "must be a string, a list of strings, a list of token ids or a list of lists of token ids")


def wants_prompt_only(body: CompletionBody) -> bool:
    """Whether no answer is wanted. Raises KvferryError (INVALID_REQUEST) where that makes no sense."""
    if body.max_tokens != 0:
        return False
    if not body.echo:
        raise invalid("max_tokens", "must be at least 1, or 0 together with echo")
    if body.min_tokens:
        raise invalid("min_tokens", "must be at most max_tokens, which is 0")
    return True


def num_candidates(body: CompletionBody) -> int | None:
    """How many answers to generate for each prompt; None when all of them are returned.

    Raises KvferryError (INVALID_REQUEST) where there is nothing to choose from, or no time to choose.
    """
    num_returned = body.n or 1
    if body.best_of is None or body.best_of == num_returned:
        return None
    if body.best_of < num_returned:
        raise invalid("best_of", f"must be at least n, which is {num_returned}")
    if body.stream:
        raise invalid("best_of", "must equal n in a stream: which answers are best is known at their end")
    if body.max_tokens == 0:
        raise invalid("best_of", "must equal n when max_tokens is 0: there is nothing to choose from")
    return body.best_of


def _checked_ids(ids: list[int], vocab_size: int) -> tuple[int, ...]:
    check_token_ids("prompt", ids, vocab_size=vocab_size, max_tokens=len(ids))
    return tuple(ids)

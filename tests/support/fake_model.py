"""The "model" of the fake workers: what comes after a text, and how likely its tokens were."""

from collections.abc import Sequence
from zlib import crc32

from kvferry_rpc.common_pb2 import PromptTokenLogprob, SamplingParams
from kvferry_rpc.internal_pb2 import PromptLogprobs

VOCAB = 1000


def next_token(tokens: Sequence[int]) -> int:
    """What the "model" says after these tokens. Below VOCAB."""
    return crc32(b",".join(str(token).encode() for token in tokens)) % VOCAB


def continuation(prompt: Sequence[int], count: int) -> list[int]:
    """The answer to a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def prompt_logprobs(sampling: SamplingParams, prompt: Sequence[int], most: int | None = None) -> list[PromptLogprobs]:
    """Minus one and the token's id, three positions a message, at most `most` messages; none if none are wanted."""
    if not sampling.HasField("prompt_logprobs"):
        return []
    tokens = [
        PromptTokenLogprob(position=position, token_id=token_id, logprob=-1.0 - token_id, rank=1)
        for position, token_id in enumerate(prompt)
    ][1:]
    return [PromptLogprobs(tokens=tokens[first : first + 3]) for first in range(0, len(tokens), 3)][:most]

"""What all engines are asked to do, and the numbers that come of the answers. Knows no engine."""

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from bench.common.harness import BenchmarkError
from bench.common.peer_process import Outcome

_RESAMPLES = 2000
# A prefix cache leaves up to so many tokens of each prompt to compute again, in as many as one step may have. Requests
# that begin early decode meanwhile, so they are given more tokens, or they would end before the last one begins.
_TOKENS_AGAIN = 128
_TOKENS_A_STEP = 128
_FIRST_TOKEN_ID = 64  # Below are special tokens.


class LoadKind(Enum):
    """What a load tells of an engine."""

    PREFILL = "prefill_tok_s"
    DECODE = "decode_tok_s"
    SERVE = "serve_tok_s"


@dataclass(frozen=True, slots=True)
class Load:
    """`requests` prompts handed over at once, each of `shared` tokens that all have and `prompt` of its own.

    Decoding is timed while all requests decode: its prompts are the same each time, and known to a prefix cache. All
    other prompts are new each time.
    """

    kind: LoadKind
    requests: int
    prompt: int
    output: int
    shared: int = 0

    @property
    def variant(self) -> str:
        """As it stands in a line."""
        if self.kind is LoadKind.PREFILL:
            return f"prompt{self.prompt}"
        if self.kind is LoadKind.DECODE:
            return f"batch{self.requests}:context{self.prompt}"
        prefix = f"prefix{self.shared}:" if self.shared else ""
        return f"{prefix}concurrent{self.requests}:{self.prompt}in{self.output}out"

    @property
    def max_tokens(self) -> int:
        """Tokens to ask for in each request."""
        if self.kind is not LoadKind.DECODE:
            return self.output
        return self.output + math.ceil(self.requests * min(self.prompt, _TOKENS_AGAIN) / _TOKENS_A_STEP)

    @property
    def context_tokens(self) -> int:
        """Of one request at its end."""
        return self.shared + self.prompt + self.max_tokens

    @property
    def pool_tokens(self) -> int:
        """Tokens whose KV must fit at a time, if nothing is shared."""
        return self.requests * self.context_tokens

    def prompts(self, vocab_size: int, seed: int, round_number: int) -> list[list[int]]:
        """Random token ids, the same for all engines."""
        fresh = 0 if self.kind is LoadKind.DECODE else round_number
        generator = np.random.default_rng([seed, fresh, zlib.crc32(f"{self.kind.value} {self.variant}".encode())])
        shared = generator.integers(_FIRST_TOKEN_ID, vocab_size, self.shared).tolist()
        own = generator.integers(_FIRST_TOKEN_ID, vocab_size, (self.requests, self.prompt)).tolist()
        return [shared + one for one in own]

    def rate(self, outcome: Outcome) -> float:
        """Tokens a second. Raises BenchmarkError for decoding in which not all requests ever decode at once."""
        last_s = max(times[-1] for times in outcome.times_s)
        if self.kind is LoadKind.PREFILL:
            return self.requests * self.prompt / last_s
        if self.kind is LoadKind.SERVE:
            return self.requests * self.output / last_s
        return decode_rate(outcome.times_s)


def decode_rate(times_s: Sequence[Sequence[float]]) -> float:
    """Tokens a second of all requests from when the last has its first token until the first has its last.

    Raises BenchmarkError if there is no such time.
    """
    began = max(times[0] for times in times_s)
    ended = min(times[-1] for times in times_s)
    if ended <= began:
        raise BenchmarkError("a request ended before another had its first token: not all decode at once")
    return sum(began < at <= ended for times in times_s for at in times) / (ended - began)


def quick_loads() -> list[Load]:
    """For a model of a few layers: shows that everything works."""
    return [
        Load(LoadKind.PREFILL, 1, 128, 1),
        Load(LoadKind.DECODE, 1, 128, 16),
        Load(LoadKind.DECODE, 8, 128, 16),
        Load(LoadKind.SERVE, 16, 64, 8),
        Load(LoadKind.SERVE, 8, 16, 8, shared=256),
    ]


def normal_loads() -> list[Load]:
    """What 10 minutes allow."""
    return [
        Load(LoadKind.PREFILL, 1, 128, 1),
        Load(LoadKind.PREFILL, 1, 512, 1),
        *(Load(LoadKind.DECODE, batch, 128, 8) for batch in (1, 8, 32)),
        Load(LoadKind.DECODE, 1, 1024, 8),
        Load(LoadKind.SERVE, 16, 64, 16),
        Load(LoadKind.SERVE, 8, 16, 8, shared=512),
    ]


def long_loads() -> list[Load]:
    """All of it: hours on a small machine."""
    return [
        *(Load(LoadKind.PREFILL, 1, prompt, 1) for prompt in (128, 512, 2048)),
        *(Load(LoadKind.DECODE, batch, context, 32) for context in (128, 512, 2048) for batch in (1, 8, 32)),
        *(Load(LoadKind.SERVE, requests, 256, 64) for requests in (16, 64)),
        Load(LoadKind.SERVE, 32, 32, 16, shared=1024),
    ]


def equal_shares(tokens: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> list[float]:
    """For each text the share of places with the same token."""
    pairs = zip(tokens, others, strict=True)
    return [sum(a == b for a, b in zip(one, other, strict=True)) / len(one) for one, other in pairs]


def geomean_vs_best(rows: Sequence[Mapping[str, Sequence[float]]], seed: int) -> tuple[float, tuple[float, float]]:
    """The geometric mean over rows of the ratio to the best peer of each, and its 95 % interval.

    `rows`: for each the ratios of the pairs by peer. The best peer is the one with the least median. The interval is
    that of seeded resamples of the pairs of each row and peer. Raises BenchmarkError without a row.
    """
    if not rows:
        raise BenchmarkError("no row has a peer")
    generator = np.random.default_rng(seed)
    logs = [math.log(min(float(np.median(ratios)) for ratios in row.values())) for row in rows]
    resampled = np.zeros(_RESAMPLES)
    for row in rows:
        medians = [
            np.median(np.asarray(ratios)[generator.integers(0, len(ratios), (_RESAMPLES, len(ratios)))], axis=1)
            for ratios in row.values()
        ]
        resampled += np.log(np.min(medians, axis=0)) / len(rows)
    low, high = np.exp(np.percentile(resampled, [2.5, 97.5]))
    return math.exp(sum(logs) / len(logs)), (float(low), float(high))

"""Whether a tenant can tell by the time to the first token that another tenant has asked the same prompt.

A cluster with two keys. Each round one tenant asks a long prompt; then, in random order, the other tenant asks the
same, the other tenant asks one that nobody has asked, and the first tenant asks its own again. Only the last may be
sooner than the one that nobody has asked.
"""

import argparse
import asyncio
import hashlib
import json
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import httpx

from bench.common.failover_cluster import StreamCluster
from bench.common.harness import MIN_PAIRS, BenchmarkError, Better, Options, Pair, Report, Result, summarise
from bench.common.soak_process import at_rest
from bench.common.words import some_words

MODEL = Path(__file__).resolve().parents[1] / "tests" / "data" / "tiny-real"
SERVED_NAME = "isolation"
OWNER, STRANGER = "owner", "stranger"
_KEYS = {name: f"kvf-{name}-of-the-benchmark" for name in (OWNER, STRANGER)}
_MAX_TOKENS = 8
_ANSWER_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Asked:
    """One answer: seconds to its first text, the prompt's tokens, how many of them were found in a cache, the text."""

    first_s: float
    prompt_tokens: int
    cached_tokens: int
    text: str


@dataclass(frozen=True, slots=True)
class Round:
    """`other`: the stranger asked what the owner had asked. `cold`: what nobody had. `same`: the owner asked again."""

    other: Asked
    cold: Asked
    same: Asked


class Tenants:
    """One kept connection for each tenant. Use as an asynchronous context manager."""

    def __init__(self, base_url: str, model: str, keys: Mapping[str, str]) -> None:
        self._model = model
        self._http = {
            name: httpx.AsyncClient(
                base_url=base_url, headers={"authorization": f"Bearer {key}"}, timeout=_ANSWER_TIMEOUT_S
            )
            for name, key in keys.items()
        }
        self._open = AsyncExitStack()

    async def __aenter__(self) -> Self:
        for http in self._http.values():
            await self._open.enter_async_context(http)
        return self

    async def __aexit__(self, *details: object) -> None:
        await self._open.aclose()

    async def ask(self, tenant: str, prompt: str) -> Asked:
        """Ask and read to the end, then wait until nothing of it is held any more, so that the next one finds all of
        it. Raises BenchmarkError for any answer but a good one."""
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": _MAX_TOKENS,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        pieces: list[str] = []
        first_at, usage = 0.0, None
        began = time.perf_counter()
        async with self._http[tenant].stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                first_at = first_at or time.perf_counter()
                event = json.loads(line.removeprefix("data: "))
                usage = event.get("usage")
                pieces += [choice["text"] for choice in event.get("choices", ())]
        if answer.status_code != 200 or usage is None:
            raise BenchmarkError(f"{tenant} got status {answer.status_code} and {''.join(pieces)!r}")
        await at_rest(self._http[tenant])
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return Asked(first_at - began, usage["prompt_tokens"], cached, "".join(pieces))


async def take_round(tenants: Tenants, rng: random.Random, num_words: int) -> Round:
    """One sample of each way. Raises BenchmarkError when an answer depends on who asks, or when nothing is reused even
    by the one whose it is: then there would be nothing to tell apart."""
    asked, fresh = some_words(rng, num_words), some_words(rng, num_words)
    first = await tenants.ask(OWNER, asked)
    ways = {"other": (STRANGER, asked), "cold": (STRANGER, fresh), "same": (OWNER, asked)}
    answers = {name: await tenants.ask(*ways[name]) for name in rng.sample(list(ways), len(ways))}
    taken = Round(answers["other"], answers["cold"], answers["same"])
    if not first.text == taken.other.text == taken.same.text:
        raise BenchmarkError(f"one prompt, greedy: {first.text!r}, {taken.other.text!r}, {taken.same.text!r}")
    if not taken.same.cached_tokens:
        raise BenchmarkError("a prompt that was asked again was computed again")
    return taken


def report_rounds(report: Report, rounds: Sequence[Round], seed: int) -> None:
    """Two lines of times, both against the prompt that nobody had asked, and one of tokens that must not be."""
    variant = f"{rounds[0].cold.prompt_tokens // 100 * 100}+tokens"
    ways = {
        "ttft_other_tenant": [one.other for one in rounds],
        "ttft_same_tenant": [one.same for one in rounds],
    }
    for metric, answers in ways.items():
        pairs = [
            Pair(1000 * answer.first_s, 1000 * one.cold.first_s) for answer, one in zip(answers, rounds, strict=True)
        ]
        report.add(summarise(metric, variant, "ms", Better.LOWER, "cold", pairs, seed))
    shared = sum(one.other.cached_tokens + one.cold.cached_tokens for one in rounds)
    ratio = 1 / (1 + shared)
    report.add(Result("shared_tokens", variant, shared, "tokens", "none", 0.0, ratio, 2 * len(rounds), (ratio, ratio)))
    sooner = sum(one.other.first_s < one.cold.first_s for one in rounds)
    report.note(f"what the other tenant had asked was sooner in {sooner} of {len(rounds)} rounds; by chance in half")


def write_keys(path: Path) -> None:
    """The router's file of keys."""
    entries = [{"tenant": name, "key_sha256": hashlib.sha256(key.encode()).hexdigest()} for name, key in _KEYS.items()]
    path.write_text("\n".join(json.dumps(entry) for entry in entries))


async def take_rounds(base_url: str, options: Options, num_words: int, num_rounds: int) -> list[Round]:
    """All rounds, behind one that is not counted."""
    rng = random.Random(options.seed)
    async with Tenants(base_url, SERVED_NAME, _KEYS) as tenants:
        await take_round(tenants, rng, num_words)
        return [await take_round(tenants, rng, num_words) for _ in range(num_rounds)]


def main(argv: list[str] | None = None) -> None:
    """Run it. Raises BenchmarkError when the cluster does not come up or its answers are no good."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL, help="what `kvferry up` takes (default: the test model)")
    parser.add_argument("--words", type=int, default=0, help="length of the prompts")
    options, given = Options.parse(parser, argv)
    num_words = given.words or options.pick(300, 1000, 1000)
    with Report(options) as report, tempfile.TemporaryDirectory() as text:
        keys = Path(text) / "keys"
        write_keys(keys)
        flags = ("--api-keys-file", str(keys), "--served-model-name", SERVED_NAME, "--num-blocks", "1024")
        with StreamCluster(Path(text), given.model, 1, 1, *flags) as cluster:
            num_rounds = options.pick(MIN_PAIRS, 31, 101)
            rounds = asyncio.run(take_rounds(cluster.base_url, options, num_words, num_rounds))
        report_rounds(report, rounds, options.seed)


if __name__ == "__main__":
    main()

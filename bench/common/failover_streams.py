"""Streams that lose a worker on their way: what the client got, when, and how long it had to wait for it."""

import asyncio
import json
import random
import signal
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from bench.common.failover_cluster import StreamCluster
from bench.common.words import some_words

_TIMEOUT_S = 60.0


@dataclass(slots=True)
class Heard:
    """One streamed answer as its client had it. `gaps_s`: before the first text, and before each later one."""

    text: str = ""
    reason: str = ""
    error: str = ""
    gaps_s: list[float] = field(default_factory=list)
    chars: list[int] = field(default_factory=list)  # of the text before each gap
    receipt: dict[str, Any] = field(default_factory=dict)

    @property
    def was_disturbed(self) -> bool:
        """Whether it had to go on elsewhere."""
        return bool(self.receipt.get("earlier_failures") or self.receipt.get("migrations"))

    @property
    def pauses_ms(self) -> tuple[float, ...]:
        """How long it stood still for each move with its KV."""
        return tuple(float(move["pause_ms"]) for move in self.receipt.get("migrations", ()))


@dataclass(slots=True)
class Loss:
    """What the loss of a worker cost one stream, beside a new request for its prompt and its text so far."""

    added_s: float
    recompute_s: float
    pauses_ms: tuple[float, ...] = ()  # Of each move with its KV, as the router saw it.

    @property
    def moved(self) -> bool:
        """Whether it went with its KV."""
        return bool(self.pauses_ms)


@dataclass(slots=True)
class Tally:
    """All streams of one kind of loss."""

    streams: int = 0
    equal: int = 0
    errors: int = 0
    losses: list[Loss] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


class StreamRounds:
    """Rounds of streams over one cluster, in each of which one worker gets a signal."""

    def __init__(self, cluster: StreamCluster, rng: random.Random, *, width: int, max_tokens: int) -> None:
        self._cluster = cluster
        self._rng = rng
        self._width = width
        self._max_tokens = max_tokens
        self._number = 0
        limits = httpx.Limits(max_connections=4 * width)
        self._http = httpx.AsyncClient(base_url=cluster.base_url, timeout=_TIMEOUT_S, limits=limits)

    async def close(self) -> None:
        """Close the client's connections."""
        await self._http.aclose()

    async def round(self, role: str, number: signal.Signals, tally: Tally) -> None:
        """Each stream undisturbed, then all again while a worker of that role is lost at a random moment."""
        prompts = [self._prompt() for _ in range(self._width)]
        undisturbed = await self._all(prompts)
        # A prefill worker has something to lose only while prompts are computed.
        longest_s = max(sum(heard.gaps_s if role == "decode" else heard.gaps_s[:1]) for heard in undisturbed)
        ready = await self._cluster.wait_whole_enough()
        victims = [name for name in ready if name.startswith(role)]
        streams = asyncio.create_task(self._all(prompts))
        await asyncio.sleep(self._rng.uniform(0.0, 0.9 * longest_s))
        if victims:
            self._cluster.kill(self._rng.choice(victims), number)
        disturbed = await streams
        await self._cluster.wait_whole_enough()
        lost = []
        for prompt, before, after in zip(prompts, undisturbed, disturbed, strict=True):
            self._count(before, after, tally)
            if after.was_disturbed and not after.error:
                lost.append(self._loss(prompt, before, after))
        # All at once, as they were lost: each waits for the others.
        tally.losses += await asyncio.gather(*lost)

    def _count(self, before: Heard, after: Heard, tally: Tally) -> None:
        tally.streams += 1
        tally.errors += bool(after.error)
        is_equal = not after.error and (before.text, before.reason) == (after.text, after.reason)
        tally.equal += is_equal
        if not is_equal:
            tally.wrong.append(f"{before.text!r} became {after.text!r} {after.error} {after.receipt}")

    async def _loss(self, prompt: str, before: Heard, after: Heard) -> Loss:
        """The longest wait beyond the usual one, and the time of a new request for what was there before it."""
        usual_s = statistics.median(before.gaps_s[1:]) if len(before.gaps_s) > 1 else 0.0
        waits_s = [after.gaps_s[0] - before.gaps_s[0], *(gap - usual_s for gap in after.gaps_s[1:])]
        longest = max(range(len(waits_s)), key=waits_s.__getitem__)
        text = prompt + after.text[: after.chars[longest]]
        # The salt is nobody else's: nothing of it is in any cache.
        fresh = await self._stream(text, max_tokens=1, cache_salt=f"fresh {self._rng.random()}")
        return Loss(max(0.0, waits_s[longest]), fresh.gaps_s[0] if fresh.gaps_s else 0.0, after.pauses_ms)

    def _prompt(self) -> str:
        self._number += 1
        return f"Story {self._number}. {some_words(self._rng, self._rng.randrange(40, 160))}"

    async def _all(self, prompts: Sequence[str]) -> list[Heard]:
        return await asyncio.gather(*(self._stream(prompt) for prompt in prompts))

    async def _stream(self, prompt: str, **changes: Any) -> Heard:
        body = {
            "model": "tiny-real",
            "prompt": prompt,
            "max_tokens": self._max_tokens,
            "ignore_eos": True,
            "temperature": 0.8,
            "seed": 7,
            "stream": True,
            "kv_receipt": True,
            **changes,
        }
        heard, last = Heard(), time.perf_counter()
        try:
            async with self._http.stream("POST", "/v1/completions", json=body) as answer:
                if answer.status_code != 200:
                    heard.error = f"status {answer.status_code}: {(await answer.aread()).decode(errors='replace')}"
                    return heard
                async for line in answer.aiter_lines():
                    last = _take(line, heard, last)
        except httpx.HTTPError as error:
            heard.error = f"{type(error).__name__}: {error}"
        if not heard.reason:
            heard.error = heard.error or "it has no end"
        return heard


def _take(line: str, heard: Heard, last: float) -> float:
    """One line of the event stream; the time of the last text."""
    if not line.startswith("data: ") or line == "data: [DONE]":
        return last
    event = json.loads(line[6:])
    if "error" in event:
        heard.error = event["error"]["message"]
    heard.receipt = event.get("kv_receipt") or heard.receipt
    for choice in event.get("choices", ()):
        heard.reason = choice["finish_reason"] or heard.reason
        if choice["text"]:
            now = time.perf_counter()
            heard.gaps_s.append(now - last)
            heard.chars.append(len(heard.text))
            heard.text += choice["text"]
            last = now
    return last

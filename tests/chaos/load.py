"""Clients that ask without pause and compare every answer, whole or broken off, with the undisturbed one."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import httpx
import orjson

MODEL = "tiny-real"
REQUEST_TIMEOUT_S = 30.0
# What a request may take beyond its deadline until its client knows: a router that was frozen has to wake first.
HANG_GRACE_S = 10.0
_PAUSE_AFTER_FAILURE_S = 0.2


class Ending(Enum):
    """How a request ended. Failures are seen by the client and can be tried again; the last two must never happen."""

    GOOD = "good"
    FAILED = "failed"
    WRONG = "wrong"
    HUNG = "hung"


@dataclass(frozen=True)
class Case:
    """A request whose answer is always the same."""

    body: dict[str, Any]

    @property
    def name(self) -> str:
        """For people."""
        return str(self.body["prompt"])[:40]


@dataclass(frozen=True)
class Outcome:
    """One request. `began` and `ended` are on the event loop's clock; `detail` says why it did not end well."""

    ending: Ending
    began: float
    ended: float
    detail: str = ""


class BrokenOffError(Exception):
    """A request failed; the message is a short name of how."""


def cases(seed: int, count: int) -> list[Case]:
    """Prompts short and long, greedy and sampled, with shared beginnings and without."""
    rng = random.Random(seed)
    made = []
    for number in range(count):
        opening = "You are the narrator of an old tale. " if number % 2 else ""
        words = " ".join(rng.choice(_WORDS) for _ in range(rng.choice((5, 40, 200))))
        body: dict[str, Any] = {
            "model": MODEL, "prompt": f"{opening}{words}", "max_tokens": rng.choice((8, 60, 160)), "ignore_eos": True,
            "temperature": rng.choice((0.0, 0.8)), "seed": number, "stream": True,
        }  # fmt: skip
        made.append(Case(body))
    return made


_WORDS = ("fox", "crow", "river", "night", "king", "stone", "ran", "sang", "old", "under", "the", "a", "bright", "and")


async def undisturbed(http: httpx.AsyncClient, case: Case) -> str:
    """The answer while nothing goes wrong. Raises BrokenOffError or httpx.HTTPError when something does."""
    return "".join([text async for text in _texts(http, case)])


@dataclass
class Load:
    """Clients and what became of their requests. Event-loop thread only."""

    http: httpx.AsyncClient
    expected: list[tuple[Case, str]]
    seed: int
    outcomes: list[Outcome] = field(default_factory=list)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _over: bool = False

    def start(self, num_clients: int) -> None:
        """Begin to ask."""
        rngs = [random.Random(f"{self.seed}/{number}") for number in range(num_clients)]
        self._tasks = [asyncio.create_task(self._ask_on(rng)) for rng in rngs]

    async def stop(self) -> None:
        """Ask no more; what runs ends by itself, or is found to hang."""
        self._over = True
        await asyncio.gather(*self._tasks)

    async def one(self) -> Outcome:
        """One request more, of the first case."""
        return await self._ask(*self.expected[0])

    def counts(self) -> dict[str, int]:
        """Requests by how they ended."""
        counted = Counter(outcome.ending.value for outcome in self.outcomes)
        return {ending.value: counted[ending.value] for ending in Ending}

    def times_s(self) -> list[float]:
        """How long good requests took, the shortest first."""
        return sorted(one.ended - one.began for one in self.outcomes if one.ending is Ending.GOOD)

    def details(self, *endings: Ending) -> dict[str, int]:
        """Why requests ended so, the most frequent first."""
        return dict(Counter(outcome.detail for outcome in self.outcomes if outcome.ending in endings).most_common())

    async def _ask_on(self, rng: random.Random) -> None:
        while not self._over:
            outcome = await self._ask(*rng.choice(self.expected))
            if outcome.ending is not Ending.GOOD:
                await asyncio.sleep(_PAUSE_AFTER_FAILURE_S)

    async def _ask(self, case: Case, expected: str) -> Outcome:
        clock = asyncio.get_running_loop().time
        began, heard = clock(), ""
        ending, detail = Ending.GOOD, ""
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S + HANG_GRACE_S):
                async for text in _texts(self.http, case):
                    heard += text
        except TimeoutError:
            ending, detail = Ending.HUNG, f"{case.name!r} after {len(heard)} characters"
        except (BrokenOffError, httpx.HTTPError) as error:
            ending, detail = Ending.FAILED, str(error) or type(error).__name__
        is_right = heard == expected if ending is Ending.GOOD else expected.startswith(heard)
        if not is_right:
            ending, detail = Ending.WRONG, f"{case.name!r}: {heard[-60:]!r} is not of {expected[-60:]!r}"
        outcome = Outcome(ending, began, clock(), detail)
        self.outcomes.append(outcome)
        return outcome


async def _texts(http: httpx.AsyncClient, case: Case) -> AsyncGenerator[str, None]:
    """The pieces of an answer. Raises BrokenOffError, httpx.HTTPError."""
    headers = {"x-request-timeout-ms": str(int(REQUEST_TIMEOUT_S * 1000))}
    async with http.stream("POST", "/v1/completions", json=case.body, headers=headers) as response:
        if response.status_code != httpx.codes.OK:
            await response.aread()
            raise BrokenOffError(f"status {response.status_code} {_code(response.content)}")
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                return
            event = orjson.loads(line[6:])
            if "error" in event:
                raise BrokenOffError(f"in the stream: {event['error'].get('code')}")
            for choice in event["choices"]:
                yield choice["text"]
    raise BrokenOffError("the stream ended without [DONE]")


def _code(body: bytes) -> str:
    try:
        return str(orjson.loads(body)["error"]["code"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return "without a code"

"""The clients of a soak: what they ask, how they behave, and what counts as wrong about what they get.

Each of them asks again and again, each time in one of these ways: a stream or a whole answer, both held against the
text undisturbed; a story that nobody has told before; leaving, with FIN or RST, before the answer or within it;
reading slowly; bodies that are too large, compressed or wrong; tools and formats; the newer APIs.
"""

import asyncio
import functools
import gzip
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.common.soak_http import Exchange, Received, Sent, received
from bench.common.words import some_words

ANSWER_TIMEOUT_S = 180.0
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
_MOST_READS = 24
_BOMB_BYTES = 64 * 1024 * 1024


@dataclass(slots=True)
class Tally:
    """What came of all requests. `problems` says in words what was wrong, the first of each kind."""

    statuses: Counter[int] = field(default_factory=Counter)
    ways: Counter[str] = field(default_factory=Counter)
    server_errors: int = 0
    accepted: int = 0
    finished: int = 0
    compared: int = 0
    wrong_texts: int = 0
    odd_answers: int = 0
    problems: dict[str, str] = field(default_factory=dict)

    def problem(self, kind: str, text: str) -> None:
        """Remember the first of its kind."""
        self.problems.setdefault(kind, text)


@dataclass(frozen=True, slots=True)
class Question:
    """A request whose text is known."""

    path: str
    fields: dict[str, Any]


class SoakClients:
    """So many clients at the same time. Event-loop thread only."""

    def __init__(self, address: str, model: str, seed: int, *, patience_s: float = 0.3) -> None:
        """`address` is host:port. `patience_s`: the longest pause of those who read slowly, or leave."""
        host, _, port = address.rpartition(":")
        self._host, self._port = host, int(port)
        self._model = model
        self._patience_s = patience_s
        self._rng = random.Random(seed)
        self._questions = self._make_questions()
        self._texts: list[str] = []
        self.tally = Tally()
        self._ways: dict[str, tuple[int, Callable[[], Awaitable[None]]]] = {
            "stream": (30, lambda: self._known(stream=True)),
            "whole": (12, lambda: self._known(stream=False)),
            "compressed": (6, lambda: self._known(stream=True, compressed=True)),
            "story": (14, self._story),
            "tools": (5, self._tools),
            "format": (3, self._format),
            "newer": (5, self._newer),
            "leave": (12, self._leave),
            "slow": (4, self._slow),
            "large": (3, self._large),
            "wrong": (6, self._wrong),
        }

    async def send_large(self) -> None:
        """Bodies as large as any, several at once: the memory that these take is taken once, before it is measured."""
        for _ in range(2):
            await asyncio.gather(*(self._large() for _ in range(4)))

    async def learn(self) -> None:
        """Ask each question alone: their texts undisturbed. Raises AssertionError when one has none."""
        for question in self._questions:
            answer = await self._ask(Sent.json(question.path, {**question.fields, "stream": False}))
            assert answer is not None
            assert answer.status == 200, answer
            self._texts.append(_text_of(answer, streamed=False))

    @property
    def ways(self) -> tuple[str, ...]:
        """Names of all there are."""
        return tuple(self._ways)

    async def once(self, way: str) -> None:
        """One request in this way. A connection that breaks, or an answer that does not come, counts as odd."""
        self.tally.ways[way] += 1
        try:
            await self._ways[way][1]()
        except (TimeoutError, OSError) as error:
            self.tally.odd_answers += 1
            self.tally.problem(f"{way}: {type(error).__name__}", str(error))

    async def run(self, num_clients: int, until: float) -> None:
        """Ask until that time of the monotonic clock, then let all answers end."""
        names = list(self._ways)
        weights = [self._ways[name][0] for name in names]

        async def client() -> None:
            while time.monotonic() < until:
                await self.once(self._rng.choices(names, weights)[0])

        await asyncio.gather(*(client() for _ in range(num_clients)))

    def _make_questions(self) -> Sequence[Question]:
        same = {"model": self._model, "max_tokens": 48, "temperature": 0.8, "ignore_eos": True}
        made = []
        for number in range(6):
            fields = {**same, "seed": number}
            story = self._words(20 + 25 * number)
            made.append(Question(COMPLETIONS, {**fields, "prompt": story}))
            made.append(Question(CHAT, {**fields, "messages": [{"role": "user", "content": story}]}))
        return made

    def _words(self, count: int) -> str:
        return some_words(self._rng, count)

    async def _known(self, *, stream: bool, compressed: bool = False) -> None:
        number = self._rng.randrange(len(self._questions))
        question = self._questions[number]
        request = Sent.json(question.path, {**question.fields, "stream": stream})
        if compressed:
            request = Sent(request.path, gzip.compress(request.body), (("content-encoding", "gzip"),))
        answer = await self._accepted(request)
        if answer is None:
            return
        self.tally.compared += 1
        text = _text_of(answer, streamed=stream)
        if text != self._texts[number]:
            self.tally.wrong_texts += 1
            self.tally.problem("wrong text", f"{self._texts[number]!r} became {text!r}")

    async def _story(self) -> None:
        await self._accepted(Sent.json(COMPLETIONS, self._story_fields()))

    def _story_fields(self, **more: Any) -> dict[str, Any]:
        prompt = self._words(self._rng.randrange(10, 250))
        length = self._rng.randrange(1, 64)
        return {"model": self._model, "prompt": prompt, "max_tokens": length, "stream": True, **more}

    async def _tools(self) -> None:
        choice = self._rng.choice(["auto", "required"])
        await self._accepted(Sent.json(CHAT, self._chat(tools=[_TOOL], tool_choice=choice)))

    async def _format(self) -> None:
        await self._accepted(Sent.json(CHAT, self._chat(response_format={"type": "json_object"})))

    def _chat(self, **more: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": self._words(12)}]
        stream = self._rng.random() < 0.5
        return {"model": self._model, "messages": messages, "max_tokens": 32, "stream": stream, **more}

    async def _newer(self) -> None:
        stream = self._rng.random() < 0.5
        if self._rng.random() < 0.5:
            fields = {"model": self._model, "input": self._words(12), "max_output_tokens": 24, "stream": stream}
            await self._accepted(Sent.json("/v1/responses", fields))
            return
        messages = [{"role": "user", "content": self._words(12)}]
        fields = {"model": self._model, "messages": messages, "max_tokens": 24, "stream": stream}
        await self._accepted(Sent.json("/v1/messages", fields))

    async def _leave(self) -> None:
        """Before the answer, or within it; nobody is told."""
        async with Exchange(self._host, self._port) as exchange:
            await exchange.send(Sent.json(COMPLETIONS, self._story_fields(max_tokens=400, ignore_eos=True)))
            exchange.leave(reset=self._rng.random() < 0.5)
            if self._rng.random() < 0.4:
                await asyncio.sleep(self._rng.random() * self._patience_s)
                return
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                for _ in range(self._rng.randrange(1, 8)):
                    if not await exchange.read(2048):
                        return

    async def _slow(self) -> None:
        """Reads a piece, waits, and so on; then all the rest."""
        async with Exchange(self._host, self._port, slow=True) as exchange:
            await exchange.send(Sent.json(COMPLETIONS, self._story_fields(max_tokens=200, ignore_eos=True, logprobs=5)))
            parts = []
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                for _ in range(_MOST_READS):
                    parts.append(await exchange.read(1024))
                    await asyncio.sleep(self._rng.random() * self._patience_s)
                while part := await exchange.read():
                    parts.append(part)
            answer = received(b"".join(parts))
        self._count(answer)
        self._judge(answer)

    async def _large(self) -> None:
        """More than a body may have; or less, but more than the context holds; or a bomb."""
        size = self._rng.choice([5, 3]) * 1024 * 1024
        request = Sent.json(COMPLETIONS, {"model": self._model, "prompt": "a " * (size // 2)})
        if self._rng.random() < 0.3:
            request = Sent(COMPLETIONS, bomb(), (("content-encoding", "gzip"),))
        await self._refused(request, 400, 413)

    async def _wrong(self) -> None:
        wrong: list[Sent] = [
            Sent(CHAT, b'{"model": '),
            Sent(CHAT, b"[" * 5000),
            Sent.json(COMPLETIONS, self._story_fields(temperature=float("nan"))),
            Sent.json(COMPLETIONS, self._story_fields(max_tokens=10**9)),
            Sent.json(COMPLETIONS, self._story_fields(n=1000)),
            Sent.json(COMPLETIONS, self._story_fields(model="another")),
            Sent.json("/v1/nothing", {}),
            Sent(CHAT, b"", method="GET"),
        ]
        await self._refused(self._rng.choice(wrong), 400, 404, 405)

    async def _refused(self, request: Sent, *statuses: int) -> None:
        answer = await self._ask(request)
        if answer is not None and answer.status not in (*statuses, 429, 503):
            self.tally.odd_answers += 1
            self.tally.problem(f"status {answer.status}", f"of {request.path} {request.body[:200]!r}")

    async def _accepted(self, request: Sent) -> Received | None:
        """A good request; its answer if it got one that is whole."""
        answer = await self._ask(request)
        return answer if answer is not None and self._judge(answer) else None

    async def _ask(self, request: Sent) -> Received | None:
        async with Exchange(self._host, self._port) as exchange:
            await exchange.send(request)
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                try:
                    answer = await exchange.whole()
                except ConnectionResetError:
                    # Of a large body that was refused while it was still being sent.
                    if len(request.body) > 1024 * 1024:
                        return None
                    raise
        self._count(answer)
        return answer

    def _count(self, answer: Received) -> None:
        self.tally.statuses[answer.status] += 1
        if answer.status >= 500 and answer.status != 503:
            self.tally.server_errors += 1
            self.tally.problem(f"status {answer.status}", answer.body[:500].decode(errors="replace"))

    def _judge(self, answer: Received) -> bool:
        """Whether it was accepted and is whole. 429 and 503 are answers too, but no acceptance."""
        if answer.status in (429, 503):
            return False
        if answer.status != 200:
            self.tally.odd_answers += 1
            self.tally.problem(f"status {answer.status}", answer.body[:500].decode(errors="replace"))
            return False
        self.tally.accepted += 1
        is_finished = answer.is_whole and _is_finished(answer)
        self.tally.finished += is_finished
        if not is_finished:
            self.tally.problem("not finished", answer.body[-500:].decode(errors="replace"))
        return is_finished


@functools.cache
def bomb() -> bytes:
    """A small body that is a large one."""
    return gzip.compress(bytes(_BOMB_BYTES))


def _is_finished(answer: Received) -> bool:
    """Whether a stream has its proper last event; whole bodies are what they are."""
    events = answer.events()
    if not events:
        return bool(json.loads(answer.body))
    last = events[-1]
    return last == "[DONE]" or last.get("type") in ("message_stop", "response.completed", "response.incomplete")


def _text_of(answer: Received, *, streamed: bool) -> str:
    chunks = [event for event in answer.events() if event != "[DONE]"] if streamed else [json.loads(answer.body)]
    pieces = []
    for chunk in chunks:
        for choice in chunk["choices"]:
            shown = choice.get("delta") or choice.get("message") or {}
            pieces.append(choice.get("text") or shown.get("content") or "")
    return "".join(pieces)

"""The clients of a run of chaos tell good answers from wrong ones, and failures that are seen from hangs."""

import asyncio
from collections.abc import AsyncIterator, Callable

import httpx
import orjson
import pytest

import tests.chaos.load
from tests.chaos.load import Case, Ending, Load, cases, undisturbed

CASE = Case({"model": "m", "prompt": "Tell me"})
TEXT = "once upon a time"


def event(text: str) -> bytes:
    return b"data: " + orjson.dumps({"choices": [{"text": text}]}) + b"\n\n"


DONE = b"data: [DONE]\n\n"
ERROR = b"data: " + orjson.dumps({"error": {"code": "unavailable"}}) + b"\n\n"


class Pieces(httpx.AsyncByteStream):
    """A body of these pieces; None = nothing more, and no end."""

    def __init__(self, *pieces: bytes | Exception | None) -> None:
        self._pieces = pieces

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            await asyncio.sleep(0)  # As from a network: others have a turn.
            if isinstance(piece, Exception):
                raise piece
            if piece is None:
                await asyncio.Event().wait()
            else:
                yield piece


def client(answer: Callable[[], httpx.Response]) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url="http://x", transport=httpx.MockTransport(lambda _: answer()), timeout=None)


@pytest.mark.parametrize(
    ("pieces", "ending", "detail"),
    [
        ([event("once upon "), event("a time"), DONE], Ending.GOOD, ""),
        ([event("once upon "), ERROR], Ending.FAILED, "in the stream: unavailable"),
        ([event("once upon ")], Ending.FAILED, "the stream ended without [DONE]"),
        ([event("once "), httpx.ReadError("reset")], Ending.FAILED, "reset"),
        ([event("once upon a tim"), DONE], Ending.WRONG, "'Tell me': 'once upon a tim' is not of 'once upon a time'"),
        ([event("once upon once upon"), ERROR], Ending.WRONG, "'Tell me'"),
        ([event("once upon a time, and on"), DONE], Ending.WRONG, "'Tell me'"),
        ([event("once upon "), None], Ending.HUNG, "'Tell me' after 10 characters"),
    ],
)
async def test_an_answer_is_what_it_was_or_the_beginning_of_it(
    pieces: list[bytes | Exception | None], ending: Ending, detail: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tests.chaos.load, "REQUEST_TIMEOUT_S", 0.3 if ending is Ending.HUNG else 30.0)
    monkeypatch.setattr(tests.chaos.load, "HANG_GRACE_S", 0.0)
    async with client(lambda: httpx.Response(200, stream=Pieces(*pieces))) as http:
        load = Load(http, [(CASE, TEXT)], seed=1)
        outcome = await load.one()
    assert outcome.ending is ending
    assert detail in outcome.detail
    assert load.counts() == {one.value: int(one is ending) for one in Ending}


async def test_a_refusal_is_a_failure_with_its_code() -> None:
    body = orjson.dumps({"error": {"code": "overloaded"}})
    async with client(lambda: httpx.Response(429, content=body)) as http:
        load = Load(http, [(CASE, TEXT)], seed=1)
        await load.one()
        assert load.details(Ending.FAILED) == {"status 429 overloaded": 1}


async def test_clients_ask_until_they_are_told_to_stop() -> None:
    async with client(lambda: httpx.Response(200, stream=Pieces(event(TEXT), DONE))) as http:
        assert await undisturbed(http, CASE) == TEXT
        load = Load(http, [(CASE, TEXT)], seed=1)
        load.start(3)
        async with asyncio.timeout(20):
            while len(load.outcomes) < 20:  # noqa: ASYNC110 - what others do
                await asyncio.sleep(0)
            await load.stop()
    assert set(load.counts()) == {ending.value for ending in Ending}
    assert load.counts()["good"] == len(load.outcomes) == len(load.times_s())


def test_cases_are_the_same_for_a_seed_and_of_many_kinds() -> None:
    assert cases(5, 12) == cases(5, 12) != cases(6, 12)
    bodies = [case.body for case in cases(5, 12)]
    assert {body["temperature"] for body in bodies} == {0.0, 0.8}
    assert len({body["max_tokens"] for body in bodies}) > 1

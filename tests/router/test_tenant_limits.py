"""Limits of tenants: a token bucket that says honestly when, and counts that end at zero whatever happens."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry_rpc.common_pb2 import ErrorCode, SamplingParams
from router.generation import GenerationRequest, TokenBatch, TokenEnd
from router.tenant_limits import MeteredSource, TenantLimiter, TokenBucket
from router.tenants import Tenant, TenantDirectory
from runtime.clock import ManualClock
from runtime.errors import KvferryError
from tests.support.scripted_source import Finish, Script, ScriptedSource
from tests.support.sinks import EnoughTokens, pulled


def tenant(**limits: Any) -> Tenant:
    return Tenant("red", b"salt", **limits)


def refusal(limiter: TenantLimiter, of: Tenant, prompt: int, most: int, now: float) -> KvferryError:
    with pytest.raises(KvferryError) as caught:
        limiter.begin(of, prompt, most, now)
    assert caught.value.http_status == 429
    assert caught.value.retry_after_ms > 0
    return caught.value


def test_a_bucket_gives_a_minutes_tokens_at_once_and_then_the_rate() -> None:
    bucket = TokenBucket(600, 0.0)
    assert bucket.wait_s(600, 600, 0.0) == 0.0
    bucket.take(600)
    assert bucket.wait_s(100, 600, 0.0) == pytest.approx(10.0)
    assert bucket.wait_s(100, 600, 10.0) == 0.0
    assert not bucket.is_full(600, 59.0)
    assert bucket.is_full(600, 60.0)
    assert bucket.is_full(600, 1e6)


def test_more_than_a_minutes_tokens_may_be_taken_from_a_full_bucket_and_are_paid_for_later() -> None:
    bucket = TokenBucket(600, 0.0)
    assert bucket.wait_s(1800, 600, 0.0) == 0.0
    bucket.take(1800)
    assert bucket.wait_s(1, 600, 0.0) == pytest.approx(120.1)
    bucket.give_back(1200, 600, 0.0)
    assert bucket.wait_s(1, 600, 0.0) == pytest.approx(0.1)


@given(
    per_minute=st.integers(1, 10**6),
    steps=st.lists(st.tuples(st.floats(0, 100), st.integers(1, 10**6), st.floats(0, 1)), max_size=30),
)
@settings(deadline=None, max_examples=60)
def test_after_the_stated_wait_the_tokens_are_there_and_no_more_than_the_rate_is_ever_spent(
    per_minute: int, steps: list[tuple[float, int, float]]
) -> None:
    bucket, now, spent = TokenBucket(per_minute, 0.0), 0.0, 0.0
    for pause_s, tokens, kept in steps:
        now += pause_s
        wait_s = bucket.wait_s(tokens, per_minute, now)
        if wait_s > 0:
            assert bucket.wait_s(tokens, per_minute, now + 0.5 * wait_s) > 0
            now += wait_s * 1.0001 + 1e-6
            assert bucket.wait_s(tokens, per_minute, now) == 0.0
        # All taken before this came out of one full bucket, what has flowed in since, and one debt at most.
        assert spent <= per_minute + now * per_minute / 60 + 10**6
        bucket.take(tokens)
        unused = int(tokens * (1 - kept))
        bucket.give_back(unused, per_minute, now)
        spent += tokens - unused


def test_retry_after_is_the_time_after_which_the_same_request_is_let_in() -> None:
    limiter, red = TenantLimiter(), tenant(max_tokens_per_minute=600)
    limiter.begin(red, 100, 400, 0.0).end(500, 0.0)
    error = refusal(limiter, red, 200, 100, 0.0)
    assert error.retry_after_ms == 20_000
    refusal(limiter, red, 200, 100, 19.9)
    limiter.begin(red, 200, 100, 20.0)


def test_what_was_not_used_is_given_back_at_the_end() -> None:
    limiter, red = TenantLimiter(), tenant(max_tokens_per_minute=600)
    hold = limiter.begin(red, 100, 500, 0.0)
    refusal(limiter, red, 1, 1, 0.0)
    hold.end(150, 0.0)
    limiter.begin(red, 50, 400, 0.0)


def test_requests_at_a_time_and_waiting_tokens_have_bounds_of_their_own() -> None:
    limiter, red = TenantLimiter(), tenant(max_in_flight=3, max_queued_tokens=100)
    first, second = limiter.begin(red, 60, 1, 0.0), limiter.begin(red, 40, 1, 0.0)
    refusal(limiter, red, 1, 1, 0.0)
    first.answers()
    first.answers()
    assert limiter.queued_tokens("red") == 40
    third = limiter.begin(red, 60, 1, 0.0)
    second.answers()
    refusal(limiter, red, 1, 1, 0.0)
    for hold in (first, second, third):
        hold.end(0, 0.0)
        hold.end(0, 0.0)
    assert (limiter.in_flight("red"), limiter.queued_tokens("red")) == (0, 0)


def test_a_prompt_beyond_the_bound_is_taken_when_nothing_else_waits() -> None:
    limiter, red = TenantLimiter(), tenant(max_queued_tokens=10)
    limiter.begin(red, 1000, 1, 0.0)
    refusal(limiter, red, 1, 1, 0.0)


def test_one_tenants_limits_are_not_anothers() -> None:
    limiter = TenantLimiter()
    limiter.begin(tenant(max_in_flight=1), 1, 1, 0.0)
    limiter.begin(Tenant("blue", b"", max_in_flight=1), 1, 1, 0.0)
    refusal(limiter, tenant(max_in_flight=1), 1, 1, 0.0)


# ---- the source ----


class Door:
    """A metered source over a scripted one."""

    def __init__(self, script: Script, **limits: Any) -> None:
        self.clock = ManualClock(10.0)
        self.inner = ScriptedSource(script)
        self.refused: list[str] = []
        self.source = MeteredSource(
            self.inner, _Known(tenant(**limits)), self.clock, lambda error: self.refused.append(error.code_name)
        )

    def tokens(self, prompt: int = 10, most: int = 20) -> AsyncGenerator[TokenBatch | TokenEnd, None]:
        request = GenerationRequest("r", tuple(range(prompt)), SamplingParams(max_tokens=most), 1e9, tenant="red")
        return pulled(lambda sink: self.source.run(request, sink))

    async def read(self, **shape: int) -> list[TokenBatch | TokenEnd]:
        async with aclosing(self.tokens(**shape)) as tokens:
            return [item async for item in tokens]

    @property
    def held(self) -> tuple[int, int]:
        return self.source.limiter.in_flight("red"), self.source.limiter.queued_tokens("red")

    def left(self) -> int:
        """Tokens that may be had at this moment."""
        limiter, red, count = self.source.limiter, tenant(max_tokens_per_minute=600), 0
        while True:
            try:
                hold = limiter.begin(red, count + 1, 0, self.clock.now())
            except KvferryError:
                return count
            hold.end(0, self.clock.now())
            if count >= 600:
                return count
            count += 1


class _Known(TenantDirectory):
    def __init__(self, red: Tenant) -> None:
        super().__init__(None, b"", ManualClock())
        self._red = red

    def find(self, name: str) -> Tenant | None:
        return self._red if name == "red" else None


def five(_: Any) -> Any:
    return [[1, 2], [3, 4, 5], Finish()]


async def test_an_answer_costs_its_prompt_and_its_tokens() -> None:
    door = Door(five, max_tokens_per_minute=600)
    items = await door.read()
    assert isinstance(items[-1], TokenEnd)
    assert door.held == (0, 0)
    assert door.left() == 600 - 15


async def test_a_reader_that_has_enough_gets_its_end_and_pays_for_what_came() -> None:
    door = Door(lambda _: [[1, 2], asyncio.Event()], max_tokens_per_minute=600)
    async with aclosing(door.tokens()) as tokens:
        await anext(tokens)
        assert door.held == (1, 0)
        assert isinstance(await tokens.athrow(EnoughTokens()), TokenEnd)
    assert door.held == (0, 0)
    assert door.left() == 600 - 12


async def test_a_client_that_leaves_pays_for_its_prompt_and_what_came() -> None:
    silent = Door(lambda _: [asyncio.Event()], max_tokens_per_minute=600)
    reader = asyncio.create_task(_read(silent.tokens()))
    await silent.inner.wait_until(lambda source: bool(source.running))
    assert silent.held == (1, 10)
    await _cancelled(reader)
    assert silent.held == (0, 0)
    assert silent.left() == 600 - 10

    talking = Door(lambda _: [[1, 2], asyncio.Event()], max_tokens_per_minute=600)
    async with aclosing(talking.tokens()) as tokens:
        await anext(tokens)
    assert talking.held == (0, 0)
    assert talking.left() == 600 - 12


async def _read(tokens: AsyncGenerator[TokenBatch | TokenEnd, None]) -> None:
    async with aclosing(tokens):
        async for _ in tokens:
            pass


async def _cancelled(reader: "asyncio.Task[None]") -> None:
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)


@pytest.mark.parametrize(
    ("code", "paid"),
    [
        (ErrorCode.OVERLOADED, 0),
        (ErrorCode.UNAVAILABLE, 0),
        (ErrorCode.INTERNAL, 0),
        (ErrorCode.DEADLINE_EXCEEDED, 10),
    ],
)
async def test_what_failed_before_it_gave_anything_costs_nothing(code: "ErrorCode.ValueType", paid: int) -> None:
    door = Door(lambda _: [KvferryError(code, "no")], max_tokens_per_minute=600)
    with pytest.raises(KvferryError):
        await door.read()
    assert door.held == (0, 0)
    assert door.left() == 600 - paid


async def test_what_failed_half_way_costs_what_came() -> None:
    door = Door(lambda _: [[1, 2, 3], KvferryError(ErrorCode.UNAVAILABLE, "lost")], max_tokens_per_minute=600)
    with pytest.raises(KvferryError):
        await door.read()
    assert door.left() == 600 - 13


async def test_a_refused_request_is_not_begun_and_is_counted_once() -> None:
    door = Door(lambda _: [asyncio.Event()], max_in_flight=1)
    reader = asyncio.create_task(_read(door.tokens()))
    await door.inner.wait_until(lambda source: bool(source.running))
    with pytest.raises(KvferryError) as caught:
        await door.read()
    assert caught.value.code == ErrorCode.OVERLOADED
    assert (len(door.inner.requests), door.refused) == (1, ["overloaded"])
    await _cancelled(reader)
    assert door.held == (0, 0)


async def test_without_limits_nothing_stands_between() -> None:
    door = Door(five)
    assert len(await door.read()) == 3
    assert door.source.limiter._uses == {}

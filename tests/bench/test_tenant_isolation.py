"""What the benchmark of tenants' isolation calls shared, and what it refuses to measure, against a scripted cluster."""

import io
import json
import random
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import pytest

from bench.common.harness import BenchmarkError, Options, Report
from bench.tenant_isolation import OWNER, STRANGER, Asked, Round, Tenants, report_rounds, take_round
from router.generation import GenerationRequest
from tests.support.http_door import MODEL, Door, one_by_one
from tests.support.scripted_source import Finish, Step
from tests.support.served_door import served


class Cache:
    """A cluster that finds a whole prompt again, whoever asks."""

    def __init__(self, *, finds: bool = True, text: str = " the sea") -> None:
        self.finds = finds
        self.text = text
        self._seen: set[tuple[int, ...]] = set()

    def script(self, request: GenerationRequest) -> Iterable[Step]:
        found = self.finds and request.prompt_token_ids in self._seen
        self._seen.add(request.prompt_token_ids)
        return [*one_by_one(self.text), Finish(cached_tokens=len(request.prompt_token_ids) - 1 if found else 0)]


@asynccontextmanager
async def tenants_of(door: Door) -> AsyncIterator[Tenants]:
    async with served(door) as url, Tenants(url, MODEL, {OWNER: "a", STRANGER: "b"}) as tenants:
        yield tenants


async def test_a_cluster_that_shares_between_tenants_is_found_out() -> None:
    # The door has no keys, so both are the same tenant to it.
    async with tenants_of(Door(Cache().script)) as tenants:
        taken = await take_round(tenants, random.Random(3), num_words=20)
    assert taken.other.cached_tokens == taken.other.prompt_tokens - 1
    assert taken.cold.cached_tokens == 0
    assert taken.same.text == " the sea"
    assert min(taken.other.first_s, taken.cold.first_s, taken.same.first_s) > 0


async def test_without_any_reuse_there_is_nothing_to_measure() -> None:
    async with tenants_of(Door(Cache(finds=False).script)) as tenants:
        with pytest.raises(BenchmarkError, match="computed again"):
            await take_round(tenants, random.Random(3), num_words=20)


async def test_an_answer_that_depends_on_who_asks_is_an_error() -> None:
    texts = iter([" one", " two", " three", " four"])
    door = Door(lambda _: [*one_by_one(next(texts)), Finish(cached_tokens=1)])
    async with tenants_of(door) as tenants:
        with pytest.raises(BenchmarkError, match="one prompt"):
            await take_round(tenants, random.Random(3), num_words=20)


async def test_a_refusal_is_an_error() -> None:
    async with tenants_of(Door(Cache().script)) as tenants:
        with pytest.raises(BenchmarkError, match="status 400"):
            await tenants.ask(OWNER, "")


def test_both_times_are_held_against_the_prompt_that_nobody_asked() -> None:
    def asked(first_s: float, cached_tokens: int = 0) -> Asked:
        return Asked(first_s, 1234, cached_tokens, "")

    rounds = [Round(other=asked(0.2, 3), cold=asked(0.2), same=asked(0.05, 900)) for _ in range(5)]
    out = io.StringIO()
    with Report(Options(), out=out, err=io.StringIO()) as report:
        report_rounds(report, rounds, seed=0)
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [(line["metric"], line["variant"], line["value"], line["ratio"]) for line in lines] == [
        ("ttft_other_tenant", "1200+tokens", 200.0, 1.0),
        ("ttft_same_tenant", "1200+tokens", 50.0, 4.0),
        ("shared_tokens", "1200+tokens", 15, pytest.approx(1 / 16, rel=1e-5)),
    ]

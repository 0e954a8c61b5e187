"""When the client asks again: the decisions alone, and against routers that fail."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from kvferry.client import AsyncClient, Client, text_request
from kvferry.client.retry import ONE_TRY, RetryPolicy, Route
from kvferry_rpc import common_pb2, public_pb2, public_pb2_grpc
from kvferry_rpc.common_pb2 import ErrorCode
from runtime.clock import ManualClock
from runtime.errors import ERROR_METADATA_KEY, KvferryError

NOWHERE = KvferryError(ErrorCode.UNAVAILABLE, "lost")
FULL = KvferryError(ErrorCode.OVERLOADED, "full", retry_after_ms=700)
NEVER = [code for code in ErrorCode.values() if code not in (0, ErrorCode.UNAVAILABLE, ErrorCode.OVERLOADED)]


class AlwaysTheMost(random.Random):
    """The longest wait that could be drawn."""

    def uniform(self, a: float, b: float) -> float:
        return b


def policy(**changes: Any) -> RetryPolicy:
    return RetryPolicy(**{"clock": ManualClock(), "rng": AlwaysTheMost(), **changes})


def waits(route: Route, timeout_s: float, *failures: KvferryError) -> list[float]:
    """How long each failure is waited for; ends with the one that is given up on."""
    attempts, found = route.begin(timeout_s), []
    for failure in failures:
        try:
            wait_s = attempts.wait_after(failure, route.index)
        except KvferryError:
            break
        found.append(wait_s)
    return found


def test_waits_grow_and_end_with_the_last_try() -> None:
    assert waits(Route("a", policy()), 60, *[NOWHERE] * 9) == [0.1, 0.2, 0.4]
    assert waits(Route("a", policy(max_tries=6, longest_wait_s=0.3)), 60, *[NOWHERE] * 9) == [0.1, 0.2, 0.3, 0.3, 0.3]
    assert waits(Route("a", ONE_TRY), 60, NOWHERE) == []


def test_what_the_router_asks_for_is_waited_for_and_more() -> None:
    assert waits(Route("a", policy()), 60, FULL, FULL) == [pytest.approx(0.8), pytest.approx(0.9)]
    drawn = [waits(Route("a", policy(rng=random.Random(seed))), 60, FULL)[0] for seed in range(50)]
    assert all(0.7 <= wait <= 0.8 for wait in drawn)
    assert len(set(drawn)) == 50


def test_no_try_begins_behind_the_deadline() -> None:
    clock = ManualClock(5.0)
    route = Route("a", policy(clock=clock))
    assert waits(route, 0.75, FULL) == []
    attempts = route.begin(1.0)
    clock.advance(0.4)
    assert attempts.remaining_s == pytest.approx(0.6)
    with pytest.raises(KvferryError):
        attempts.wait_after(FULL, 0)
    clock.advance(5)
    assert attempts.remaining_s == 0


@pytest.mark.parametrize("code", NEVER)
def test_other_failures_are_never_tried_again(code: "ErrorCode.ValueType") -> None:
    assert waits(Route(["a", "b"], policy()), 60, KvferryError(code, "no", retry_after_ms=1)) == []


def test_where_one_router_does_not_answer_the_next_is_asked_at_once() -> None:
    route = Route(["a", "b", "c"], policy())
    attempts, asked = route.begin(60), []
    found = []
    for _ in range(3):
        asked.append(route.address)
        found.append(attempts.wait_after(NOWHERE, route.index))
    # All three have failed: only then is there a wait.
    assert (asked, found) == (["a", "b", "c"], [0, 0, 0.1])
    assert route.address == "a"


def test_every_address_is_tried_even_if_there_are_more_of_them_than_tries() -> None:
    assert waits(Route(list("abcdef"), policy(max_tries=2)), 60, *[NOWHERE] * 9) == [0] * 5


def test_a_router_that_is_full_is_asked_again_itself() -> None:
    route = Route(["a", "b"], policy())
    assert waits(route, 60, FULL) == [pytest.approx(0.8)]
    assert route.address == "a"


def test_of_two_calls_that_fail_at_one_router_only_the_first_moves_on() -> None:
    route = Route(["a", "b", "c"], policy())
    first, second = route.begin(60), route.begin(60)
    assert first.wait_after(NOWHERE, 0) == second.wait_after(NOWHERE, 0) == 0
    assert route.address == "b"


def test_a_client_needs_an_address() -> None:
    with pytest.raises(ValueError, match="address"):
        Client([])


class Flaky(public_pb2_grpc.KvferryServicer):
    """Fails as told, call by call, then answers. A failure in a list comes after a part of the answer."""

    def __init__(self) -> None:
        self.failures: list[KvferryError | list[KvferryError]] = []
        self.calls = 0
        self.deadlines: list[float] = []

    def Generate(self, request: Any, context: Any) -> Iterator[public_pb2.GenerateResponse]:
        failure = self._next(context)
        if failure is not None and not isinstance(failure, list):
            _abort(context, failure)
        yield public_pb2.GenerateResponse(request_id="r", text="one ")
        if isinstance(failure, list):
            _abort(context, failure[0])
        finish = public_pb2.Finish(reason=common_pb2.STOP, completion_tokens=1)
        yield public_pb2.GenerateResponse(request_id="r", finish=finish)

    def ListModels(self, request: Any, context: Any) -> public_pb2.ListModelsResponse:
        failure = self._next(context)
        if isinstance(failure, KvferryError):
            _abort(context, failure)
        return public_pb2.ListModelsResponse(models=[public_pb2.Model(id="m")])

    def _next(self, context: Any) -> KvferryError | list[KvferryError] | None:
        self.calls += 1
        self.deadlines.append(context.time_remaining())
        return self.failures.pop(0) if self.failures else None


def _abort(context: Any, failure: KvferryError) -> None:
    context.set_trailing_metadata(((ERROR_METADATA_KEY, failure.to_proto().SerializeToString()),))
    context.abort(failure.grpc_status, failure.message)


@contextmanager
def flaky() -> Iterator[tuple[Flaky, str]]:
    service, server = Flaky(), grpc.server(ThreadPoolExecutor(4))
    public_pb2_grpc.add_KvferryServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield service, f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


@pytest.fixture(scope="module")
def router() -> Iterator[tuple[Flaky, str]]:
    with flaky() as made:
        yield made


@pytest.fixture(scope="module")
def other_router() -> Iterator[tuple[Flaky, str]]:
    with flaky() as made:
        yield made


Ask = Callable[..., tuple[Any, list[float]]]


def _asked(*addresses: str, **options: Any) -> tuple[Any, list[float]]:
    """The answer of a completion, or its failure, and the waits."""
    slept: list[float] = []
    client = Client(addresses, retry=policy(), sleep=slept.append, **options)
    with client:
        try:
            return client.complete("x", model="m"), slept
        except KvferryError as error:
            return error, slept


def _asked_async(*addresses: str, **options: Any) -> tuple[Any, list[float]]:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async def ask() -> Any:
        async with AsyncClient(addresses, retry=policy(), sleep=sleep, **options) as client:
            try:
                return await client.complete("x", model="m")
            except KvferryError as error:
                return error

    return asyncio.run(ask()), slept


@pytest.mark.parametrize("ask", [_asked, _asked_async])
class TestBothClients:
    def test_safe_failures_are_tried_again(self, ask: Ask, router: tuple[Flaky, str]) -> None:
        service, address = router
        service.failures, service.calls = [FULL, NOWHERE], 0
        answer, slept = ask(address)
        assert (answer.text, service.calls) == ("one ", 3)
        assert slept == [pytest.approx(0.8), pytest.approx(0.2)]

    def test_tries_end(self, ask: Ask, router: tuple[Flaky, str]) -> None:
        service, address = router
        service.failures, service.calls = [NOWHERE] * 4, 0
        failure, slept = ask(address)
        assert (failure.code, service.calls, len(slept)) == (ErrorCode.UNAVAILABLE, 4, 3)

    def test_nothing_is_tried_again_once_a_part_has_come(self, ask: Ask, router: tuple[Flaky, str]) -> None:
        service, address = router
        service.failures, service.calls = [[NOWHERE]], 0
        failure, slept = ask(address)
        assert (failure.code, service.calls, slept) == (ErrorCode.UNAVAILABLE, 1, [])

    def test_a_refusal_is_final(self, ask: Ask, router: tuple[Flaky, str]) -> None:
        service, address = router
        service.failures, service.calls = [KvferryError(ErrorCode.INVALID_REQUEST, "n is wrong", field="n")], 0
        failure, slept = ask(address)
        assert (failure.code, failure.field, service.calls, slept) == (ErrorCode.INVALID_REQUEST, "n", 1, [])

    def test_the_next_router_is_asked(
        self, ask: Ask, router: tuple[Flaky, str], other_router: tuple[Flaky, str]
    ) -> None:
        (service, address), (other, other_address) = router, other_router
        service.failures, other.failures = [NOWHERE], []
        service.calls = other.calls = 0
        answer, slept = ask(address, other_address)
        assert (answer.text, service.calls, other.calls, slept) == ("one ", 1, 1, [0])

    def test_all_tries_share_one_deadline(self, ask: Ask, router: tuple[Flaky, str]) -> None:
        service, address = router
        service.failures, service.deadlines = [NOWHERE], []
        ask(address, timeout_s=50.0)
        # The clock of the policy stands still, so what is left does not shrink.
        assert [0 < left <= 50.5 for left in service.deadlines] == [True, True]


def test_queries_are_tried_again(router: tuple[Flaky, str]) -> None:
    service, address = router
    service.failures, service.calls = [NOWHERE, FULL], 0
    slept: list[float] = []
    with Client(address, retry=policy(), sleep=slept.append) as client:
        assert client.default_model() == client.default_model() == "m"
    assert (service.calls, len(slept)) == (3, 2)


def test_after_a_router_was_lost_calls_go_to_the_other_one(
    router: tuple[Flaky, str], other_router: tuple[Flaky, str]
) -> None:
    (service, address), (other, other_address) = router, other_router
    service.failures, other.failures = [NOWHERE], []
    service.calls = other.calls = 0
    with Client([address, other_address], retry=policy()) as client:
        for _ in range(3):
            client.models()
        assert client.address == other_address
    assert (service.calls, other.calls) == (1, 3)


async def test_leaving_an_answer_ends_the_call_without_another_try(router: tuple[Flaky, str]) -> None:
    service, address = router
    service.failures, service.calls = [], 0
    async with AsyncClient(address, retry=policy()) as client:
        parts: AsyncIterator[Any] = client.generate(text_request("m", "x"))
        async for _ in parts:
            break
        await parts.aclose()  # type: ignore[attr-defined]
    assert service.calls == 1

"""The queues before the workers, and the bounds on trying again."""

import asyncio
import random

import pytest

from kvferry_rpc.common_pb2 import ErrorCode
from router.admission import Admission, RoomQueue
from router.retry import RetryBudget, backoff_s, is_retriable
from runtime.clock import ManualClock
from runtime.errors import KvferryError


async def _hold(admission: Admission, order: list[int], number: int, release: asyncio.Event) -> None:
    async with admission.place(10, 5.0):
        order.append(number)
        await release.wait()


async def test_places_are_given_in_order_of_arrival() -> None:
    admission, order, release = Admission(2, 10, 1000), list[int](), asyncio.Event()
    tasks = [asyncio.create_task(_hold(admission, order, number, release)) for number in range(6)]
    await asyncio.sleep(0)
    assert order == [0, 1]
    assert (admission.in_flight, admission.queued) == (2, 4)
    release.set()
    await asyncio.gather(*tasks)
    assert order == list(range(6))
    assert (admission.in_flight, admission.queued) == (0, 0)


async def test_a_place_handed_to_a_request_that_is_cancelled_in_that_moment_goes_to_the_next() -> None:
    admission, order, release = Admission(1, 10, 1000), list[int](), asyncio.Event()
    first = asyncio.create_task(_hold(admission, order, 0, release))
    await asyncio.sleep(0)
    doomed = asyncio.create_task(_hold(admission, order, 1, release))
    last = asyncio.create_task(_hold(admission, order, 2, release))
    await asyncio.sleep(0)
    release.set()
    await asyncio.wait({first})  # Its place was given to `doomed`, which has not run yet.
    doomed.cancel()
    await asyncio.gather(doomed, last, return_exceptions=True)
    assert order[-1] == 2
    assert admission.in_flight == 0


async def test_idle_is_told_when_the_last_request_leaves() -> None:
    admission, release = Admission(1, 10, 1000), asyncio.Event()
    await asyncio.wait_for(admission.wait_idle(), 1)
    tasks = [asyncio.create_task(_hold(admission, [], number, release)) for number in range(3)]
    await asyncio.sleep(0)
    idle = asyncio.create_task(admission.wait_idle())
    await asyncio.sleep(0)
    assert not idle.done()
    release.set()
    await asyncio.gather(idle, *tasks)


@pytest.mark.parametrize("seed", range(5))
async def test_under_random_cancels_no_place_is_lost_or_given_twice(seed: int) -> None:
    rng, admission, running = random.Random(seed), Admission(3, 50, 10_000), 0

    async def client() -> None:
        nonlocal running
        async with admission.place(10, rng.choice([5.0, 0.005])):
            running += 1
            assert running <= 3
            try:
                await asyncio.sleep(rng.random() * 0.01)
            finally:
                running -= 1

    tasks = [asyncio.create_task(client()) for _ in range(50)]
    for task in tasks:
        if rng.random() < 0.4:
            await asyncio.sleep(rng.random() * 0.005)
            task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert not [result for result in results if isinstance(result, AssertionError)]
    assert (admission.in_flight, admission.queued) == (0, 0)
    async with admission.place(10_000, 1.0):
        pass


async def test_each_sign_of_room_wakes_one_and_who_came_first_stays_first() -> None:
    room, woken = RoomQueue(), list[str]()

    async def wait(name: str, arrived_at: float) -> None:
        assert await room.wait(5.0, arrived_at)
        woken.append(name)

    tasks = [asyncio.create_task(wait(name, at)) for name, at in [("b", 2.0), ("c", 3.0), ("a", 1.0), ("b2", 2.0)]]
    await asyncio.sleep(0)
    room.wake()
    await asyncio.sleep(0)
    assert woken == ["a"]
    tasks.append(asyncio.create_task(wait("a", 1.0)))  # It tried in vain.
    await asyncio.sleep(0)
    assert len(room) == 4
    room.wake()
    await asyncio.sleep(0)
    assert woken == ["a", "a"]
    room.wake_all()
    await asyncio.gather(*tasks)
    assert woken == ["a", "a", "b", "b2", "c"]


async def test_a_turn_that_comes_to_a_cancelled_request_goes_to_the_next() -> None:
    room = RoomQueue()
    first, second = (asyncio.create_task(room.wait(5.0, at)) for at in (1.0, 2.0))
    await asyncio.sleep(0)
    room.wake()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert await second
    assert len(room) == 0


async def test_waiting_for_room_gives_up_after_its_time() -> None:
    room = RoomQueue()
    assert not await room.wait(0.01, 0.0)
    assert len(room) == 0


def test_the_retry_budget_is_a_tenth_of_the_requests_and_a_trickle() -> None:
    # H032
    clock = ManualClock()
    budget = RetryBudget(5, clock)
    assert [budget.withdraw() for _ in range(6)] == [True] * 5 + [False]
    for _ in range(19):
        budget.deposit()
    assert [budget.withdraw() for _ in range(2)] == [True, False]
    clock.advance(2.0)
    assert [budget.withdraw() for _ in range(4)] == [True, True, False, False]
    clock.advance(10_000)
    assert sum(budget.withdraw() for _ in range(100)) == 5


def test_backoff_grows_and_is_jittered() -> None:
    rng = random.Random(3)
    delays = [[backoff_s(failures, rng) for _ in range(200)] for failures in (1, 2, 3)]
    means = [sum(each) / len(each) for each in delays]
    assert means[0] * 1.5 < means[1] < means[2] / 1.5
    assert all(len(set(each)) > 150 for each in delays)
    assert max(backoff_s(50, rng) for _ in range(200)) <= 1.5


def test_only_failures_that_another_worker_may_not_have_are_tried_again() -> None:
    retried = {code for code in ErrorCode.values() if code and is_retriable(KvferryError(code, ""))}
    assert retried == {ErrorCode.UNAVAILABLE, ErrorCode.HANDOFF_FAILED}

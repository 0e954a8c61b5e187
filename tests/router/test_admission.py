"""Places and the queue before them: turns, room, what is refused at once, and that nothing is left behind."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kvferry_rpc.common_pb2 import ErrorCode
from router.admission.admission import Admission, AdmissionLimits, Entry
from router.admission.kv_ledger import Expectation
from router.admission.shedding import ShedReason
from router.admission.slo import BATCH, INTERACTIVE
from runtime.clock import SystemClock
from runtime.errors import KvferryError
from tests.support.admission_desk import Desk, Rooms, settle


async def _refusal(awaitable: Awaitable[Any]) -> KvferryError:
    with pytest.raises(KvferryError) as caught:
        await awaitable
    return caught.value


async def test_places_are_given_in_order_of_arrival() -> None:
    desk = Desk()
    tasks = [desk.come(str(number)) for number in range(6)]
    await settle()
    assert desk.order == ["0", "1"]
    assert (desk.admission.in_flight, desk.admission.queued, desk.admission.queued_tokens) == (2, 4, 40)
    await desk.end(*map(str, range(6)))
    await asyncio.gather(*tasks)
    assert desk.order == list("012345")
    assert desk.at_rest()


async def test_a_small_tenant_and_a_high_priority_go_before_the_backlog() -> None:
    desk = Desk(max_in_flight=1)
    tasks = [desk.come("running"), *(desk.come(f"large-{number}", tenant="large", tokens=5000) for number in range(5))]
    tasks += [desk.come("small", tenant="small"), desk.come("urgent", tenant="large", priority=100)]
    await settle()
    await desk.end("running", *(f"large-{number}" for number in range(5)), "small", "urgent")
    await asyncio.gather(*tasks)
    assert desk.order[1:3] == ["urgent", "small"] or desk.order[1:3] == ["small", "urgent"]
    assert desk.at_rest()


async def test_a_place_handed_to_a_request_that_is_cancelled_in_that_moment_goes_to_the_next() -> None:
    desk = Desk(max_in_flight=1)
    async with desk.admission.seat(desk.entry()):
        doomed, last = desk.come("doomed"), desk.come("last")
        await settle()
        desk.release["last"].set()
    # The place was given to `doomed`, which has not run yet.
    assert (desk.admission.in_flight, desk.admission.queued) == (1, 1)
    doomed.cancel()
    await asyncio.gather(doomed, last, return_exceptions=True)
    assert desk.order == ["last"]
    assert desk.at_rest()


async def test_a_request_refused_while_the_last_other_one_leaves_tries_again_at_once() -> None:
    desk = Desk()
    last = desk.come("last")
    await settle()
    async with desk.admission.seat(desk.entry()) as seat:
        # The worker, full, refuses it; before that is heard here, the other one leaves.
        await desk.end("last")
        await asyncio.wait_for(desk.admission.wait_for_room(seat, begun=False), 5)
        assert seat.has_place
        # Refused once more, with nobody else there: only a word from a worker can help.
        waiting = asyncio.create_task(desk.admission.wait_for_room(seat, begun=False))
        await settle()
        assert not waiting.done()
        desk.admission.room_changed()
        await asyncio.wait_for(waiting, 5)
    await last
    assert desk.at_rest()


async def test_idle_is_told_when_the_last_request_leaves() -> None:
    desk = Desk(max_in_flight=1)
    await asyncio.wait_for(desk.admission.wait_idle(), 1)
    tasks = [desk.come(str(number)) for number in range(3)]
    await settle()
    idle = asyncio.create_task(desk.admission.wait_idle())
    await desk.end("0", "1")
    assert not idle.done()
    await desk.end("2")
    await asyncio.gather(idle, *tasks)


@pytest.mark.parametrize("seed", range(5))
async def test_under_random_cancels_refusals_and_ends_no_place_is_lost_or_given_twice(seed: int) -> None:
    # H019
    rng, running, rooms = random.Random(seed), 0, Rooms(5)
    admission = Admission(AdmissionLimits(3, 50, 10_000), rooms, SystemClock())

    async def client(number: int) -> None:
        nonlocal running
        deadline = SystemClock().now() + rng.choice([5.0, 0.005])
        expectation = Expectation(10, 0, 10, lambda worker_id: 0)
        entry = Entry(rng.choice("ab"), rng.randrange(3), deadline, number, expectation)
        async with admission.seat(entry) as seat:
            begun = False
            for _ in range(rng.randrange(3)):
                if rng.random() < 0.3:
                    await admission.wait_for_room(seat, begun=begun)
                else:
                    admission.taken(seat)
                    begun = True
                    await asyncio.sleep(0)
            running += 1
            assert running <= 3
            try:
                await asyncio.sleep(rng.random() * 0.003)
            finally:
                running -= 1

    async def reports() -> None:
        while True:
            await asyncio.sleep(0.001)
            admission.room_changed()

    reporting = asyncio.create_task(reports())
    tasks = [asyncio.create_task(client(number)) for number in range(50)]
    for task in tasks:
        if rng.random() < 0.3:
            await asyncio.sleep(rng.random() * 0.003)
            task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    reporting.cancel()
    assert not [result for result in results if isinstance(result, AssertionError)]
    assert (admission.in_flight, admission.queued, admission.queued_tokens, admission.resuming) == (0, 0, 0, 0)
    assert not rooms.inside
    await admission.wait_idle()


# ---- room on the workers ----


async def test_a_request_goes_only_when_a_worker_will_probably_hold_it() -> None:
    desk = Desk(Rooms(1), max_in_flight=10)
    tasks = [desk.come(str(number)) for number in range(3)]
    await settle()
    assert (desk.order, desk.admission.in_flight) == (["0"], 1)
    await desk.end("0")
    assert desk.order == ["0", "1"]
    desk.rooms.room = 5
    desk.admission.room_changed()
    await settle()
    assert desk.order == ["0", "1", "2"]
    await desk.end("1", "2")
    await asyncio.gather(*tasks)
    assert desk.at_rest()


async def test_when_nothing_runs_the_first_is_let_through_whatever_the_forecast_says() -> None:
    desk = Desk(Rooms(0), max_in_flight=10)
    tasks = [desk.come(str(number)) for number in range(3)]
    for name in "012":
        await settle()
        assert desk.order[-1] == name
        await desk.end(name)
    await asyncio.gather(*tasks)
    assert desk.at_rest()


class _Probes:
    """Requests that find the cluster full each time they try, until it has room."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.tries: list[str] = []
        self.has_room = False

    async def __call__(self, name: str, *, begun: bool = False, **entry: Any) -> None:
        async with self.desk.admission.seat(self.desk.entry(**entry)) as seat:
            self.tries.append(name)
            while not self.has_room:
                await self.desk.admission.wait_for_room(seat, begun=begun)
                self.tries.append(name)
            self.desk.admission.taken(seat)


async def test_a_full_cluster_sees_one_probe_at_each_sign_of_room_and_who_came_first_stays_first() -> None:
    desk = Desk(max_in_flight=10)
    probe = _Probes(desk)
    tasks = [asyncio.create_task(probe(name)) for name in "abc"]
    tasks.append(asyncio.create_task(probe("d")))
    await settle()
    assert (probe.tries, desk.admission.in_flight, desk.admission.queued) == (["a"], 0, 4)
    for _ in range(2):
        desk.admission.room_changed()
        await settle()
    assert probe.tries == ["a", "a", "a"]
    probe.has_room = True
    desk.admission.room_changed()
    await asyncio.gather(*tasks)
    # Each that is taken lets the next one try.
    assert probe.tries[3:] == ["a", "b", "c", "d"]
    assert desk.at_rest()


async def test_waiting_for_room_is_fair_and_by_priority_like_waiting_for_a_place() -> None:
    desk = Desk(max_in_flight=10)
    probe = _Probes(desk)
    tasks = [asyncio.create_task(probe(f"large-{n}", tenant="large", tokens=3000)) for n in range(8)]
    await settle()
    tasks += [asyncio.create_task(probe("small", tenant="small"))]
    tasks += [asyncio.create_task(probe("urgent", tenant="large", priority=50))]
    await settle()
    del probe.tries[:]
    probe.has_room = True
    desk.admission.room_changed()
    await asyncio.gather(*tasks)
    assert set(probe.tries[:3]) >= {"small", "urgent"}
    assert desk.at_rest()


async def test_room_that_a_stream_needs_goes_to_it_before_the_queue() -> None:
    desk = Desk(max_in_flight=1)
    order: list[str] = []

    async def stream() -> None:
        async with desk.admission.seat(desk.entry(priority=-100)) as seat:
            desk.admission.taken(seat)
            await asyncio.sleep(0)
            await desk.admission.wait_for_room(seat, begun=True)
            order.append("stream")
            desk.admission.taken(seat)

    tasks = [asyncio.create_task(stream()), desk.come("new", priority=100)]
    await settle()
    assert (desk.admission.in_flight, desk.admission.resuming, desk.admission.queued) == (1, 1, 1)
    desk.release["new"].set()
    desk.admission.room_changed()
    await asyncio.gather(*tasks)
    assert order + desk.order == ["stream", "new"]
    assert desk.at_rest()


async def test_a_turn_that_comes_to_a_cancelled_request_goes_to_the_next() -> None:
    desk = Desk(max_in_flight=10)
    probe = _Probes(desk)
    first, second = (asyncio.create_task(probe(name)) for name in "ab")
    await settle()
    probe.has_room = True
    desk.admission.room_changed()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await second
    assert desk.at_rest()


async def test_when_nobody_is_left_to_wait_for_all_that_wait_are_told() -> None:
    desk = Desk(max_in_flight=1)
    running, *waiting = [desk.come(str(number)) for number in range(4)]
    await settle()
    desk.admission.fail_waiting(lambda: KvferryError(ErrorCode.UNAVAILABLE, "gone"))
    for task in waiting:
        assert (await _refusal(task)).code == ErrorCode.UNAVAILABLE
    await desk.end("0")
    await running
    assert desk.at_rest()


# ---- refused at once, or late ----


async def test_beyond_the_bounds_a_request_is_refused_at_once() -> None:
    # H006
    desk = Desk(max_in_flight=1, max_queued=3, max_queued_tokens=50)
    tasks = [desk.come(str(number)) for number in range(4)]
    await settle()
    failure = await _refusal(desk.come("more"))
    assert (failure.code, desk.shed) == (ErrorCode.OVERLOADED, [("queue_full", "none")])
    assert failure.retry_after_ms >= 1000
    tasks.pop().cancel()
    await settle()
    assert (await _refusal(desk.come("long", tokens=31, slo=BATCH))).code == ErrorCode.OVERLOADED
    assert desk.shed[1:] == [("queue_tokens", "batch")]
    assert desk.admission.queued == 2
    await desk.end(*"0123")
    await asyncio.gather(*tasks)
    assert desk.at_rest()


async def _with_a_rate(desk: Desk, tokens_per_s: int) -> Callable[[], Awaitable[None]]:
    """Let the queue stand for ten seconds and empty at that rate, in one request a second. Returns how to end it."""
    tasks = [desk.come("first", tokens=tokens_per_s)]
    await settle()
    tasks += [desk.come(f"rate-{number}", tokens=tokens_per_s, timeout_s=1e6) for number in range(12)]
    await settle()
    names = ["first", *(f"rate-{number}" for number in range(12))]
    for name in names[:10]:
        desk.clock.advance(1.0)
        await desk.end(name)

    async def end() -> None:
        await desk.end(*names)
        await asyncio.gather(*tasks)

    return end


async def test_a_request_whose_deadline_the_queue_will_clearly_not_meet_is_refused_at_once() -> None:
    desk = Desk(max_in_flight=1, max_queued_tokens=10**9)
    end = await _with_a_rate(desk, 1000)
    backlog = desk.come("backlog", tokens=30_000, timeout_s=1e6)
    await settle()
    failure = await _refusal(desk.come("late", timeout_s=10.0))
    assert (failure.code, desk.shed) == (ErrorCode.OVERLOADED, [("deadline", "none")])
    assert 20_000 <= failure.retry_after_ms <= 40_000
    patient = desk.come("patient", timeout_s=1000.0)  # Not so this one,
    other = desk.come("other tenant", tenant="small", timeout_s=10.0)  # nor this one, which is due its turn soon.
    await settle()
    assert not patient.done()
    assert not other.done()
    desk.release["backlog"].set()
    desk.release["patient"].set()
    desk.release["other tenant"].set()
    await end()
    await asyncio.gather(backlog, patient, other)
    assert desk.at_rest()


async def test_the_class_decides_which_deadline_counts() -> None:
    desk = Desk(max_in_flight=1, max_queued_tokens=10**9)
    end = await _with_a_rate(desk, 1000)
    backlog = desk.come("backlog", tokens=30_000, timeout_s=1e6)
    await settle()
    failure = await _refusal(desk.come("interactive", timeout_s=1e6, slo=INTERACTIVE))
    assert (failure.code, desk.shed) == (ErrorCode.OVERLOADED, [("ttft", "interactive")])
    batch = desk.come("batch", timeout_s=1e6, slo=BATCH)
    await settle()
    assert not batch.done()
    assert desk.admission.depths() == {"none": 3, "batch": 1}
    desk.release["backlog"].set()
    desk.release["batch"].set()
    await end()
    await asyncio.gather(backlog, batch)
    assert desk.at_rest()


async def test_a_deadline_that_passes_in_the_queue_is_told() -> None:
    admission = Admission(AdmissionLimits(1, 10, 1000), Rooms(), SystemClock())
    now = SystemClock().now()
    one, other = (Expectation(10, 0, 10, lambda worker_id: 0) for _ in range(2))
    async with admission.seat(Entry("", 0, now + 60, now, one)):
        failure = await _refusal(admission.seat(Entry("", 0, now + 0.02, now, other)).__aenter__())
        assert failure.code == ErrorCode.DEADLINE_EXCEEDED
        assert admission.queued == 0
    await admission.wait_idle()


async def test_waiting_for_room_ends_when_patience_does_and_says_when_to_come_back() -> None:
    shed: list[ShedReason] = []
    limits = AdmissionLimits(10, 10, 1000, max_room_wait_s=0.02)
    admission = Admission(limits, Rooms(), SystemClock(), lambda why, slo: shed.append(why))
    now = SystemClock().now()
    entry = Entry("", 0, now + 60, now, Expectation(10, 0, 10, lambda worker_id: 0))

    async def wait() -> None:
        async with admission.seat(entry) as seat:
            await admission.wait_for_room(seat, begun=False)

    failure = await _refusal(wait())
    assert (failure.code, shed) == (ErrorCode.OVERLOADED, [ShedReason.NO_ROOM])
    assert failure.retry_after_ms >= 1000
    assert (admission.in_flight, admission.queued) == (0, 0)

"""How a request ends before its time or waits for its turn: cancels, deadlines, the queue, and room on the workers."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from kvferry_rpc.common_pb2 import ErrorCode, FinishReason
from router.dispatch.dispatch_limits import DispatchLimits
from router.generation import TokenEnd
from tests.support.fake_workers import CHECKSUM, FakeDecode, FakePrefill, error
from tests.support.router_cluster import ANSWER, RouterCluster, failure_of, first_tokens, router_cluster
from tests.support.sinks import EnoughTokens

# ---- the caller goes away, or time is up ----

States = Callable[[RouterCluster, FakeDecode, FakePrefill], Awaitable[None]]


async def _waiting_for_ticket(cluster: RouterCluster, decode: FakeDecode, prefill: FakePrefill) -> None:
    await decode.until(lambda: decode.live)


async def _prefilling(cluster: RouterCluster, decode: FakeDecode, prefill: FakePrefill) -> None:
    await prefill.until(lambda: prefill.running)


async def _decoding(cluster: RouterCluster, decode: FakeDecode, prefill: FakePrefill) -> None:
    await prefill.until(lambda: prefill.requests and not prefill.running)


def begun(decode: FakeDecode) -> list[tuple[str, int]]:
    return [(admit.request_id, admit.attempt) for admit in decode.admitted]


def _hold(state: States, decode: FakeDecode, prefill: FakePrefill) -> None:
    """Make requests stop in that state."""
    if state is _waiting_for_ticket:
        decode.ticket_gate = asyncio.Event()
    elif state is _prefilling:
        prefill.compute_gate = asyncio.Event()
    else:
        decode.pause_after = 3


ALL_STATES = pytest.mark.parametrize("state", [_waiting_for_ticket, _prefilling, _decoding])


@ALL_STATES
async def test_a_cancelled_task_cancels_on_both_workers(state: States) -> None:
    # H055, H048, H012
    async with router_cluster() as cluster:
        decode, prefill = await cluster.decode(), await cluster.prefill()
        _hold(state, decode, prefill)
        reading = asyncio.create_task(cluster.run(cluster.request()))
        await state(cluster, decode, prefill)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert set(cluster.in_flight().values()) == {0}
        await decode.until(lambda: decode.cancelled == [("request-1", 1)] and not decode.live)
        await prefill.until(lambda: not prefill.running)
        assert prefill.cancelled == (["request-1"] if state is _prefilling else [])
        assert cluster.counter("kvferry_requests_ended_total", outcome="cancelled") == 1
        assert cluster.dispatcher.in_flight == 0


@ALL_STATES
async def test_the_deadline_ends_a_request_in_any_state_on_both_workers(state: States) -> None:
    async with router_cluster() as cluster:
        decode, prefill = await cluster.decode(), await cluster.prefill()
        _hold(state, decode, prefill)  # It cannot end by itself, so nothing hangs on how far it gets in its time.
        failure = await failure_of(cluster.run(cluster.request(timeout_s=0.3)))
        assert failure.code == ErrorCode.DEADLINE_EXCEEDED
        await decode.until(lambda: decode.cancelled == begun(decode) and not decode.live)
        await prefill.until(lambda: not prefill.running)


async def test_closing_the_iterator_cancels_on_the_worker() -> None:
    async with router_cluster() as cluster:
        decode, prefill = await cluster.decode(), await cluster.prefill()
        decode.pause_after = 3
        stream = cluster.stream(cluster.request())
        await first_tokens(stream, 2)
        await stream.aclose()
        await decode.until(lambda: decode.cancelled == [("request-1", 1)])
        await prefill.until(lambda: not prefill.running)
        assert cluster.counter("kvferry_requests_ended_total", outcome="cancelled") == 1


async def test_a_ticket_that_comes_after_the_cancel_starts_no_prefill() -> None:
    async with router_cluster() as cluster:
        decode, prefill = await cluster.decode(), await cluster.prefill()
        decode.ticket_gate = asyncio.Event()
        reading = asyncio.create_task(cluster.run(cluster.request()))
        await decode.until(lambda: decode.live)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        decode.ticket_gate.set()
        await decode.until(lambda: decode.cancelled)
        decode.ticket_gate = None
        assert (await cluster.run(cluster.request())).tokens == ANSWER
        assert [sent.request_id for sent in prefill.requests] == ["request-2"]


async def test_a_second_cancellation_does_not_lose_the_first() -> None:
    async with router_cluster() as cluster:
        decode, prefill = await cluster.decode(), await cluster.prefill()
        prefill.compute_gate = asyncio.Event()
        reading = asyncio.create_task(cluster.run(cluster.request()))
        await prefill.until(lambda: prefill.running)
        reading.cancel()
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await decode.until(lambda: decode.cancelled == [("request-1", 1)])
        await prefill.until(lambda: prefill.cancelled == ["request-1"])


async def test_a_deadline_that_has_passed_already_starts_nothing() -> None:
    # H010
    async with router_cluster() as cluster:
        decode = await cluster.decode()
        failure = await failure_of(cluster.run(cluster.request(timeout_s=-1)))
        assert failure.code == ErrorCode.DEADLINE_EXCEEDED
        assert decode.admitted == []


async def test_a_reader_that_has_enough_gets_its_end_and_counts_as_finished() -> None:
    async with router_cluster() as cluster:
        decode, prefill = await cluster.decode(), await cluster.prefill()
        prefill.cached_tokens = 16
        decode.pause_after = 3
        stream = cluster.stream(cluster.request())
        await first_tokens(stream, 3)
        await cluster.until(lambda: cluster.in_flight()["prefill-0"] == 0)
        end = await stream.athrow(EnoughTokens())
        assert isinstance(end, TokenEnd)
        assert end.reason == FinishReason.STOP
        assert (end.completion_tokens, end.cached_tokens) == (3, 16)
        assert end.receipt.transport == "tcp"
        assert (end.receipt.checksum_verified, end.receipt.checksum, end.receipt.commit_ms) == (True, CHECKSUM, 1)
        assert end.receipt.decode_ms > 0
        await stream.aclose()
        await decode.until(lambda: decode.cancelled == [("request-1", 1)])
        assert cluster.counter("kvferry_requests_ended_total", outcome="ok") == 1


async def test_closing_a_stream_after_its_end_is_no_cancellation() -> None:
    async with router_cluster() as cluster:
        await cluster.decode()
        stream = cluster.stream(cluster.request())
        async for item in stream:
            if isinstance(item, TokenEnd):
                break
        await stream.aclose()
        assert cluster.counter("kvferry_requests_ended_total", outcome="ok") == 1
        assert cluster.counter("kvferry_requests_ended_total", outcome="cancelled") == 0


# ---- limits ----


async def test_beyond_the_queue_requests_are_refused_at_once_with_a_time_to_come_back() -> None:
    # H006
    async with router_cluster(DispatchLimits(max_in_flight=2, max_queued=3)) as cluster:
        decode = await cluster.decode()
        decode.pause_after = 0
        running = [asyncio.create_task(cluster.run(cluster.request())) for _ in range(5)]
        await decode.until(lambda: len(decode.live) == 2)
        assert (cluster.dispatcher.in_flight, cluster.dispatcher.queued) == (5, 3)
        failure = await failure_of(cluster.run(cluster.request()))
        assert failure.code == ErrorCode.OVERLOADED
        assert failure.retry_after_ms > 0
        assert cluster.counter("kvferry_requests_ended_total", outcome="rejected") == 1
        assert cluster.counter("kvferry_requests_queued") == 3
        decode.resume.set()
        assert [answer.tokens for answer in await asyncio.gather(*running)] == [ANSWER] * 5


async def test_the_queue_is_bounded_in_tokens_too() -> None:
    limits = DispatchLimits(max_in_flight=1, max_queued=100, max_queued_tokens=100)
    async with router_cluster(limits) as cluster:
        decode = await cluster.decode()
        decode.pause_after = 0
        running = [asyncio.create_task(cluster.run(cluster.request())) for _ in range(3)]
        await decode.until(lambda: decode.live)
        assert (await failure_of(cluster.run(cluster.request()))).code == ErrorCode.OVERLOADED
        decode.resume.set()
        await asyncio.gather(*running)
        assert (await cluster.run(cluster.request())).tokens == ANSWER


async def test_nobody_works_through_a_queue_of_dead_requests() -> None:
    # H010
    async with router_cluster(DispatchLimits(max_in_flight=1, max_queued=200)) as cluster:
        decode = await cluster.decode()
        decode.pause_after = 0
        running = asyncio.create_task(cluster.run(cluster.request()))
        await decode.until(lambda: decode.live)
        dead = [asyncio.create_task(cluster.run(cluster.request())) for _ in range(150)]
        await asyncio.sleep(0)
        living = [asyncio.create_task(cluster.run(cluster.request())) for _ in range(5)]
        await asyncio.sleep(0)
        for task in dead:
            task.cancel()
        await asyncio.gather(*dead, return_exceptions=True)
        assert cluster.dispatcher.queued == 5
        decode.resume.set()
        await asyncio.gather(running, *living)
        assert len(decode.admitted) == 6


async def test_a_deadline_in_the_queue_is_told_and_leaves_the_queue() -> None:
    async with router_cluster(DispatchLimits(max_in_flight=1)) as cluster:
        decode = await cluster.decode()
        decode.pause_after = 0
        running = asyncio.create_task(cluster.run(cluster.request()))
        await decode.until(lambda: decode.live)
        failure = await failure_of(cluster.run(cluster.request(timeout_s=0.1)))
        assert failure.code == ErrorCode.DEADLINE_EXCEEDED
        assert cluster.dispatcher.queued == 0
        decode.resume.set()
        await running
        assert len(decode.admitted) == 1


# ---- no room on the workers ----


async def test_requests_wait_in_line_for_room_and_do_not_hammer_a_full_worker() -> None:
    async with router_cluster() as cluster:
        decode = await cluster.decode()
        await cluster.prefill()
        decode.room = 2
        answers = await asyncio.gather(*(cluster.run(cluster.request()) for _ in range(30)))
        assert [answer.tokens for answer in answers] == [ANSWER] * 30
        # The first burst meets a full worker before it has said so; later ones probe one at a time.
        assert len(decode.admitted) <= 30 + 28 + 60
        assert cluster.dispatcher.queued == 0


async def test_a_load_report_lets_one_waiting_request_try() -> None:
    async with router_cluster() as cluster:
        decode = await cluster.decode()
        await cluster.prefill()
        decode.room = 0
        waiting = [asyncio.create_task(cluster.run(cluster.request())) for _ in range(5)]
        await cluster.until(lambda: cluster.dispatcher.queued == 5)
        assert len(decode.admitted) == 5
        cluster.report("decode-0")
        await decode.until(lambda: len(decode.admitted) == 6)
        await cluster.until(lambda: cluster.dispatcher.queued == 5)
        assert len(decode.admitted) == 6
        decode.room = None
        cluster.report("decode-0")
        await asyncio.gather(*waiting)


async def test_another_worker_with_room_is_used_at_once() -> None:
    async with router_cluster() as cluster:
        full, free = await cluster.decode("decode-0"), await cluster.decode("decode-1")
        await cluster.prefill()
        full.room = 0
        answers = await asyncio.gather(*(cluster.run(cluster.request()) for _ in range(10)))
        assert [answer.tokens for answer in answers] == [ANSWER] * 10
        assert {answer.end.receipt.decode_worker for answer in answers} == {"decode-1"}
        assert len(free.admitted) == 10


async def test_waiting_for_room_ends_when_patience_or_the_worker_does() -> None:
    async with router_cluster(DispatchLimits(max_room_wait_s=0.2)) as cluster:
        decode = await cluster.decode()
        decode.room = 0
        failure = await failure_of(cluster.run(cluster.request()))
        assert failure.code == ErrorCode.OVERLOADED
        assert failure.retry_after_ms > 0
    async with router_cluster() as cluster:
        decode = await cluster.decode()
        decode.room = 0
        waiting = [asyncio.create_task(cluster.run(cluster.request())) for _ in range(3)]
        await cluster.until(lambda: cluster.dispatcher.queued == 3)
        await cluster.kill("decode-0")
        for task in waiting:
            assert (await failure_of(task)).code == ErrorCode.UNAVAILABLE


async def test_a_refusal_that_is_read_only_after_its_worker_has_gone_waits_for_nobody() -> None:
    async with router_cluster() as cluster:
        decode = await cluster.decode()
        decode.room = 0
        session = cluster.links.decode_session("decode-0")
        assert session is not None
        reading = asyncio.create_task(cluster.run(cluster.request()))
        await decode.until(lambda: decode.admitted)
        while session.requests_in_flight:  # noqa: ASYNC110 - until the refusal is in the inbox, and not yet read
            await asyncio.sleep(0)
        cluster.registry.detach(cluster.attached["decode-0"])
        assert (await failure_of(reading)).code == ErrorCode.UNAVAILABLE


async def test_a_full_prefill_worker_is_waited_for_without_holding_decode_blocks() -> None:
    async with router_cluster() as cluster:
        decode, prefill = await cluster.decode(), await cluster.prefill()
        prefill.failures = [error(ErrorCode.OVERLOADED)]
        reading = asyncio.create_task(cluster.run(cluster.request()))
        await decode.until(lambda: decode.cancelled == [("request-1", 1)] and not decode.live)
        cluster.report("prefill-0")
        answer = await reading
        assert answer.tokens == ANSWER
        assert answer.end.receipt.prefill_worker == "prefill-0"

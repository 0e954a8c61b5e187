"""One request over the cluster: its text, its receipt, and every way it can end before its time."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
import pytest

from kvferry_rpc.common_pb2 import ErrorCode, FinishReason
from kvferry_rpc.internal_pb2 import KVEvent
from router import attempt
from router.dispatcher import DispatchLimits
from router.generation import EnoughTokens, TokenBatch, TokenEnd
from runtime.errors import KvferryError
from tests.support.fake_workers import CHECKSUM, FakeDecode, FakePrefill, continuation, error
from tests.support.router_cluster import PROMPT, RouterCluster, router_cluster

ANSWER = continuation(PROMPT, 8)


async def failure_of(awaitable: Awaitable[Any]) -> KvferryError:
    with pytest.raises(KvferryError) as caught:
        await awaitable
    return caught.value


async def first_tokens(stream: AsyncGenerator[TokenBatch | TokenEnd, None], count: int) -> list[int]:
    """Read until at least `count` tokens came."""
    tokens: list[int] = []
    while len(tokens) < count:
        batch = await anext(stream)
        assert isinstance(batch, TokenBatch)
        tokens.extend(token.token_id for token in batch.tokens)
    return tokens


# ---- the plain way ----


async def test_a_prompt_goes_from_prefill_to_decode_and_the_receipt_tells_all_of_it() -> None:
    async with router_cluster() as cluster:
        await cluster.decode()
        prefill = await cluster.prefill()
        answer = await cluster.run(cluster.request())
        assert answer.tokens == ANSWER
        assert answer.indices == list(range(8))
        assert answer.end.reason == FinishReason.LENGTH
        assert (answer.end.prompt_tokens, answer.end.completion_tokens) == (40, 8)
        receipt = answer.end.receipt
        assert (receipt.prefill_worker, receipt.decode_worker) == ("prefill-0", "decode-0")
        assert receipt.handoff_id == "decode-0/request-1/1"
        assert receipt.transport == "tcp"
        assert receipt.checksum == CHECKSUM
        assert receipt.checksum_verified
        assert receipt.tokens_recomputed == 0
        assert (receipt.blocks_sent, receipt.attempt) == (3, 1)
        assert "remote prefill" in receipt.plan_reason
        assert list(receipt.earlier_failures) == []
        assert cluster.store.get("request-1") == receipt
        sent = prefill.requests[0]
        assert list(sent.prompt_token_ids) == list(PROMPT)
        assert 0 < sent.deadline_ms <= 20_000
        assert cluster.counter("kvferry_requests_ended_total", outcome="ok") == 1
        assert cluster.counter("kvferry_ttft_seconds_count") == 1
        assert cluster.counter("kvferry_tokens_generated_total") == 8
        assert cluster.counter("kvferry_handoffs_total", transport="tcp", outcome="committed") == 1


async def test_without_a_prefill_worker_decode_computes_the_prompt() -> None:
    async with router_cluster() as cluster:
        decode = await cluster.decode()
        answer = await cluster.run(cluster.request())
        assert answer.tokens == ANSWER
        assert decode.admitted[0].local_prefill
        receipt = answer.end.receipt
        assert receipt.transport == "local"
        assert receipt.handoff_id == ""
        assert receipt.prefill_worker == receipt.decode_worker == "decode-0"
        assert "no prefill worker is attached" in receipt.plan_reason


async def test_decodes_tokens_may_arrive_before_the_prefill_worker_reports_and_nothing_is_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attempt, "RECEIPT_WAIT_S", 0.05)
    async with router_cluster() as cluster:
        await cluster.decode()
        prefill = await cluster.prefill()
        prefill.report_gate = asyncio.Event()
        answer = await cluster.run(cluster.request())
        assert answer.tokens == ANSWER
        assert answer.indices == list(range(8))
        # The half that did not come in time is missing, and the call is not left behind.
        assert answer.end.receipt.transport == ""
        assert answer.end.receipt.checksum_verified
        await prefill.until(lambda: prefill.running == 0)


async def test_the_first_token_does_not_wait_for_the_decode_worker() -> None:
    async with router_cluster() as cluster:
        decode = await cluster.decode()
        await cluster.prefill()
        decode.pause_after = 0
        stream = cluster.stream(cluster.request())
        assert await first_tokens(stream, 1) == ANSWER[:1]
        decode.resume.set()
        assert await first_tokens(stream, 7) == ANSWER[1:]
        assert isinstance(await anext(stream), TokenEnd)


async def test_the_prefill_half_of_a_receipt_is_waited_for() -> None:
    async with router_cluster() as cluster:
        await cluster.decode()
        prefill = await cluster.prefill()
        prefill.done_gate = asyncio.Event()
        stream = cluster.stream(cluster.request())
        await first_tokens(stream, 8)
        end = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.05)
        assert not end.done()
        prefill.done_gate.set()
        item = await end
        assert isinstance(item, TokenEnd)
        assert item.receipt.transport == "tcp"


async def test_a_slow_reader_gets_merged_batches() -> None:
    async with router_cluster() as cluster:
        decode = await cluster.decode()
        stream = cluster.stream(cluster.request(max_tokens=50))
        got = await first_tokens(stream, 1)
        await decode.until(lambda: not decode.live)
        await asyncio.sleep(0.2)  # The last messages are on the wire.
        batch = await anext(stream)
        assert isinstance(batch, TokenBatch)
        assert len(batch.tokens) > 20
        got += [token.token_id for token in batch.tokens]
        got += await first_tokens(stream, 50 - len(got)) if len(got) < 50 else []
        assert got == continuation(PROMPT, 50)
        await stream.aclose()


async def test_a_stop_token_ends_with_stop() -> None:
    async with router_cluster() as cluster:
        await cluster.decode()
        await cluster.prefill()
        request = cluster.request()
        request.sampling.stop_token_ids.append(ANSWER[3])
        answer = await cluster.run(request)
        assert answer.tokens == ANSWER[:4]
        assert answer.end.reason == FinishReason.STOP


# ---- usage ----


@pytest.mark.parametrize(
    ("remote", "prefill_cached", "decode_cached", "expected"),
    [
        (True, 0, 0, 0),
        (True, 0, 32, 0),  # The decode worker's copy spared a transfer, not the computing.
        (True, 32, 0, 32),
        (True, 32, 32, 32),
        (True, 4000, 0, 40),
        (False, 0, 16, 16),
    ],
)
async def test_cached_tokens_are_those_that_nobody_computed(
    remote: bool, prefill_cached: int, decode_cached: int, expected: int
) -> None:
    # H024
    async with router_cluster() as cluster:
        decode = await cluster.decode()
        decode.cached_tokens = decode_cached
        if remote:
            (await cluster.prefill()).cached_tokens = prefill_cached
        answer = await cluster.run(cluster.request())
        assert answer.end.cached_tokens == expected


# ---- a worker is lost, or the hand-off fails ----


@pytest.mark.parametrize("position", [0, 1, 3, 7])
async def test_a_lost_decode_worker_costs_no_token_and_changes_none(position: int) -> None:
    async with router_cluster() as cluster:
        first = await cluster.decode("decode-0")
        prefill = await cluster.prefill()
        first.pause_after = position
        stream = cluster.stream(cluster.request())
        tokens = await first_tokens(stream, max(1, position))
        second = await cluster.decode("decode-1")
        await cluster.kill("decode-0")
        tokens += await first_tokens(stream, 8 - len(tokens))
        end = await anext(stream)
        assert isinstance(end, TokenEnd)
        assert tokens == ANSWER
        resumed = second.admitted[0]
        assert resumed.attempt == 2
        assert list(resumed.prompt_token_ids) == [*PROMPT, *ANSWER[: resumed.num_output_tokens]]
        assert resumed.num_output_tokens == max(1, position)
        assert prefill.requests[-1].num_output_tokens == resumed.num_output_tokens
        assert end.receipt.decode_worker == "decode-1"
        assert end.receipt.attempt == 2
        assert len(end.receipt.earlier_failures) == 1
        assert "unavailable" in end.receipt.earlier_failures[0]
        assert end.prompt_tokens == 40
        assert end.cached_tokens == 0
        await stream.aclose()


async def test_a_broken_session_is_tried_again_on_another_worker() -> None:
    async with router_cluster() as cluster:
        bad = await cluster.decode("decode-0")
        await cluster.decode("decode-1")
        await cluster.prefill()
        bad.drop_session_after = 2
        answers = await asyncio.gather(*(cluster.run(cluster.request()) for _ in range(6)))
        assert [answer.tokens for answer in answers] == [ANSWER] * 6
        assert {answer.end.receipt.decode_worker for answer in answers} <= {"decode-0", "decode-1"}
        assert any(answer.end.receipt.attempt > 1 for answer in answers)


@pytest.mark.parametrize("where", ["start", "after_first_token", "status", "decode"])
async def test_a_failed_hand_off_is_tried_with_another_pair(where: str) -> None:
    # H020, H073: the failure of one branch ends the other.
    async with router_cluster() as cluster:
        decode = await cluster.decode()
        prefill = await cluster.prefill("prefill-0")
        failure = error(ErrorCode.HANDOFF_FAILED, "link broke")
        if where == "start":
            prefill.failures.append(failure)
        elif where == "after_first_token":
            prefill.failures_after_first_token.append(failure)
        elif where == "status":
            prefill.statuses.append(grpc.StatusCode.UNKNOWN)
        else:
            decode.fail_after = (0, failure)
        stream = cluster.stream(cluster.request())
        reading = asyncio.create_task(first_tokens(stream, 8))
        await prefill.until(lambda: prefill.requests)
        other = await cluster.prefill("prefill-1")
        if where == "decode":
            await decode.until(lambda: len(decode.admitted) == 2)
            decode.fail_after = None
        assert await reading == ANSWER
        end = await anext(stream)
        assert isinstance(end, TokenEnd)
        assert len(end.receipt.earlier_failures) == 1
        assert end.receipt.attempt == 2
        if other.requests:
            assert end.receipt.prefill_worker == "prefill-1"
        assert cluster.counter("kvferry_handoffs_total", transport="unknown", outcome="failed") == 1
        assert cluster.counter("kvferry_retries_total") == 1
        await decode.until(lambda: not decode.live)
        await stream.aclose()


async def test_the_only_prefill_worker_failing_the_prompt_is_computed_on_decode() -> None:
    async with router_cluster() as cluster:
        await cluster.decode()
        prefill = await cluster.prefill()
        prefill.failures.append(error(ErrorCode.HANDOFF_FAILED))
        answer = await cluster.run(cluster.request())
        assert answer.tokens == ANSWER
        assert answer.end.receipt.transport == "local"
        assert "failed this request" in answer.end.receipt.plan_reason


async def test_a_prefill_worker_that_dies_under_a_request_is_replaced() -> None:
    async with router_cluster() as cluster:
        decode = await cluster.decode()
        prefill = await cluster.prefill("prefill-0")
        prefill.compute_gate = asyncio.Event()
        reading = asyncio.create_task(cluster.run(cluster.request()))
        await prefill.until(lambda: prefill.running == 1)
        other = await cluster.prefill("prefill-1")
        await cluster.kill("prefill-0")
        answer = await reading
        assert answer.tokens == ANSWER
        assert answer.end.receipt.prefill_worker == "prefill-1"
        assert len(other.requests) == 1
        assert ("request-1", 1) in decode.cancelled


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_worker_that_is_stopped_but_not_dead_holds_nobody_once_it_is_detached(role: str) -> None:
    # H070: its connections stay open and silent; the registry's deadline on its reports is what ends the wait.
    async with router_cluster() as cluster:
        decode, prefill = await cluster.decode("decode-0"), await cluster.prefill("prefill-0")
        if role == "prefill":
            prefill.compute_gate = asyncio.Event()
        else:
            decode.pause_after = 0
        reading = asyncio.create_task(cluster.run(cluster.request()))
        await prefill.until(lambda: prefill.requests)
        await decode.until(lambda: decode.live)
        await (cluster.prefill("prefill-1") if role == "prefill" else cluster.decode("decode-1"))
        cluster.registry.detach(cluster.attached[f"{role}-0"])
        answer = await reading
        assert answer.tokens == ANSWER
        assert getattr(answer.end.receipt, f"{role}_worker") == f"{role}-1"


async def test_once_decode_runs_a_prefill_failure_matters_no_more() -> None:
    async with router_cluster() as cluster:
        decode = await cluster.decode()
        prefill = await cluster.prefill()
        prefill.done_gate = asyncio.Event()
        decode.pause_after = 4
        stream = cluster.stream(cluster.request())
        tokens = await first_tokens(stream, 4)
        await cluster.kill("prefill-0")
        decode.resume.set()
        tokens += await first_tokens(stream, 4)
        end = await anext(stream)
        assert isinstance(end, TokenEnd)
        assert tokens == ANSWER
        assert end.receipt.attempt == 1
        assert len(decode.admitted) == 1


async def test_attempts_are_bounded_and_the_last_failure_is_told() -> None:
    async with router_cluster() as cluster:
        decode = await cluster.decode()
        decode.refusals = [error(ErrorCode.UNAVAILABLE, f"refusal {number}") for number in range(9)]
        failure = await failure_of(cluster.run(cluster.request()))
        assert failure.code == ErrorCode.UNAVAILABLE
        assert "refusal 2" in failure.message
        assert len(decode.admitted) == 3
        assert [sent.attempt for sent in decode.admitted] == [1, 2, 3]
        assert cluster.counter("kvferry_requests_ended_total", outcome="failed") == 1


async def test_retries_stop_when_their_budget_is_spent() -> None:
    # H032
    async with router_cluster(DispatchLimits(max_in_flight=4)) as cluster:
        decode = await cluster.decode()
        decode.refusals = [error(ErrorCode.UNAVAILABLE) for _ in range(1000)]
        for _ in range(12):
            await failure_of(cluster.run(cluster.request()))
        # 12 first attempts, 4 retries saved up, a tenth of the requests, and what a few moments add.
        assert len(decode.admitted) <= 12 + 4 + 1.2 + 3
        assert len(decode.admitted) >= 12 + 4


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("code", [code for code in ErrorCode.values() if code])
async def test_every_failure_of_a_worker_reaches_the_caller_with_its_code(
    side: str, code: "ErrorCode.ValueType"
) -> None:
    # H022
    limits = DispatchLimits(max_room_wait_s=0.1, strict_handoff=True)
    async with router_cluster(limits) as cluster:
        decode = await cluster.decode()
        prefill = await cluster.prefill()
        if side == "decode":
            decode.refusals = [error(code, "the reason") for _ in range(100)]
        else:
            prefill.failures = [error(code, "the reason") for _ in range(100)]
        failure = await failure_of(cluster.run(cluster.request()))
        internal_codes = {ErrorCode.CANCELLED, ErrorCode.UNAUTHENTICATED}
        assert failure.code == (ErrorCode.UNAVAILABLE if code in internal_codes else code)
        retried = code in {ErrorCode.UNAVAILABLE, ErrorCode.HANDOFF_FAILED, *internal_codes}
        if code != ErrorCode.OVERLOADED:
            assert "the reason" in failure.message
            assert len(decode.admitted) == (3 if retried else 1)
        await decode.until(lambda: not decode.live)


async def test_without_any_decode_worker_requests_are_refused_at_once() -> None:
    async with router_cluster() as cluster:
        failure = await failure_of(cluster.run(cluster.request()))
        assert failure.code == ErrorCode.UNAVAILABLE
        assert "no worker is attached" in failure.message
        assert failure.retry_after_ms > 0
        await cluster.prefill()
        failure = await failure_of(cluster.run(cluster.request()))
        assert "no decode worker is attached" in failure.message


async def test_the_end_of_text_is_not_run_over_when_the_worker_dies_before_saying_done() -> None:
    async with router_cluster(eos_token_ids=frozenset({ANSWER[3]})) as cluster:
        decode = await cluster.decode()
        await cluster.decode("decode-1")
        decode.drop_session_after = 4
        answers = [await cluster.run(cluster.request()) for _ in range(2)]
        on_first = [answer for answer in answers if answer.end.receipt.decode_worker == "decode-0"]
        assert [answer.tokens for answer in on_first] == [ANSWER[:4]]
        assert on_first[0].end.reason == FinishReason.STOP


async def test_a_complete_answer_needs_no_second_attempt_when_done_is_lost() -> None:
    async with router_cluster() as cluster:
        decode = await cluster.decode()
        decode.fail_after = (3, error(ErrorCode.UNAVAILABLE))
        # The fake worker checks its knob before each token, so with 3 tokens allowed it fails instead of `done`.
        request = cluster.request(max_tokens=4)
        stream = cluster.stream(request)
        tokens = await first_tokens(stream, 3)
        decode.fail_after = (1, error(ErrorCode.UNAVAILABLE))
        tokens += await first_tokens(stream, 1)
        end = await anext(stream)
        assert isinstance(end, TokenEnd)
        assert tokens == ANSWER[:4]
        assert end.reason == FinishReason.LENGTH


async def test_workers_that_disagree_on_the_first_token_end_the_request() -> None:
    async with router_cluster() as cluster:
        await cluster.decode()
        prefill = await cluster.prefill()
        prefill.first_token_offset = 1
        failure = await failure_of(cluster.run(cluster.request()))
        assert failure.code == ErrorCode.INTERNAL
        assert "disagree" in failure.message


# ---- proof ----


async def test_different_digests_on_the_two_sides_are_never_an_answer() -> None:
    async with router_cluster() as cluster:
        decode = await cluster.decode()
        await cluster.prefill()
        decode.checksum = b"of other blocks"
        failure = await failure_of(cluster.run(cluster.request()))
        assert failure.code == ErrorCode.INTERNAL
        assert CHECKSUM.hex() in failure.message
        assert cluster.store.get("request-1") is None


async def test_strict_hand_off_refuses_what_was_recomputed_and_what_has_no_prefill_worker() -> None:
    async with router_cluster(DispatchLimits(strict_handoff=True)) as cluster:
        decode = await cluster.decode()
        failure = await failure_of(cluster.run(cluster.request()))
        assert failure.code == ErrorCode.HANDOFF_FAILED
        assert "no prefill worker" in failure.message
        await cluster.prefill()
        assert (await cluster.run(cluster.request())).tokens == ANSWER
        decode.tokens_recomputed = 16
        failure = await failure_of(cluster.run(cluster.request()))
        assert failure.code == ErrorCode.HANDOFF_FAILED
        assert "16 prompt tokens" in failure.message


async def test_recomputed_tokens_are_on_the_receipt_when_hand_off_is_not_strict() -> None:
    async with router_cluster() as cluster:
        (await cluster.decode()).tokens_recomputed = 16
        await cluster.prefill()
        assert (await cluster.run(cluster.request())).end.receipt.tokens_recomputed == 16


# ---- the caller goes away, or time is up ----

States = Callable[[RouterCluster, FakeDecode, FakePrefill], Awaitable[None]]


async def _waiting_for_ticket(cluster: RouterCluster, decode: FakeDecode, prefill: FakePrefill) -> None:
    await decode.until(lambda: decode.live)


async def _prefilling(cluster: RouterCluster, decode: FakeDecode, prefill: FakePrefill) -> None:
    await prefill.until(lambda: prefill.running)


async def _decoding(cluster: RouterCluster, decode: FakeDecode, prefill: FakePrefill) -> None:
    await prefill.until(lambda: prefill.requests and not prefill.running)


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
        _hold(state, decode, prefill)
        failure = await failure_of(cluster.run(cluster.request(timeout_s=0.3)))
        assert failure.code == ErrorCode.DEADLINE_EXCEEDED
        await decode.until(lambda: decode.cancelled == [("request-1", 1)] and not decode.live)
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


# ---- many at once ----


async def test_a_burst_in_one_moment_is_spread_over_equal_workers() -> None:
    # H005
    async with router_cluster() as cluster:
        workers = [await cluster.decode(f"decode-{number}") for number in range(4)]
        for worker in workers:
            worker.pause_after = 0
        tasks = [asyncio.create_task(cluster.run(cluster.request())) for _ in range(40)]
        await asyncio.gather(*(worker.until(lambda w=worker: len(w.admitted) >= 10) for worker in workers))
        assert {len(worker.admitted) for worker in workers} == {10}
        for worker in workers:
            worker.resume.set()
        await asyncio.gather(*tasks)


async def test_a_dead_worker_with_the_hottest_prefix_fails_nobody() -> None:
    # H002, H003
    async with router_cluster() as cluster:
        await cluster.decode("decode-0")
        await cluster.decode("decode-1")
        hot, _ = await cluster.prefill("prefill-0"), await cluster.prefill("prefill-1")
        hasher = cluster.registry.hasher
        assert hasher is not None
        cluster.attached["prefill-0"].index.apply(
            0, True, [KVEvent(block_hash=name) for name in hasher.hash_blocks(PROMPT)]
        )
        assert (await cluster.run(cluster.request())).end.receipt.prefill_worker == "prefill-0"
        await hot.stop()  # Its Attach stream is not seen to end yet.
        answers = await asyncio.gather(*(cluster.run(cluster.request()) for _ in range(50)))
        assert [answer.tokens for answer in answers] == [ANSWER] * 50
        cluster.registry.detach(cluster.attached["prefill-0"])
        assert (await cluster.run(cluster.request())).end.receipt.prefill_worker == "prefill-1"


async def test_losing_a_worker_with_everything_it_runs_loses_no_request() -> None:
    async with router_cluster() as cluster:
        doomed, _ = await cluster.decode("decode-0"), await cluster.decode("decode-1")
        await cluster.prefill()
        doomed.pause_after = 3
        tasks = [asyncio.create_task(cluster.run(cluster.request())) for _ in range(40)]
        await doomed.until(lambda: len(doomed.live) == 20)
        await cluster.kill("decode-0")
        answers = await asyncio.gather(*tasks)
        assert [answer.tokens for answer in answers] == [ANSWER] * 40
        assert all(answer.indices == list(range(8)) for answer in answers)


async def _read_some(cluster: RouterCluster, rng: random.Random) -> str:
    """One client that reads to the end, stops half-way, or gives up after a moment; returns what it saw."""
    request = cluster.request(prompt=range(rng.randrange(1, 60)), max_tokens=rng.randrange(1, 30))
    expected = continuation(request.prompt_token_ids, request.sampling.max_tokens)
    stop_after = rng.choice([1000, 1000, 1, 5])
    got: list[int] = []
    stream = cluster.stream(request)
    try:
        async with asyncio.timeout(rng.choice([20, 20, 20, 0.03])), aclosing(stream):
            async for item in stream:
                if isinstance(item, TokenEnd):
                    assert got == expected
                    return "ok"
                got += [token.token_id for token in item.tokens]
                assert got == expected[: len(got)]
                if len(got) >= stop_after:
                    return "cancelled"
    except TimeoutError:
        return "cancelled"
    except KvferryError as failure:
        return "rejected" if failure.code == ErrorCode.INVALID_REQUEST else "failed"
    raise AssertionError("the stream has no end")


@pytest.mark.parametrize("seed", [1, 2])
async def test_after_a_mixed_run_with_cancels_and_failures_every_count_is_right(seed: int) -> None:
    # H019, H099, H102
    rng = random.Random(seed)
    asyncio.get_running_loop().set_debug(seed == 1)
    async with router_cluster(DispatchLimits(max_in_flight=24)) as cluster:
        decodes = [await cluster.decode(f"decode-{number}") for number in range(2)]
        prefills = [await cluster.prefill(f"prefill-{number}") for number in range(2)]
        decodes[0].room = 6
        gate = asyncio.Semaphore(32)

        async def client(number: int) -> str:
            async with gate:
                if number % 9 == 0:
                    prefills[number % 2].failures.append(error(ErrorCode.HANDOFF_FAILED))
                if number % 31 == 0:
                    decodes[1].refusals.append(error(ErrorCode.INVALID_REQUEST))
                if number == 60:
                    await decodes[0].drop_sessions()
                if number % 10 == 0:
                    cluster.report("decode-0")
                return await _read_some(cluster, rng)

        seen = Counter(await asyncio.gather(*(client(number) for number in range(120))))
        counted = {
            outcome: cluster.counter("kvferry_requests_ended_total", outcome=outcome)
            for outcome in ("ok", "cancelled", "rejected", "failed")
        }
        assert counted == {outcome: seen[outcome] for outcome in counted}
        assert cluster.counter("kvferry_requests_received_total") == sum(counted.values()) == 120
        assert min(seen["ok"], seen["cancelled"]) > 20
        assert set(cluster.in_flight().values()) == {0}
        for decode in decodes:
            await decode.until(lambda worker=decode: not worker.live)


async def test_requests_of_different_tenants_are_told_apart_by_their_salt() -> None:
    async with router_cluster() as cluster:
        decode, prefill = await cluster.decode(), await cluster.prefill()
        request = cluster.request(cache_salt=b"tenant")
        await cluster.run(request)
        assert decode.admitted[0].cache_salt == prefill.requests[0].cache_salt == b"tenant"

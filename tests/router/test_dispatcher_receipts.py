"""Receipts of requests that do not end well, and of those that end early: kept, with what was known."""

import asyncio

import pytest

from kvferry_rpc.common_pb2 import ErrorCode
from router.dispatch.dispatch_limits import DispatchLimits
from router.generation import TokenEnd
from tests.support.fake_workers import CHECKSUM, error
from tests.support.router_cluster import ANSWER, failure_of, first_tokens, router_cluster
from tests.support.sinks import EnoughTokens


async def test_a_request_that_no_worker_could_take_leaves_a_receipt_of_its_failure() -> None:
    async with router_cluster() as cluster:
        failure = await failure_of(cluster.run(cluster.request()))
        receipt = cluster.store.get("request-1")
        assert receipt is not None
        assert list(receipt.earlier_failures) == [f"final: unavailable: {failure.message}"]
        assert (receipt.prompt_tokens, receipt.attempt, receipt.decode_worker) == (40, 0, "")


async def test_attempts_that_all_fail_are_named_one_by_one_with_the_last_as_the_final_one() -> None:
    async with router_cluster() as cluster:
        decode = await cluster.decode()
        await cluster.prefill()
        decode.refusals = [error(ErrorCode.UNAVAILABLE, f"refusal {number}") for number in range(9)]
        await failure_of(cluster.run(cluster.request()))
        receipt = cluster.store.get("request-1")
        assert receipt is not None
        assert list(receipt.earlier_failures) == [
            "attempt 1: unavailable: refusal 0",
            "attempt 2: unavailable: refusal 1",
            "final: attempt 3: unavailable: refusal 2",
        ]
        assert (receipt.attempt, receipt.decode_worker) == (3, "decode-0")
        assert receipt.plan_reason


async def test_a_refused_hand_off_leaves_both_halves_on_its_receipt() -> None:
    limits = DispatchLimits(strict_handoff=True, require_transports=("shm",))
    async with router_cluster(limits) as cluster:
        await cluster.decode()
        await cluster.prefill()
        failure = await failure_of(cluster.run(cluster.request()))
        receipt = cluster.store.get("request-1")
        assert receipt is not None
        assert (receipt.transport, receipt.checksum_verified, receipt.checksum) == ("tcp", True, CHECKSUM)
        assert list(receipt.earlier_failures) == [f"final: handoff_failed: {failure.message}"]


async def test_different_digests_leave_a_receipt_that_says_so() -> None:
    async with router_cluster() as cluster:
        (await cluster.decode()).checksum = b"of other blocks"
        await cluster.prefill()
        await failure_of(cluster.run(cluster.request()))
        receipt = cluster.store.get("request-1")
        assert receipt is not None
        assert receipt.earlier_failures[-1].startswith("final: internal: hand-off")
        assert CHECKSUM.hex() in receipt.earlier_failures[-1]


async def test_a_caller_that_leaves_and_a_deadline_leave_receipts_too() -> None:
    async with router_cluster() as cluster:
        decode = await cluster.decode()
        await cluster.prefill()
        decode.pause_after = 2
        stream = cluster.stream(cluster.request())
        await first_tokens(stream, 2)
        await stream.aclose()
        receipt = cluster.store.get("request-1")
        assert receipt is not None
        assert list(receipt.earlier_failures) == ["final: cancelled: the caller left"]
        assert receipt.checksum_verified
        await failure_of(cluster.run(cluster.request(timeout_s=0.2)))
        receipt = cluster.store.get("request-2")
        assert receipt is not None
        assert "final: deadline_exceeded" in receipt.earlier_failures[-1]


async def test_what_is_turned_away_at_the_door_pushes_no_receipt_out() -> None:
    async with router_cluster(DispatchLimits(max_in_flight=1, max_queued=1)) as cluster:
        decode = await cluster.decode()
        decode.pause_after = 0
        running = [asyncio.create_task(cluster.run(cluster.request())) for _ in range(2)]
        await decode.until(lambda: len(decode.live) == 1)
        assert (await failure_of(cluster.run(cluster.request()))).code == ErrorCode.OVERLOADED
        assert cluster.store.get("request-3") is None
        decode.resume.set()
        await asyncio.gather(*running)


async def test_a_good_answer_has_no_final_failure_even_after_a_failed_attempt() -> None:
    async with router_cluster() as cluster:
        await cluster.decode()
        prefill = await cluster.prefill()
        prefill.failures.append(error(ErrorCode.HANDOFF_FAILED, "link broke"))
        answer = await cluster.run(cluster.request())
        assert list(answer.end.receipt.earlier_failures) == ["attempt 1: handoff_failed: link broke"]


@pytest.mark.parametrize("early", ["prefill", "decode"])
async def test_a_reader_that_has_enough_at_the_first_token_still_gets_both_halves(early: str) -> None:
    async with router_cluster() as cluster:
        decode, prefill = await cluster.decode(), await cluster.prefill()
        gate = asyncio.Event()
        if early == "prefill":
            decode.verified_gate = gate
        else:
            prefill.report_gate = gate
        decode.pause_after = 3
        stream = cluster.stream(cluster.request())
        assert (await first_tokens(stream, 1))[:1] == ANSWER[:1]
        ending = asyncio.ensure_future(stream.athrow(EnoughTokens()))
        await asyncio.sleep(0)
        gate.set()
        end = await ending
        assert isinstance(end, TokenEnd)
        receipt = end.receipt
        assert (receipt.blocks_sent, receipt.checksum_verified, receipt.checksum) == (3, True, CHECKSUM)
        await stream.aclose()


async def test_a_decode_worker_that_is_lost_after_the_last_token_has_left_its_half_of_the_hand_off() -> None:
    async with router_cluster(eos_token_ids=frozenset({ANSWER[3]})) as cluster:
        decode = await cluster.decode()
        await cluster.prefill()
        decode.drop_session_after = 4
        answer = await cluster.run(cluster.request())
        assert answer.tokens == ANSWER[:4]
        receipt = answer.end.receipt
        assert (receipt.checksum_verified, receipt.checksum, receipt.commit_ms) == (True, CHECKSUM, 1)
        assert receipt.decode_ms > 0

"""One request over the cluster in its normal course: its text, its batches, its receipt and what that proves."""

import asyncio

import pytest

from kvferry_rpc.common_pb2 import ErrorCode, FinishReason
from router.dispatch import strict_gate
from router.generation import TokenBatch, TokenEnd
from tests.support.fake_model import continuation
from tests.support.fake_workers import CHECKSUM
from tests.support.router_cluster import ANSWER, PROMPT, failure_of, first_tokens, router_cluster

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
        assert cluster.counter("kvferry_time_to_first_token_seconds_count") == 1
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
    monkeypatch.setattr(strict_gate, "RECEIPT_WAIT_S", 0.05)
    async with router_cluster() as cluster:
        await cluster.decode()
        prefill = await cluster.prefill()
        prefill.report_gate = asyncio.Event()
        answer = await cluster.run(cluster.request())
        assert answer.tokens == ANSWER
        assert answer.indices == list(range(8))
        # The half that did not come in time is missing, and the call is not left behind.
        assert answer.end.receipt.blocks_sent == 0
        assert answer.end.receipt.transport == "tcp"
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
        session = cluster.links.decode_session("decode-0")
        assert session is not None
        await decode.until(lambda: not decode.live)
        await cluster.until(lambda: not session.requests_in_flight)  # all is in the inbox, and not yet read
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


# ---- proof ----


async def test_different_digests_on_the_two_sides_are_never_an_answer() -> None:
    async with router_cluster() as cluster:
        decode = await cluster.decode()
        await cluster.prefill()
        decode.checksum = b"of other blocks"
        failure = await failure_of(cluster.run(cluster.request()))
        assert failure.code == ErrorCode.INTERNAL
        assert CHECKSUM.hex() in failure.message


async def test_recomputed_tokens_are_on_the_receipt_when_hand_off_is_not_strict() -> None:
    async with router_cluster() as cluster:
        (await cluster.decode()).tokens_recomputed = 16
        await cluster.prefill()
        assert (await cluster.run(cluster.request())).end.receipt.tokens_recomputed == 16


# ---- tenants ----


async def test_requests_of_different_tenants_are_told_apart_by_their_salt() -> None:
    async with router_cluster() as cluster:
        decode, prefill = await cluster.decode(), await cluster.prefill()
        request = cluster.request(cache_salt=b"tenant")
        await cluster.run(request)
        assert decode.admitted[0].cache_salt == prefill.requests[0].cache_salt == b"tenant"

"""Workers that fail or go, seen from the cluster: who gets the requests then, and that no crowd follows."""

import asyncio
from collections import Counter

import pytest

from kvferry_rpc.common_pb2 import ErrorCode
from router.dispatch.dispatch_limits import DispatchLimits
from router.generation import TokenEnd
from router.workers.breaker import MAX_FAILURES
from tests.support.fake_workers import error
from tests.support.router_cluster import ANSWER, PROMPT, RouterCluster, failure_of, first_tokens, router_cluster


def states(cluster: RouterCluster) -> dict[str, str]:
    return {view.worker_id: view.health.value for view in cluster.registry.views()}


async def test_a_worker_that_reports_well_and_fails_everything_gets_no_more_requests() -> None:
    async with router_cluster() as cluster:
        bad = await cluster.decode("decode-0")
        await cluster.decode("decode-1")
        bad.refusals = [error(ErrorCode.UNAVAILABLE, "scripted") for _ in range(1000)]
        for _ in range(30):
            assert (await cluster.run(cluster.request())).tokens == ANSWER
            cluster.report("decode-0")
            cluster.report("decode-1")
        # Those that opened the breaker; and a probe or two, if this took seconds.
        assert MAX_FAILURES <= len(bad.admitted) <= MAX_FAILURES + 3
        assert states(cluster)["decode-0"] == "failing"
        assert cluster.registry.ready


async def test_where_every_worker_keeps_failing_they_are_tried_all_the_same() -> None:
    # H018: the last one standing is better than none.
    async with router_cluster() as cluster:
        only = await cluster.decode()
        only.refusals = [error(ErrorCode.UNAVAILABLE, "scripted") for _ in range(MAX_FAILURES)]
        await failure_of(cluster.run(cluster.request()))
        assert states(cluster) == {"decode-0": "failing"}
        assert cluster.registry.ready
        assert (await cluster.run(cluster.request())).tokens == ANSWER
        assert states(cluster) == {"decode-0": "ready"}


async def test_a_prefill_worker_that_keeps_failing_is_left_out_and_said_so() -> None:
    async with router_cluster() as cluster:
        await cluster.decode()
        prefill = await cluster.prefill()
        prefill.failures = [error(ErrorCode.INTERNAL, "scripted") for _ in range(MAX_FAILURES)]
        for _ in range(MAX_FAILURES):
            assert (await failure_of(cluster.run(cluster.request()))).code == ErrorCode.INTERNAL
        answer = await cluster.run(cluster.request())
        assert answer.tokens == ANSWER
        assert answer.end.receipt.transport == "local"
        assert "no prefill worker is ready" in answer.end.receipt.plan_reason
        assert len(prefill.requests) == MAX_FAILURES


async def test_the_last_prefill_worker_goes_and_another_comes() -> None:
    async with router_cluster() as cluster:
        decode = await cluster.decode()
        prefill = await cluster.prefill()
        prefill.compute_gate = asyncio.Event()
        reading = asyncio.create_task(cluster.run(cluster.request()))
        await prefill.until(lambda: prefill.running == 1)
        await cluster.kill("prefill-0")
        answers = [await reading, await cluster.run(cluster.request())]
        for answer in answers:
            assert answer.tokens == ANSWER
            assert answer.end.receipt.transport == "local"
            assert answer.end.receipt.prefill_worker == "decode-0"
            assert answer.end.receipt.plan_reason.startswith("local prefill: no prefill worker is attached")
        assert [admit.local_prefill for admit in decode.admitted] == [False, True, True]
        back = await cluster.prefill("prefill-0")
        answer = await cluster.run(cluster.request())
        assert answer.end.receipt.prefill_worker == "prefill-0"
        assert answer.end.receipt.transport == "tcp"
        assert len(back.requests) == 1


async def test_a_lost_worker_is_left_by_the_next_request_and_so_is_its_prefix_index() -> None:
    # H002, H003: what was cached there draws nobody to it any more, and no lease has to run out.
    async with router_cluster() as cluster:
        await cluster.decode("decode-0")
        await cluster.decode("decode-1")
        await cluster.prefill()
        cluster.caches("decode-0", PROMPT)
        receipts = [(await cluster.run(cluster.request())).end.receipt for _ in range(4)]
        assert {receipt.decode_worker for receipt in receipts} == {"decode-0"}
        await cluster.kill("decode-0")
        for _ in range(4):
            answer = await cluster.run(cluster.request())
            assert answer.end.receipt.decode_worker == "decode-1"
            assert answer.end.receipt.attempt == 1
            assert not answer.end.receipt.earlier_failures
        assert cluster.counter("kvferry_retries_total") == 0


async def test_a_worker_that_loses_touch_for_a_moment_is_used_again_by_itself() -> None:
    # H001: there is no registry to fail; a stream that breaks costs its own requests an attempt, no more.
    async with router_cluster() as cluster:
        only = await cluster.decode()
        await cluster.run(cluster.request())
        await only.drop_sessions()
        answer = await cluster.run(cluster.request())
        assert answer.tokens == ANSWER
        await cluster.until(lambda: only.sessions == 2)
        assert (await cluster.run(cluster.request())).tokens == ANSWER


@pytest.mark.parametrize("remote", [True, False], ids=["remote", "local"])
async def test_the_answers_of_a_lost_worker_spread_over_the_others(remote: bool) -> None:
    # H005, H032
    count, others = 60, ("decode-1", "decode-2", "decode-3")
    async with router_cluster(DispatchLimits(forecast_tokens=0)) as cluster:
        lost = await cluster.decode("decode-0")
        if remote:
            await cluster.prefill()
        lost.pause_after = 2
        streams = [cluster.stream(cluster.request()) for _ in range(count)]
        heads = await asyncio.gather(*(first_tokens(stream, 2) for stream in streams))
        workers = [await cluster.decode(name) for name in others]
        for worker in workers:
            worker.pause_after = 1
        reading = [asyncio.create_task(first_tokens(stream, 6)) for stream in streams]
        await cluster.kill("decode-0")
        await cluster.until(lambda: sum(len(worker.admitted) for worker in workers) == count)
        landed = Counter({worker.worker_id: len(worker.admitted) for worker in workers})
        assert max(landed.values()) <= 2 * count / len(others), landed
        assert cluster.counter("kvferry_retries_total") == count
        for worker in workers:
            worker.resume.set()
        for head, task in zip(heads, reading, strict=True):
            assert head + await task == ANSWER
        for stream in streams:
            assert isinstance(await anext(stream), TokenEnd)

"""The dispatcher under load: who goes first, what waits for KV that is not there yet, what is refused at once."""

import asyncio
from typing import Any

from kvferry_rpc.common_pb2 import ErrorCode, SamplingParams
from router.admission.fair_queue import TenantShare
from router.admission.slo import INTERACTIVE
from router.dispatch.dispatch_limits import DispatchLimits
from tests.support.fake_workers import FakeDecode, error
from tests.support.router_cluster import ANSWER, Answer, RouterCluster, failure_of, router_cluster

# It may have 400 tokens, and ends after three.
LONG = SamplingParams(max_tokens=400, temperature=0.0, seed=1, stop_token_ids=[ANSWER[2]])


def run(cluster: RouterCluster, **request: Any) -> "asyncio.Task[Answer]":
    return asyncio.create_task(cluster.run(cluster.request(**request)))


def began(decode: FakeDecode) -> list[str]:
    return [admit.request_id for admit in decode.admitted]


# ---- the forecast ----


async def test_what_the_pool_could_not_hold_to_its_end_waits_and_is_not_prefilled() -> None:
    async with router_cluster() as cluster:
        decode, prefill = await cluster.decode(), await cluster.prefill()
        decode.pause_after = 1
        # 40 tokens and 256 expected ones are 19 of its 64 blocks.
        running = [run(cluster, sampling=LONG) for _ in range(4)]
        await decode.until(lambda: len(decode.live) == 3)
        await cluster.until(lambda: cluster.dispatcher.queued == 1)
        # A sign of room that is none: the report says what there was before.
        cluster.report("decode-0", blocks_free=55, sequences_running=3)
        await run(cluster, max_tokens=1, tenant="another")
        assert len(decode.admitted) == 4
        assert len(prefill.requests) == 4
        decode.pause_after = None
        decode.resume.set()
        await asyncio.gather(*running)
        assert began(decode)[-1] == "request-4"


async def test_without_a_forecast_they_are_sent_and_refused_by_the_worker() -> None:
    async with router_cluster(DispatchLimits(forecast_tokens=0)) as cluster:
        decode = await cluster.decode()
        decode.pause_after = 1
        running = [run(cluster, sampling=LONG) for _ in range(30)]
        await decode.until(lambda: len(decode.live) == 30)
        decode.resume.set()
        await asyncio.gather(*running)


async def test_what_no_worker_could_ever_hold_is_refused_before_anything_is_done() -> None:
    async with router_cluster() as cluster:
        decode = await cluster.decode()
        failure = await failure_of(cluster.run(cluster.request(max_tokens=64 * 16)))
        assert (failure.code, failure.field) == (ErrorCode.CONTEXT_LENGTH_EXCEEDED, "max_tokens")
        assert decode.admitted == []
        assert cluster.counter("kvferry_requests_ended_total", outcome="rejected") == 1


async def test_a_request_goes_where_it_will_fit_to_its_end_though_that_worker_has_more_to_do() -> None:
    async with router_cluster() as cluster:
        crowded, roomy = await cluster.decode("decode-0"), await cluster.decode("decode-1")
        cluster.report("decode-0", blocks_free=10, sequences_running=1)
        cluster.report("decode-1", blocks_free=60, sequences_running=5, tokens_waiting=200)
        await cluster.run(cluster.request(sampling=LONG))
        assert (len(crowded.admitted), len(roomy.admitted)) == (0, 1)
        await cluster.run(cluster.request(max_tokens=8))
        assert (len(crowded.admitted), len(roomy.admitted)) == (1, 1)


async def test_the_answers_seen_say_how_long_the_next_ones_will_be() -> None:
    async with router_cluster() as cluster:
        decode = await cluster.decode()
        for _ in range(8):
            await cluster.run(cluster.request(sampling=LONG))
        decode.pause_after = 1
        running = [run(cluster, sampling=LONG) for _ in range(10)]
        await decode.until(lambda: len(decode.live) == 10)
        decode.resume.set()
        await asyncio.gather(*running)


# ---- who goes first ----


async def test_one_tenants_burst_does_not_keep_another_one_waiting() -> None:
    async with router_cluster(DispatchLimits(max_in_flight=1)) as cluster:
        decode = await cluster.decode()
        decode.pause_after = 0
        tasks = [run(cluster, tenant="large", prompt=range(400)) for _ in range(20)]
        await decode.until(lambda: decode.live)
        tasks.append(run(cluster, tenant="small"))
        await cluster.until(lambda: cluster.dispatcher.queued == 20)
        decode.resume.set()
        await asyncio.gather(*tasks)
        assert began(decode).index("request-21") <= 7


async def test_weights_shares_and_priorities_reach_the_queue() -> None:
    share_of = {"a": TenantShare(), "b": TenantShare(max_in_flight=1)}.__getitem__
    async with router_cluster(DispatchLimits(max_in_flight=2, share_of=share_of)) as cluster:
        decode = await cluster.decode()
        decode.pause_after = 0
        tasks = [run(cluster, tenant="b") for _ in range(3)]
        await decode.until(lambda: decode.live)
        await cluster.until(lambda: cluster.dispatcher.queued == 2)
        assert len(decode.live) == 1  # It may have one at a time,
        tasks += [run(cluster, tenant="a")]
        await decode.until(lambda: len(decode.live) == 2)
        tasks += [
            run(cluster, tenant="a"),
            run(cluster, tenant="a", priority=5),
            run(cluster, tenant="a", slo="interactive"),
        ]
        await cluster.until(lambda: cluster.dispatcher.queued == 5)
        decode.resume.set()
        await asyncio.gather(*tasks)
        mine = [request_id for request_id in began(decode) if request_id in ("request-5", "request-6", "request-7")]
        assert mine == ["request-7", "request-6", "request-5"]


async def test_a_small_tenant_waits_for_room_no_longer_than_its_turn() -> None:
    async with router_cluster() as cluster:
        decode = await cluster.decode()
        decode.room = 0
        tasks = [run(cluster, tenant="large", prompt=range(400), max_tokens=1) for _ in range(12)]
        await cluster.until(lambda: cluster.dispatcher.queued == 12)
        tasks.append(run(cluster, tenant="small"))
        await cluster.until(lambda: cluster.dispatcher.queued == 13)
        tried = len(decode.admitted)
        decode.room = 1
        cluster.report("decode-0")
        await asyncio.gather(*tasks)
        taken = [request_id for request_id in began(decode)[tried:] if request_id == "request-13"]
        assert taken
        assert began(decode)[tried:].index("request-13") <= 7


# ---- refused, and measured ----


async def test_what_is_shed_is_counted_by_reason_and_class_and_misses_its_targets() -> None:
    async with router_cluster(DispatchLimits(max_in_flight=1, max_queued=1)) as cluster:
        decode = await cluster.decode()
        decode.pause_after = 0
        running = [run(cluster, slo="interactive") for _ in range(2)]
        await decode.until(lambda: decode.live)
        failure = await failure_of(cluster.run(cluster.request(slo="interactive")))
        assert failure.code == ErrorCode.OVERLOADED
        assert 1000 <= failure.retry_after_ms <= 60_000
        assert cluster.counter("kvferry_requests_shed_total", reason="queue_full", slo="interactive") == 1
        assert cluster.counter("kvferry_queue_depth", slo="interactive") == 1
        decode.resume.set()
        await asyncio.gather(*running)
        assert cluster.counter("kvferry_slo_requests_total", slo="interactive", outcome="no_answer") == 1
        answered = [
            cluster.counter("kvferry_slo_requests_total", slo=INTERACTIVE.name, outcome=outcome)
            for outcome in ("met", "missed_ttft", "missed_tpot")
        ]
        assert sum(answered) == 2


async def test_the_queue_recovers_from_five_times_what_it_takes() -> None:
    # H006
    limits = DispatchLimits(max_in_flight=4, max_queued=16)
    async with router_cluster(limits) as cluster:
        decode = await cluster.decode()
        decode.pause_after = 0
        tasks = [run(cluster) for _ in range(100)]
        await cluster.until(lambda: sum(task.done() for task in tasks) == 80)
        assert (cluster.dispatcher.in_flight, cluster.dispatcher.queued) == (20, 16)
        decode.resume.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert sum(isinstance(result, Answer) for result in results) == 20
        refused = cluster.counter("kvferry_requests_ended_total", outcome="rejected")
        assert refused == cluster.counter("kvferry_requests_shed_total", reason="queue_full", slo="none") == 80
        assert (await cluster.run(cluster.request())).tokens == ANSWER


# ---- deadlines ----


async def test_both_workers_are_told_what_is_left_of_the_time_after_the_queue() -> None:
    async with router_cluster(DispatchLimits(max_in_flight=1)) as cluster:
        decode, prefill = await cluster.decode(), await cluster.prefill()
        decode.pause_after = 0
        first = run(cluster, timeout_s=30.0)
        await decode.until(lambda: decode.live)
        second = run(cluster, timeout_s=20.0)
        await asyncio.sleep(0.1)
        decode.resume.set()
        await asyncio.gather(first, second)
        for told in (decode.admitted[1], prefill.requests[1]):
            assert 0 < told.deadline_ms <= 19_900


async def test_a_later_attempt_has_no_more_time_than_the_first_left() -> None:
    async with router_cluster() as cluster:
        decode, prefill = await cluster.decode(), await cluster.prefill()
        prefill.failures = [error(ErrorCode.UNAVAILABLE)]
        await cluster.run(cluster.request(timeout_s=20.0))
        first, later = (admit.deadline_ms for admit in decode.admitted[:2])
        assert 0 < later <= first <= 20_000


async def test_a_request_whose_deadline_passes_in_the_queue_is_never_started() -> None:
    # H010
    async with router_cluster(DispatchLimits(max_in_flight=1)) as cluster:
        decode, prefill = await cluster.decode(), await cluster.prefill()
        decode.pause_after = 0
        running = run(cluster)
        await decode.until(lambda: decode.live)
        late = [run(cluster, timeout_s=0.05) for _ in range(20)]
        for task in late:
            assert (await failure_of(task)).code == ErrorCode.DEADLINE_EXCEEDED
        decode.resume.set()
        await running
        await cluster.run(cluster.request())
        assert began(decode) == ["request-1", "request-22"]
        assert [sent.request_id for sent in prefill.requests] == ["request-1", "request-22"]

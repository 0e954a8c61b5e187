"""Routers side by side: they share workers and nothing else. Two control sides in one event loop, one fake worker."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from router.dispatch.dispatch_limits import DispatchLimits
from router.generation import TokenBatch
from tests.support.fake_workers import FakeDecode
from tests.support.router_cluster import ANSWER, RouterCluster, router_cluster

WORKER = "decode-0"


@asynccontextmanager
async def another_router(first: RouterCluster) -> AsyncIterator[RouterCluster]:
    """A second router, with the worker that the first one has."""
    second = RouterCluster(DispatchLimits(), frozenset())
    try:
        second.attached[WORKER] = second.registry.attach(first.attached[WORKER].register, lambda: None)
        yield second
        assert second.dispatcher.in_flight == 0
    finally:
        await second.links.close()


async def reported_to(routers: tuple[RouterCluster, ...], worker: FakeDecode, peaks: list[int]) -> None:
    """Load reports, as a worker sends them to each of its routers; notes how full it is."""
    while True:
        peaks.append(len(worker.live))
        for router in routers:
            router.report(WORKER, sequences_running=len(worker.live))
        await asyncio.sleep(0.005)


async def test_two_routers_do_not_overfill_one_worker_and_every_request_is_answered() -> None:
    async with router_cluster() as first:
        worker = await first.decode(WORKER)
        async with another_router(first) as second, asyncio.timeout(30):
            worker.room = 2
            peaks: list[int] = []
            reports = asyncio.create_task(reported_to((first, second), worker, peaks))
            runs = [router.run(router.request()) for router in (first, second) for _ in range(6)]
            answers = await asyncio.gather(*runs)
            reports.cancel()
            assert [tuple(answer.tokens) for answer in answers] == [tuple(ANSWER)] * 12
            assert max(peaks) <= 2
            assert not worker.live


async def test_a_lost_router_takes_its_own_sequences_along_and_no_others() -> None:
    async with router_cluster() as staying:
        worker = await staying.decode(WORKER)
        async with another_router(staying) as leaving:
            worker.pause_after = 3
            stays = staying.stream(staying.request(request_id="stays"))
            leaves = leaving.stream(leaving.request(request_id="leaves"))
            kept, _ = await anext(stays), await anext(leaves)
            assert isinstance(kept, TokenBatch)
            await worker.until(lambda: len(worker.live) == 2)

            # As when its process is killed: the connection breaks, and nobody says goodbye.
            await leaving.links.close()
            await worker.until(lambda: [request_id for request_id, _ in worker.live] == ["stays"])
            await leaves.aclose()

            worker.resume.set()
            tokens = [token.token_id for token in kept.tokens]
            async for item in stays:
                tokens += [token.token_id for token in item.tokens] if isinstance(item, TokenBatch) else []
            assert tokens == list(ANSWER)


async def test_a_router_that_joins_under_load_serves_at_once() -> None:
    async with router_cluster() as first:
        worker = await first.decode(WORKER)
        worker.pause_after = 3
        busy = asyncio.create_task(first.run(first.request()))
        await worker.until(lambda: worker.live)
        async with another_router(first) as second:
            worker.pause_after = None
            assert (await second.run(second.request())).tokens == list(ANSWER)
        worker.resume.set()
        assert (await busy).tokens == list(ANSWER)

"""Many requests at once: how they are spread, what a lost worker costs them, that every count is right at the end."""

import asyncio
import random
from collections import Counter
from contextlib import aclosing

import pytest

from kvferry_rpc.common_pb2 import ErrorCode
from kvferry_rpc.internal_pb2 import KVEvent
from router.dispatch.dispatch_limits import DispatchLimits
from router.generation import TokenEnd
from runtime.errors import KvferryError
from tests.support.fake_model import continuation
from tests.support.fake_workers import error
from tests.support.router_cluster import ANSWER, PROMPT, RouterCluster, router_cluster


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
        (hasher,) = cluster.registry.hashers.values()
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
        # As many as it says that it takes; the others wait for their turn.
        await doomed.until(lambda: len(doomed.live) == 16)
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

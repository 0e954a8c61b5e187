"""The router's part in a pull: it names a source, carries one ticket to it, and waits for nothing."""

import asyncio

import pytest

from kvferry_rpc.common_pb2 import Error, ErrorCode, KVCacheLayout
from kvferry_rpc.internal_pb2 import Ticket
from router.dispatch.dispatch_limits import DispatchLimits
from router.generation import TokenEnd
from tests.support.fake_model import continuation
from tests.support.fake_workers import BLOCK_SIZE
from tests.support.router_cluster import ANSWER, PROMPT, RouterCluster, first_tokens, router_cluster

WANTED = Ticket(
    handoff_id="prefill-0/wants",
    attempt=1,
    decode_worker_id="prefill-0",
    block_ids=[4, 5],
    layout=KVCacheLayout(block_size=BLOCK_SIZE),
)


async def pair(cluster: RouterCluster, *, salt: bytes = b"") -> None:
    """A decode worker that holds the beginning of the prompt, and a prefill worker that does not."""
    await cluster.decode()
    await cluster.prefill()
    cluster.caches("decode-0", PROMPT, salt)


async def test_the_ticket_of_a_pull_goes_to_its_source_with_the_tokens_of_its_blocks() -> None:
    async with router_cluster() as cluster:
        await pair(cluster, salt=b"tenant")
        decode, prefill = cluster.fabric.decodes["decode-0"], cluster.workers["prefill-0"]
        prefill.pulls, prefill.pulled_tokens, prefill.cached_tokens = [WANTED], 32, 32  # type: ignore[union-attr]
        answer = await cluster.run(cluster.request(cache_salt=b"tenant"))
        assert answer.tokens == ANSWER
        (sent,) = prefill.requests  # type: ignore[union-attr]
        assert (sent.source.decode_worker, sent.source.num_tokens) == ("decode-0", 32)
        await decode.until(lambda: decode.exports)
        (export,) = decode.exports
        assert (export.request_id, export.attempt, export.cache_salt) == ("request-1", 1, b"tenant")
        assert list(export.prompt_token_ids) == list(PROMPT[:32])
        assert export.ticket == WANTED
        assert 0 < export.deadline_ms <= 20_000
        assert answer.end.receipt.pulled_tokens == 32
        assert "pulls up to token 32 from decode-0" in answer.end.receipt.plan_reason


async def test_a_later_attempt_pulls_by_the_tokens_it_continues_from() -> None:
    async with router_cluster() as cluster:
        await pair(cluster)
        decode, prefill = cluster.fabric.decodes["decode-0"], cluster.workers["prefill-0"]
        decode.pause_after = 10
        decode.fail_after = (11, Error(code=ErrorCode.UNAVAILABLE, message="scripted"))
        stream = cluster.stream(cluster.request(max_tokens=20))
        await first_tokens(stream, 10)
        second = await cluster.decode("decode-1")
        text = [*PROMPT, *continuation(PROMPT, 20)]
        cluster.caches("decode-1", text)
        longer = Ticket(handoff_id="x", attempt=1, block_ids=[1, 2, 3], layout=KVCacheLayout(block_size=BLOCK_SIZE))
        prefill.pulls = [longer]  # type: ignore[union-attr]
        decode.resume.set()
        await first_tokens(stream, 10)
        await second.until(lambda: second.exports)
        assert (second.exports[0].attempt, list(second.exports[0].prompt_token_ids)) == (2, text[:48])
        assert isinstance(await anext(stream), TokenEnd)


async def test_a_second_ticket_and_one_beyond_the_prompt_are_not_carried() -> None:
    async with router_cluster() as cluster:
        await pair(cluster)
        decode, prefill = cluster.fabric.decodes["decode-0"], cluster.workers["prefill-0"]
        prefill.pulls = [WANTED, WANTED]  # type: ignore[union-attr]
        await cluster.run(cluster.request())
        beyond = Ticket(handoff_id="y", block_ids=[1, 2, 3], layout=KVCacheLayout(block_size=BLOCK_SIZE))
        prefill.pulls = [beyond]  # type: ignore[union-attr]
        assert (await cluster.run(cluster.request())).tokens == ANSWER
        prefill.pulls = [WANTED]  # type: ignore[union-attr]
        await cluster.run(cluster.request())
        await decode.until(lambda: len(decode.exports) >= 2)
        assert [export.request_id for export in decode.exports] == ["request-1", "request-3"]


async def test_a_source_whose_session_is_lost_is_asked_for_nothing_and_the_answer_is_whole() -> None:
    async with router_cluster() as cluster:
        await cluster.decode("decode-0")
        await cluster.decode("decode-1")
        prefill = await cluster.prefill()
        cluster.caches("decode-1", PROMPT)
        cluster.report("decode-1", sequences_running=9)
        prefill.compute_gate = asyncio.Event()
        running = asyncio.create_task(cluster.run(cluster.request()))
        await prefill.until(lambda: prefill.requests)
        assert prefill.requests[0].source.decode_worker == "decode-1"
        await cluster.kill("decode-1")
        prefill.compute_gate.set()
        assert (await running).tokens == ANSWER


@pytest.mark.parametrize("reuse", [True, False])
async def test_reuse_can_be_switched_off(reuse: bool) -> None:
    async with router_cluster(DispatchLimits(reuse_decode_kv=reuse)) as cluster:
        await pair(cluster)
        prefill = cluster.workers["prefill-0"]
        await cluster.run(cluster.request())
        assert prefill.requests[0].HasField("source") is reuse  # type: ignore[union-attr]

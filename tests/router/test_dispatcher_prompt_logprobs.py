"""Log probabilities of a prompt on their way through the router: all of them, once, before the first token, whatever
becomes of the workers."""

import pytest

from kvferry_rpc.common_pb2 import ErrorCode, PromptTokenLogprob, SamplingParams
from router.generation import GenerationRequest, TokenBatch, TokenEnd
from tests.support.fake_workers import error
from tests.support.router_cluster import ANSWER, PROMPT, RouterCluster, failure_of, router_cluster


def scored_request(cluster: RouterCluster) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=8, temperature=0.0, seed=1, prompt_logprobs=0)
    return cluster.request(sampling=sampling)


async def read(cluster: RouterCluster, request: GenerationRequest) -> tuple[list[TokenBatch], TokenEnd]:
    batches: list[TokenBatch] = []
    async for item in cluster.stream(request):
        if isinstance(item, TokenEnd):
            return batches, item
        batches.append(item)
    raise AssertionError("the stream has no end")


def check(batches: list[TokenBatch]) -> None:
    """The whole answer, and the whole prompt with its first batch."""
    assert [token.token_id for batch in batches for token in batch.tokens] == ANSWER
    expected = [
        PromptTokenLogprob(position=position, token_id=token_id, logprob=-1.0 - token_id, rank=1)
        for position, token_id in enumerate(PROMPT)
    ]
    assert list(batches[0].prompt_logprobs) == expected[1:]
    assert not any(batch.prompt_logprobs for batch in batches[1:])


@pytest.mark.parametrize("remote", [True, False])
async def test_they_come_with_the_first_batch(remote: bool) -> None:
    async with router_cluster() as cluster:
        await cluster.decode()
        if remote:
            await cluster.prefill()
        batches, end = await read(cluster, scored_request(cluster))
        check(batches)
        assert end.cached_tokens == 0


async def test_nobody_who_did_not_ask_gets_any() -> None:
    async with router_cluster() as cluster:
        await cluster.decode()
        await cluster.prefill()
        batches, _ = await read(cluster, cluster.request())
        assert not any(batch.prompt_logprobs for batch in batches)


async def test_a_prefill_worker_lost_before_it_told_all_is_made_good() -> None:
    """Though the decode worker has the KV, and may be done, by then."""
    async with router_cluster() as cluster:
        await cluster.decode()
        prefill = await cluster.prefill()
        prefill.most_scored = 2
        prefill.failures_after_commit.append(error(ErrorCode.UNAVAILABLE))
        batches, end = await read(cluster, scored_request(cluster))
        check(batches)
        assert (end.receipt.attempt, len(end.receipt.earlier_failures)) == (2, 1)
        assert end.cached_tokens == 0


async def test_a_prefill_worker_lost_after_it_told_all_is_not_missed() -> None:
    async with router_cluster() as cluster:
        await cluster.decode()
        prefill = await cluster.prefill()
        prefill.failures_after_commit.append(error(ErrorCode.UNAVAILABLE))
        batches, end = await read(cluster, scored_request(cluster))
        check(batches)
        assert (end.receipt.attempt, len(end.receipt.earlier_failures)) == (1, 0)


async def test_a_decode_worker_lost_later_does_not_bring_them_again() -> None:
    async with router_cluster() as cluster:
        first = await cluster.decode("decode-0")
        prefill = await cluster.prefill()
        first.pause_after = 3
        stream = cluster.stream(scored_request(cluster))
        batches = [await anext(stream)]
        while sum(len(batch.tokens) for batch in batches if isinstance(batch, TokenBatch)) < 3:
            batches.append(await anext(stream))
        second = await cluster.decode("decode-1")
        await cluster.kill("decode-0")
        batches.extend([item async for item in stream])
        check([batch for batch in batches if isinstance(batch, TokenBatch)])
        assert not second.admitted[0].sampling.HasField("prompt_logprobs")
        assert [sent.sampling.HasField("prompt_logprobs") for sent in prefill.requests] == [True, False]


@pytest.mark.parametrize("remote", [True, False])
async def test_a_worker_that_is_done_without_having_told_all_is_at_fault(remote: bool) -> None:
    async with router_cluster() as cluster:
        decode = await cluster.decode()
        decode.most_scored = 2
        if remote:
            (await cluster.prefill()).most_scored = 2
        failure = await failure_of(read(cluster, scored_request(cluster)))
        assert failure.code == ErrorCode.INTERNAL
        assert "log probabilities of the prompt" in failure.message


async def test_what_is_cached_does_not_count_and_nothing_is_pulled() -> None:
    async with router_cluster() as cluster:
        await cluster.decode()
        prefill = await cluster.prefill()
        cluster.caches("decode-0", PROMPT)
        batches, end = await read(cluster, scored_request(cluster))
        check(batches)
        assert not prefill.requests[0].HasField("source")
        assert "0 of 40 tokens cached" in end.receipt.plan_reason

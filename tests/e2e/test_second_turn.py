"""The second turn of a chat on real processes: the answer's KV goes from decode to prefill, and the text stays."""

import time

import grpc
import pytest

from kvferry_rpc import public_pb2, public_pb2_grpc
from kvferry_rpc.common_pb2 import KVReceipt, SamplingParams
from tests.support.live_cluster import LiveCluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
MODEL = "tiny-real"
TRIES = 20


def generate(
    cluster: LiveCluster, prompt: list[int], max_tokens: int, cache_salt: str = ""
) -> tuple[list[int], KVReceipt]:
    request = public_pb2.GenerateRequest(
        model=MODEL,
        tokens=public_pb2.TokenIds(ids=prompt),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        with_receipt=True,
        cache_salt=cache_salt,
    )
    with grpc.insecure_channel(cluster.grpc) as channel:
        messages = list(public_pb2_grpc.KvferryStub(channel).Generate(request, timeout=60))
    tokens = [token.token_id for message in messages for token in message.tokens]
    return tokens, messages[-1].finish.receipt


def two_turns(cluster: LiveCluster, number: int) -> tuple[list[int], list[int], KVReceipt]:
    """(prompt, answer, receipt) of the second turn of a chat of its own."""
    prompt = [10 + number, *range(20, 50)]
    answer, _ = generate(cluster, prompt, 70)
    time.sleep(0.6)  # workers tell the router what they have cached a few times a second, and nobody else of it
    second = [*prompt, *answer, 5, 6, 7]
    return second, *generate(cluster, second, 12)


def test_the_second_turn_pulls_what_only_decode_has_and_says_the_same(cluster: LiveCluster) -> None:
    for number in range(TRIES):
        prompt, answer, receipt = two_turns(cluster, number)
        if receipt.pulled_tokens:
            break
    assert receipt.pulled_tokens >= 32, receipt
    assert receipt.prefill_cached_tokens >= receipt.pulled_tokens
    assert receipt.pull_ms > 0
    assert receipt.checksum_verified
    assert receipt.tokens_recomputed == 0
    assert "pulls" in receipt.plan_reason
    # Nobody has anything under this salt: all of it is computed.
    expected, other = generate(cluster, prompt, 12, cache_salt="of nobody else")
    assert (other.pulled_tokens, other.prefill_cached_tokens, other.decode_cached_tokens) == (0, 0, 0)
    assert answer == expected

"""Text over lost workers: the client sees the same characters, the same end and the same tokens, whatever was lost."""

from typing import Any

import pytest

from kvferry_rpc.common_pb2 import ErrorCode, FinishReason, SamplingParams
from router.generation import TextChunk, TextEnd
from router.text.text_generation import generate
from tests.support import fake_workers
from tests.support.fake_workers import error
from tests.support.http_door import ids_of, tokenizer
from tests.support.router_cluster import PROMPT, RouterCluster, router_cluster
from tests.support.sinks import Collected

# Characters of several tokens, the beginning of a stop string that does not come, and one that does.
TEXT = "caf\u00e9 \U0001f468\u200d\U0001f467 ENX \u0e2a\u0e27 EN"
STOP = "END"
AFTER = "D and never this"
SCRIPT = ids_of(TEXT) + ids_of(AFTER)


@pytest.fixture(autouse=True)
def _scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every worker says the same, whatever it was asked: what it is asked is what `test_dispatcher_*` look at."""

    def next_token(tokens: Any) -> int:
        # A resumed answer is continued from exactly what was given out, or it would not be this text.
        output = list(tokens[len(PROMPT) :])
        assert output == SCRIPT[: len(output)]
        return SCRIPT[len(output)]

    monkeypatch.setattr(fake_workers, "next_token", next_token)
    monkeypatch.setattr(fake_workers, "VOCAB", 1 << 20)


async def read(cluster: RouterCluster) -> tuple[str, list[int], TextEnd]:
    sampling = SamplingParams(max_tokens=len(SCRIPT), temperature=0.0, seed=1)
    request = cluster.request(stop=(STOP,), sampling=sampling)
    sink = Collected[TextChunk]()
    end = await generate(cluster.dispatcher, request, tokenizer(), sink)
    text = "".join(chunk.text for chunk in sink.items)
    return text, [token.token_id for chunk in sink.items for token in chunk.tokens], end


async def check(cluster: RouterCluster) -> TextEnd:
    text, tokens, end = await read(cluster)
    assert text == TEXT.removesuffix("EN")
    assert tokens == SCRIPT[: len(tokens)]
    assert end.reason == FinishReason.STOP
    assert end.completion_tokens == len(tokens)
    return end


@pytest.mark.parametrize("remote", [True, False], ids=["remote", "local"])
async def test_a_loss_at_any_token_changes_no_character(remote: bool) -> None:
    async with router_cluster() as cluster:
        first = await cluster.decode("decode-0")
        if remote:
            await cluster.prefill()
        await check(cluster)
        await cluster.decode("decode-1")
        lost = 0
        for position in range(len(SCRIPT) - len(ids_of(AFTER))):
            first.fail_after = (position, error(ErrorCode.UNAVAILABLE, "lost"))
            cluster.report("decode-0")
            cluster.report("decode-1", sequences_running=4)  # So the other one is taken first.
            cluster.registry.succeeded("decode-0")
            end = await check(cluster)
            lost += len(end.receipt.earlier_failures)
        assert lost == position + 1


@pytest.mark.parametrize("length", [4, 5, 7])
async def test_losses_again_and_again_change_no_character(length: int) -> None:
    async with router_cluster() as cluster:
        for number in range(3):
            worker = await cluster.decode(f"decode-{number}")
            worker.fail_after = (length, error(ErrorCode.UNAVAILABLE, "lost"))
        await cluster.prefill()
        end = await check(cluster)
        assert len(end.receipt.earlier_failures) >= 2
        assert end.receipt.attempt == len(end.receipt.earlier_failures) + 1

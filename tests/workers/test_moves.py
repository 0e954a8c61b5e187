"""A running answer goes from one decode worker to another: real engines, a real link, the same text."""

import queue
from pathlib import Path

import pytest
import torch

from decode_worker.hand_over import HandOverRequest, PauseRequest
from decode_worker.worker import sequence_id
from kvferry_rpc.common_pb2 import SamplingParams, TokenOutput
from kvferry_rpc.internal_pb2 import DecodeEvent, PrefillDone
from tests.support.worker_pair import WAIT_S, Request, WorkerPair

_PROMPT = [int(token) for token in torch.randint(3, 96, (29,), generator=torch.Generator().manual_seed(9))]
_COUNT = 20
_SAMPLING = SamplingParams(
    max_tokens=_COUNT, temperature=0.9, seed=5, ignore_eos=True, num_logprobs=2, frequency_penalty=0.5
)


def events_until(request: Request, kind: str) -> list[DecodeEvent]:
    """What the router hears of a request, up to the first event of that kind."""
    heard: list[DecodeEvent] = []
    while not heard or heard[-1].WhichOneof("kind") != kind:
        try:
            event = request._events.get(timeout=WAIT_S)
        except queue.Empty:
            raise AssertionError(f"no {kind} after {heard}") from None
        assert isinstance(event, DecodeEvent)
        assert event.WhichOneof("kind") != "failed", event
        heard.append(event)
    return heard


def tokens(events: list[DecodeEvent]) -> list[TokenOutput]:
    return [token for event in events for token in event.tokens.tokens]


def move(source: WorkerPair, target: WorkerPair, num_tokens: int) -> tuple[list[TokenOutput], DecodeEvent, PrefillDone]:
    """An answer of which the first worker gives so many tokens, and the second one the rest."""
    source.decode_gate.close(after_steps=1 + num_tokens)  # two chunks of the prompt, of which the second gives a token
    request = source.admit(_PROMPT, _SAMPLING, local_prefill=True)
    first: list[TokenOutput] = []
    while len(first) < num_tokens:
        first += tokens(events_until(request, "tokens"))
    seq_id = sequence_id(request.session_id, request.message.request_id, 1)
    source.decode.notify(PauseRequest(seq_id))
    first += tokens(events_until(request, "paused"))
    given = [token.token_id for token in first[:-1]]
    taker = target.admit([*_PROMPT, *given], _SAMPLING, num_output_tokens=len(given))
    ticket = taker.ticket()
    assert ticket is not None
    source.decode.notify(HandOverRequest(seq_id, ticket))
    half = events_until(request, "handed_over")[-1].handed_over
    source.decode_gate.open()
    rest = events_until(taker, "done")
    (verified,) = [event for event in rest if event.WhichOneof("kind") == "verified"]
    assert verified.verified.checksum_verified
    assert verified.verified.checksum == half.checksum
    more = tokens(rest)
    assert more[0] == first[-1], "the token that came along"
    return [*first, *more[1:]], rest[-1], half


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_moved_answer_has_the_tokens_and_log_probabilities_of_one_that_stayed(
    checkpoint: Path, cache: Path, transport: str
) -> None:
    with WorkerPair(checkpoint, cache, transport=transport) as source:
        whole = source.run(_PROMPT, _SAMPLING, local_prefill=True).tokens
        assert len(whole) == _COUNT
    for num_tokens in (1, 4, 11):
        with (
            WorkerPair(checkpoint, cache, transport=transport) as source,
            WorkerPair(checkpoint, cache, transport=transport) as target,
        ):
            moved, end, half = move(source, target, num_tokens)
            assert [(token.index, token.token_id) for token in moved] == [
                (token.index, token.token_id) for token in whole
            ]
            for ours, theirs in zip(moved, whole, strict=True):
                assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            assert end.done.tokens_recomputed == 0
            assert half.transport == transport
            assert half.blocks_sent == -(-(len(_PROMPT) + num_tokens - 1) // 8)

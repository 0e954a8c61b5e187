"""Prompts are scored by the worker that computes them, whole, once, and as transformers scores them."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from kvferry_rpc.common_pb2 import PromptTokenLogprob, SamplingParams
from tests.support.worker_pair import WorkerPair

_TOKENS = [int(token) for token in torch.randint(3, 96, (60,), generator=torch.Generator().manual_seed(4))]
_TOLERANCE = 1e-4


def scored(max_tokens: int = 4) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, prompt_logprobs=2)


def check(model: PreTrainedModel, prompt: Sequence[int], found: Sequence[PromptTokenLogprob]) -> None:
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    assert [(entry.position, entry.token_id) for entry in found] == list(enumerate(prompt))[1:]
    for entry in found:
        row = expected[entry.position - 1]
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=_TOLERANCE)
        best = [top.logprob for top in entry.top_logprobs]
        assert best == pytest.approx(row.topk(2).values.tolist(), abs=_TOLERANCE)


@pytest.mark.parametrize("length", [1, 2, 8, 9, 45])
def test_remote_and_local_prefill_score_alike_and_the_text_is_the_same(
    model: PreTrainedModel, checkpoint: Path, cache: Path, length: int
) -> None:
    prompt = _TOKENS[:length]
    with WorkerPair(checkpoint, cache) as pair:
        remote = pair.run(prompt, scored())
        # The second finds everything in the prefix cache of the worker that it runs on, and may not use it.
        local = pair.run(prompt, scored(), local_prefill=True)
        again = pair.run(prompt, scored())
    check(model, prompt, remote.scored_by_prefill)
    assert local.scored_by_decode == again.scored_by_prefill == remote.scored_by_prefill
    assert remote.scored_by_decode == local.scored_by_prefill == again.scored_by_decode == []
    assert remote.token_ids == local.token_ids == again.token_ids
    assert again.prefill_done is not None
    assert local.decode_done is not None
    assert (again.prefill_done.cached_tokens, local.decode_done.cached_tokens) == (0, 0)


def test_nothing_is_pulled_for_a_prompt_that_is_computed_whole(
    model: PreTrainedModel, checkpoint: Path, cache: Path
) -> None:
    prompt = _TOKENS[:45]
    with WorkerPair(checkpoint, cache) as pair:
        pair.run(prompt, scored(), local_prefill=True)
        outcome = pair.run(prompt, scored(), source_tokens=40)
    check(model, prompt, outcome.scored_by_prefill)
    assert outcome.prefill_done is not None
    assert outcome.prefill_done.pulled_tokens == 0
    # What decode has need not be sent all the same.
    assert outcome.prefill_done.blocks_sent == 1


def test_a_decode_worker_that_preempts_tells_nothing_of_prompts_that_it_received(
    model: PreTrainedModel, checkpoint: Path, cache: Path
) -> None:
    """Two answers grow out of a pool that holds one and a half."""
    with WorkerPair(checkpoint, cache, num_blocks=13) as pair:
        requests = []
        for first in (0, 20):
            prompt = _TOKENS[first : first + 30]
            request = pair.admit(prompt, scored(max_tokens=40))
            ticket = request.ticket()
            assert ticket is not None
            pair.prefill_into(request, ticket)
            requests.append((prompt, request))
        outcomes = [(prompt, request.wait()) for prompt, request in requests]
        assert pair.decode.snapshot.view.load.preemptions > 0
    for prompt, outcome in outcomes:
        assert len(outcome.tokens) == 40
        assert outcome.scored_by_decode == []
        check(model, prompt, outcome.scored_by_prefill)

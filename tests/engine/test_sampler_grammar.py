"""The mask of a grammar among the other steps of the sampler."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.sampler import Sampler, SampleRow, adjust_logits
from engine.sequence import TokenSample
from kvferry_rpc.common_pb2 import ErrorCode
from runtime.errors import KvferryError
from tests.support.sampling import GREEDY, RANDOM, VOCAB, random_logits, row, sample_one


def mask(*token_ids: int, words: int = (VOCAB + 31) // 32) -> NDArray[np.uint32]:
    bits = np.zeros(words * 32, dtype=np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


def constrained(sample_row: SampleRow, *token_ids: int) -> SampleRow:
    return replace(sample_row, allowed=mask(*token_ids))


@settings(deadline=None, max_examples=60)
@given(
    allowed=st.sets(st.integers(0, VOCAB - 1), min_size=1),
    changes=st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.0, 1.0, 2.0]),
            "top_k": st.sampled_from([0, 1, 5]),
            "top_p": st.sampled_from([0.1, 0.9, 1.0]),
            "min_p": st.sampled_from([0.0, 0.5]),
            "repetition_penalty": st.sampled_from([0.5, 1.0, 2.0]),
            "presence_penalty": st.sampled_from([-2.0, 0.0, 2.0]),
            "logit_bias": st.sampled_from([(), ((3, 100.0), (4, -100.0))]),
        }
    ),
    seed=st.integers(0, 1000),
)
def test_whatever_the_other_parameters_the_token_is_an_allowed_one(
    allowed: set[int], changes: dict[str, Any], seed: int
) -> None:
    sampling = replace(RANDOM, seed=seed, **changes)
    result = sample_one(random_logits(seed), constrained(row(sampling, [1, 2], [3, 4, 3]), *allowed))
    assert result.token_id in allowed


def test_the_filters_work_on_what_the_grammar_leaves() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 7] = 50.0
    chosen = {
        sample_one(logits, constrained(row(replace(RANDOM, top_p=0.9, seed=seed)), 1, 2, 3)).token_id
        for seed in range(40)
    }
    assert chosen == {1, 2, 3}


def test_a_bias_counts_within_the_grammar_and_cannot_lead_out_of_it() -> None:
    sampling = replace(GREEDY, logit_bias=((5, 100.0), (6, 50.0)))
    assert sample_one(torch.zeros(1, VOCAB), constrained(row(sampling), 1, 6)).token_id == 6


def test_stop_tokens_below_min_tokens_stay_impossible() -> None:
    sampling = replace(GREEDY, min_tokens=2, stop_token_ids=frozenset({6}))
    assert sample_one(torch.zeros(1, VOCAB), constrained(row(sampling), 6, 8)).token_id == 8


def test_log_probabilities_are_those_of_the_model_without_the_grammar() -> None:
    logits = random_logits(3)
    sampling = replace(GREEDY, num_logprobs=2)
    free = sample_one(logits, row(sampling))
    bound = sample_one(logits, constrained(row(sampling), 11))
    assert bound.top_logprobs == free.top_logprobs
    assert bound.token_id == 11
    assert bound.logprob == pytest.approx(float(torch.log_softmax(logits[0], -1)[11]), abs=1e-5)


def test_a_row_without_an_allowed_token_is_an_error_of_that_row_alone() -> None:
    logits = random_logits(1, rows=3)
    rows = [row(GREEDY), constrained(row(GREEDY)), constrained(row(GREEDY), 4)]
    first, failed, last = Sampler().sample(logits, rows)
    assert isinstance(first, TokenSample)
    assert isinstance(failed, KvferryError)
    assert failed.code == ErrorCode.INTERNAL
    assert "grammar" in failed.message
    assert last == TokenSample(4)


def test_a_mask_of_every_token_changes_nothing_and_a_wider_one_neither() -> None:
    logits = random_logits(9)
    for sampling in (GREEDY, RANDOM):
        free = sample_one(logits, row(sampling))
        wide = replace(row(sampling), allowed=mask(*range(VOCAB + 20), words=VOCAB // 32 + 3))
        assert sample_one(logits, constrained(row(sampling), *range(VOCAB))) == free
        assert sample_one(logits, wide) == free


def test_the_mask_and_the_logits_are_left_as_they_were() -> None:
    logits = random_logits(2)[0].numpy()
    before, bits = logits.copy(), mask(3)
    scores = adjust_logits(logits, replace(row(GREEDY), allowed=bits))
    assert np.flatnonzero(np.isfinite(scores)).tolist() == [3]
    assert (logits == before).all()
    assert (bits == mask(3)).all()

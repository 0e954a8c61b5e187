"""Biases, penalties and filters of the sampler against transformers' processors and plain definitions."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from engine.sampler import adjust_logits, filter_tokens, nucleus_mask
from tests.support.sampling import GREEDY, RANDOM, VOCAB, kept_ids, random_logits, row, sample_one, transformers_kept

# --- steps 1 to 3: adjusting the logits -----------------------------------------------------------------------------


def test_logit_bias_can_force_and_forbid_a_token() -> None:
    logits = random_logits(2)
    best = int(logits.argmax())
    assert sample_one(logits, row(replace(GREEDY, logit_bias=((4, 100.0),)))).token_id == 4
    forbidden = replace(RANDOM, logit_bias=((best, -100.0),))
    for position in range(50):
        assert sample_one(logits, row(forbidden, position=position)).token_id != best


def test_end_of_text_and_stop_tokens_are_impossible_before_min_tokens() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 0], logits[0, 5], logits[0, 8] = 9.0, 8.0, 7.0
    sampling = replace(GREEDY, min_tokens=2, stop_token_ids=frozenset({5}))
    eos = frozenset({0})
    assert sample_one(logits, row(sampling, output=[], eos=eos)).token_id == 8
    assert sample_one(logits, row(sampling, output=[1], eos=eos)).token_id == 8
    assert sample_one(logits, row(sampling, output=[1, 1], eos=eos)).token_id == 0


def test_ignored_end_of_text_is_an_ordinary_token_for_min_tokens() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 0], logits[0, 5] = 9.0, 10.0
    sampling = replace(GREEDY, min_tokens=2, stop_token_ids=frozenset({5}), ignore_eos=True)
    assert sample_one(logits, row(sampling, eos=frozenset({0}))).token_id == 0


@given(
    st.integers(0, 1000),
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12),
    st.lists(st.integers(0, VOCAB - 1), max_size=12),
    st.floats(0.1, 2.0),
)
@settings(deadline=None, max_examples=50)
def test_repetition_penalty_equals_transformers(seed: int, prompt: list[int], output: list[int], p: float) -> None:
    logits = random_logits(seed)
    adjusted = adjust_logits(logits[0].numpy(), row(replace(GREEDY, repetition_penalty=p), prompt, output))
    expected = RepetitionPenaltyLogitsProcessor(p)(torch.tensor([prompt + output]), logits.clone())
    np.testing.assert_allclose(adjusted, expected[0].numpy(), rtol=1e-6)


@given(
    st.lists(st.integers(0, VOCAB - 1), max_size=30),
    st.floats(-2.0, 2.0),
    st.floats(-2.0, 2.0),
)
@settings(deadline=None, max_examples=50)
def test_presence_and_frequency_penalties_count_the_output_only(
    output: list[int], presence: float, frequency: float
) -> None:
    logits = random_logits(3)
    sampling = replace(GREEDY, presence_penalty=presence, frequency_penalty=frequency)
    adjusted = adjust_logits(logits[0].numpy(), row(sampling, [1, 1, 2], output))
    for token in range(VOCAB):
        count = output.count(token)
        expected = float(logits[0, token]) - frequency * count - (presence if count else 0.0)
        assert adjusted[token] == pytest.approx(expected, abs=1e-4)


def test_adjusting_leaves_the_logits_as_they_were() -> None:
    logits = random_logits(4)
    before = logits.clone()
    sampling = replace(RANDOM, logit_bias=((1, 5.0),), repetition_penalty=1.5, presence_penalty=1.0, min_tokens=5)
    sample_one(logits, row(sampling, output=[3, 4], eos=frozenset({0})))
    assert torch.equal(logits, before)


# --- step 5: filters ------------------------------------------------------------------------------------------------


@given(
    st.integers(0, 10_000),
    st.floats(0.1, 2.0),
    st.integers(0, VOCAB + 5),
    st.floats(0.01, 1.0),
    st.one_of(st.just(0.0), st.floats(0.001, 0.9)),
)
@settings(deadline=None, max_examples=150)
def test_filters_equal_transformers(seed: int, temperature: float, k: int, p: float, min_p: float) -> None:
    logits = random_logits(seed)
    sampling = replace(RANDOM, temperature=temperature, top_k=k, top_p=p, min_p=min_p)
    expected = transformers_kept(logits, sampling)
    kept, scaled = filter_tokens(logits[0].numpy(), sampling)
    ids = torch.arange(VOCAB) if kept is None else torch.from_numpy(kept)
    assert ids.tolist() == torch.isfinite(expected).nonzero()[:, 0].tolist()
    np.testing.assert_allclose(np.exp(scaled), np.exp((expected[ids] - expected.max()).numpy()), rtol=1e-6)


def test_top_p_keeps_the_token_that_crosses_the_threshold() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.5, 0.25, 0.15]]))
    assert kept_ids(logits, replace(RANDOM, top_p=0.4)) == [1]
    assert kept_ids(logits, replace(RANDOM, top_p=0.6)) == [1, 2]
    assert kept_ids(logits, replace(RANDOM, top_p=0.8)) == [1, 2, 3]
    assert kept_ids(logits, replace(RANDOM, top_p=0.95)) == [0, 1, 2, 3]


def test_top_p_works_on_what_top_k_kept() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.5, 0.25, 0.15]]))
    # Of two tokens the first has 2/3, so 0.6 is reached at once; of all four it would not be.
    assert kept_ids(logits, replace(RANDOM, top_k=2, top_p=0.6)) == [1]


def test_top_p_breaks_ties_towards_low_ids_and_top_k_keeps_all_ties() -> None:
    logits = torch.zeros(1, 8)
    logits[0, 6] = 1.0
    assert kept_ids(logits, replace(RANDOM, top_p=0.5)) == [0, 1, 2, 6]
    assert kept_ids(logits, replace(RANDOM, top_k=2)) == list(range(8))


def test_min_p_is_relative_to_the_most_likely_token_after_temperature() -> None:
    logits = torch.log(torch.tensor([[0.6, 0.3, 0.06, 0.04]]))
    assert kept_ids(logits, replace(RANDOM, min_p=0.2)) == [0, 1]
    assert kept_ids(logits, replace(RANDOM, min_p=0.2, temperature=2.0)) == [0, 1, 2, 3]


@given(st.integers(0, 1000), st.floats(0.001, 0.9999), st.sampled_from([0.1, 1.0, 8.0]))
@settings(deadline=None, max_examples=25)
def test_nucleus_of_a_large_vocabulary_equals_the_plain_definition(seed: int, top_p: float, scale: float) -> None:
    logits = np.random.default_rng(seed).standard_normal(5000) * scale
    weights = np.exp(logits - logits.max())
    order = np.argsort(-weights, kind="stable")
    shares = np.cumsum(weights[order]) / weights.sum()
    assume(np.abs(shares - top_p).min() > 1e-9)  # on the very border, rounding decides
    expected = np.zeros(5000, dtype=bool)
    expected[order[: int((shares < top_p).sum()) + 1]] = True
    assert np.array_equal(nucleus_mask(weights, top_p), expected)


def test_a_nucleus_is_never_empty() -> None:
    assert nucleus_mask(np.array([1.0]), 1e-9).tolist() == [True]
    assert nucleus_mask(np.ones(2000), 1e-9).sum() == 1
    assert nucleus_mask(np.full(3000, 0.1), 1.0 - 1e-16).sum() == 3000

"""The sampler's choices: greedy and by noise, log probabilities, failures, and independence of the batch."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.noise import gumbel
from engine.sampler import MIN_LOGPROB, Sampler, SampleRow, adjust_logits
from engine.sequence import SamplingParams, TokenSample
from kvferry_rpc.common_pb2 import ErrorCode
from runtime.errors import KvferryError
from tests.support.sampling import GREEDY, RANDOM, VOCAB, kept_ids, random_logits, row, sample_one, transformers_kept


def failure_of(logits: torch.Tensor, sample_row: SampleRow) -> KvferryError:
    (result,) = Sampler().sample(logits, [sample_row])
    assert isinstance(result, KvferryError)
    return result


sampling_params = st.builds(
    SamplingParams,
    max_tokens=st.just(100),
    min_tokens=st.integers(0, 6),
    temperature=st.sampled_from([0.0, 0.05, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 39, 40, 1000]),
    top_p=st.sampled_from([0.01, 0.3, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    repetition_penalty=st.sampled_from([0.5, 1.0, 1.3, 2.0]),
    presence_penalty=st.sampled_from([-2.0, 0.0, 0.5]),
    frequency_penalty=st.sampled_from([-1.0, 0.0, 0.25]),
    logit_bias=st.sampled_from([(), ((3, 100.0),), ((3, -100.0), (4, 2.5))]),
    num_logprobs=st.sampled_from([None, 0, 1, 5, 20]),
    stop_token_ids=st.sampled_from([frozenset[int](), frozenset({5, 6})]),
    ignore_eos=st.booleans(),
    seed=st.integers(0, 2**64 - 1),
)
sample_rows = st.builds(
    row,
    sampling_params,
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=10),
    st.lists(st.integers(0, VOCAB - 1), max_size=10),
    st.sampled_from([frozenset[int](), frozenset({0}), frozenset({0, 7})]),
)


# --- greedy ---------------------------------------------------------------------------------------------------------


def test_greedy_takes_the_argmax_of_each_row() -> None:
    logits = random_logits(1, rows=5)
    results = Sampler().sample(logits, [row(GREEDY)] * 5)
    assert results == [TokenSample(token) for token in logits.argmax(dim=1).tolist()]


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [9, 17, 33]] = 5.0
    assert sample_one(logits, row(GREEDY)).token_id == 9
    penalised = replace(GREEDY, presence_penalty=1.0)
    assert sample_one(logits, row(penalised, output=[9])).token_id == 17


def test_no_rows_give_no_samples() -> None:
    assert Sampler().sample(torch.empty(0, VOCAB), []) == []


# --- step 6: noise --------------------------------------------------------------------------------------------------


@given(st.integers(0, 1000), sample_rows)
@settings(deadline=None, max_examples=100)
def test_the_sample_is_the_argmax_of_logit_plus_noise_over_the_tokens_kept(seed: int, sample_row: SampleRow) -> None:
    sampling = sample_row.sampling
    logits = random_logits(seed)
    scores = adjust_logits(logits[0].numpy(), sample_row)
    if sampling.temperature == 0.0:
        expected = int(scores.argmax())
    else:
        noise = gumbel(sampling.seed, sample_row.position, np.arange(VOCAB, dtype=np.uint32))
        ids = kept_ids(torch.from_numpy(scores)[None], sampling)
        expected = max(ids, key=lambda token: float(scores[token]) / sampling.temperature + noise[token])
    assert sample_one(logits, sample_row).token_id == expected


GOLDEN_TOKENS = [37, 39, 24, 25, 27, 31, 29, 39, 38, 38, 31, 29]


def test_a_fixed_sampled_sequence_never_changes() -> None:
    logits = torch.linspace(0, 3, VOCAB)[None]
    sampling = replace(RANDOM, top_k=20, top_p=0.9, temperature=0.8, seed=123456789)
    assert [sample_one(logits, row(sampling, position=i)).token_id for i in range(12)] == GOLDEN_TOKENS


def test_sampled_frequencies_match_softmax_over_the_tokens_kept() -> None:
    logits = torch.linspace(0, 3, VOCAB)[None]
    sampling = replace(RANDOM, top_k=12, temperature=0.9, seed=99)
    scores = transformers_kept(logits, sampling)
    expected = torch.softmax(scores, dim=0).numpy()
    draws = 12_000
    rows = [row(sampling, position=i) for i in range(draws)]
    results = Sampler().sample(logits.expand(draws, VOCAB), rows)
    counts = np.bincount([r.token_id for r in results if isinstance(r, TokenSample)], minlength=VOCAB)
    inside = expected > 0
    assert counts[~inside].sum() == 0
    statistic = ((counts[inside] - draws * expected[inside]) ** 2 / (draws * expected[inside])).sum()
    assert statistic < 31.3  # 11 degrees of freedom, 99.9 %


def test_other_seeds_give_other_samples() -> None:
    flat = torch.zeros(1, VOCAB)
    tokens = {sample_one(flat, row(replace(RANDOM, seed=seed))).token_id for seed in range(40)}
    assert len(tokens) > 15


@given(st.integers(0, 1000), st.lists(sample_rows, min_size=2, max_size=6), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=60)
def test_a_row_is_sampled_the_same_in_any_batch(seed: int, rows: list[SampleRow], shuffler: Any) -> None:
    logits = random_logits(seed, rows=len(rows))
    sampler = Sampler()
    alone = [sampler.sample(logits[i : i + 1], [rows[i]])[0] for i in range(len(rows))]
    assert sampler.sample(logits, rows) == alone
    order = list(range(len(rows)))
    shuffler.shuffle(order)
    assert Sampler().sample(logits[order], [rows[i] for i in order]) == [alone[i] for i in order]


def test_one_sampler_serves_vocabularies_of_different_size() -> None:
    sampler = Sampler()
    for vocab in (VOCAB, 7, 100):
        logits = random_logits(5, vocab=vocab)
        assert sampler.sample(logits, [row(RANDOM)]) == Sampler().sample(logits, [row(RANDOM)])


@pytest.mark.parametrize("temperature", [1e-45, 1e-20, 1e-3])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = random_logits(6)
    chosen = sample_one(logits, row(replace(RANDOM, temperature=temperature, top_p=0.9, min_p=0.1)))
    assert chosen.token_id == int(logits.argmax())


# --- log probabilities ----------------------------------------------------------------------------------------------


@given(st.integers(0, 1000), sample_rows)
@settings(deadline=None, max_examples=60)
def test_logprobs_are_the_log_softmax_of_the_raw_logits(seed: int, sample_row: SampleRow) -> None:
    logits = random_logits(seed)
    result = sample_one(logits, sample_row)
    count = sample_row.sampling.num_logprobs
    if count is None:
        assert result.logprob is None
        assert result.top_logprobs == ()
        return
    expected = torch.log_softmax(logits[0].double(), dim=0)
    assert result.logprob == pytest.approx(float(expected[result.token_id]), abs=1e-5)
    top = torch.topk(expected, count)
    assert [token for token, _ in result.top_logprobs] == top.indices.tolist()
    assert [value for _, value in result.top_logprobs] == pytest.approx(top.values.tolist(), abs=1e-5)


def test_top_logprobs_list_equals_by_lowest_id() -> None:
    result = sample_one(torch.zeros(1, VOCAB), row(replace(GREEDY, num_logprobs=20)))
    assert [token for token, _ in result.top_logprobs] == list(range(20))


def test_logprobs_of_impossible_tokens_stay_finite_and_none_is_positive() -> None:
    logits = torch.full((1, VOCAB), -math.inf)
    logits[0, 4] = 1000.0
    result = sample_one(logits, row(replace(RANDOM, num_logprobs=3)))
    assert result == TokenSample(4, 0.0, ((4, 0.0), (0, MIN_LOGPROB), (1, MIN_LOGPROB)))


# --- failures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("sampling", [GREEDY, RANDOM, replace(RANDOM, top_k=5, top_p=0.5, repetition_penalty=1.2)])
def test_a_row_with_unusable_logits_fails_alone(bad: float, sampling: SamplingParams) -> None:
    logits = random_logits(7, rows=3)
    logits[1, 20] = bad
    first, second, third = Sampler().sample(logits, [row(sampling)] * 3)
    assert isinstance(second, KvferryError)
    assert second.code == ErrorCode.INTERNAL
    assert [first] == Sampler().sample(logits[:1], [row(sampling)])
    assert [third] == Sampler().sample(logits[2:], [row(sampling)])


@pytest.mark.parametrize("sampling", [GREEDY, RANDOM, replace(RANDOM, top_k=5, top_p=0.5)])
def test_a_row_in_which_no_token_is_possible_fails(sampling: SamplingParams) -> None:
    assert failure_of(torch.full((1, VOCAB), -math.inf), row(sampling)).code == ErrorCode.INTERNAL
    everything = replace(sampling, min_tokens=1, stop_token_ids=frozenset(range(VOCAB)))
    assert failure_of(random_logits(8), row(everything)).code == ErrorCode.INTERNAL


@pytest.mark.parametrize("token", [VOCAB, 999_999_999, -1])
def test_a_token_id_outside_the_vocabulary_fails_its_row_only(token: int) -> None:
    logits = random_logits(9, rows=2)
    for sampling, prompt, field in (
        (replace(GREEDY, logit_bias=((token, 1.0),)), [1], "logit_bias"),
        (replace(GREEDY, min_tokens=1, stop_token_ids=frozenset({token})), [1], "stop_token_ids"),
        (replace(GREEDY, repetition_penalty=1.1), [token], "prompt"),
    ):
        bad, good = Sampler().sample(logits, [row(sampling, prompt), row(GREEDY)])
        assert isinstance(bad, KvferryError)
        assert (bad.code, bad.field) == (ErrorCode.INVALID_REQUEST, field)
        assert isinstance(good, TokenSample)


def test_logits_that_do_not_fit_the_rows_are_a_defect_of_the_caller() -> None:
    with pytest.raises(ValueError, match="do not fit 2 rows"):
        Sampler().sample(random_logits(1), [row(GREEDY)] * 2)
    with pytest.raises(ValueError, match="fp32"):
        Sampler().sample(random_logits(1).double(), [row(GREEDY)])

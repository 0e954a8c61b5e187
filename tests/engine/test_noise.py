"""The noise is one fixed function of (seed, position, token id), and it is good enough to sample with."""

import math
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.noise import gumbel, noise_bits, open_unit, row_key, uniform

MASK32 = 0xFFFFFFFF
MASK64 = 0xFFFFFFFFFFFFFFFF


def bits_by_definition(seed: int, position: int, token_id: int) -> int:
    """The formula of the module's docstring in plain integers."""

    def mix64(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK64
        x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK64
        return x ^ x >> 31

    def mix32(x: int) -> int:
        x = (x ^ x >> 16) * 0x85EBCA6B & MASK32
        x = (x ^ x >> 13) * 0xC2B2AE35 & MASK32
        return x ^ x >> 16

    golden = 0x9E3779B97F4A7C15
    key = mix64(mix64(seed + golden & MASK64) + (position + 1) * golden & MASK64)
    return mix32(mix32(token_id * 0x9E3779B1 + key & MASK32) ^ key >> 32)


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint32)


GOLDEN = {
    (0, 0): [272556288, 1728480116, 137464859, 715887870],
    (42, 7): [4004292770, 698433156, 4214353466, 4149027885],
    (MASK64, 131071): [1989647019, 1209099869, 145750392, 1069998265],
}
GOLDEN_GUMBEL = [2.6581611739543245, -0.5968343561624969]


def test_golden_values_never_change() -> None:
    assert noise_bits(0, 0, ids(0, 1, 2, 49151)).tolist() == GOLDEN[0, 0]
    assert noise_bits(42, 7, ids(0, 1, 2, 49151)).tolist() == GOLDEN[42, 7]
    assert noise_bits(MASK64, 131071, ids(0, 1, 2, 49151)).tolist() == GOLDEN[MASK64, 131071]
    assert gumbel(42, 7, ids(0, 1)).tolist() == pytest.approx(GOLDEN_GUMBEL, rel=1e-12)


@given(st.integers(0, MASK64), st.integers(0, 2**31), st.lists(st.integers(0, MASK32), min_size=1, max_size=5))
@settings(deadline=None, max_examples=60)
def test_vectorised_bits_equal_the_definition(seed: int, position: int, tokens: list[int]) -> None:
    assert noise_bits(seed, position, ids(*tokens)).tolist() == [
        bits_by_definition(seed, position, token) for token in tokens
    ]


@given(st.integers(0, MASK64), st.integers(0, 2**20), st.lists(st.integers(0, 200_000), min_size=1, max_size=40))
@settings(deadline=None, max_examples=40)
def test_a_token_has_the_same_noise_whatever_others_are_asked_with_it(
    seed: int, position: int, tokens: list[int]
) -> None:
    together = gumbel(seed, position, ids(*tokens))
    alone = [gumbel(seed, position, ids(token))[0] for token in tokens]
    np.testing.assert_allclose(together, alone, rtol=1e-14)


def test_uniform_is_never_zero_or_one_even_for_extreme_bits() -> None:
    low, high = open_unit(ids(0, MASK32)).tolist()
    assert low == 2.0**-33
    assert high == 1.0 - 2.0**-33
    assert math.isfinite(-math.log(-math.log(low)))
    assert math.isfinite(-math.log(-math.log(high)))


def test_seeds_are_taken_modulo_two_to_the_64() -> None:
    assert row_key(5, 3) == row_key(5 + 2**64, 3)
    assert row_key(-1, 3) == row_key(MASK64, 3)


def test_distinct_tokens_of_a_row_get_distinct_bits() -> None:
    bits = noise_bits(9, 9, np.arange(200_000, dtype=np.uint32))
    assert len(np.unique(bits)) == 200_000


def test_other_seeds_and_positions_give_other_rows() -> None:
    keys = {row_key(seed, position) for seed in range(100) for position in range(100)}
    assert len(keys) == 10_000
    # A shifted seed must not replay another seed's positions.
    assert row_key(1, 0) != row_key(0, 1)


def test_threads_see_the_same_values() -> None:
    expected = gumbel(1, 2, np.arange(5000, dtype=np.uint32))
    results: list[np.ndarray] = []
    threads = [
        threading.Thread(target=lambda: results.append(gumbel(1, 2, np.arange(5000, dtype=np.uint32))))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    assert all(np.array_equal(result, expected) for result in results)


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("axis", ["token", "position", "seed"])
def test_uniform_fills_its_bins_evenly_along_each_axis(axis: str) -> None:
    n, bins = 25_600, 256
    if axis == "token":
        values = uniform(3, 5, np.arange(n, dtype=np.uint32))
    elif axis == "position":
        values = np.concatenate([uniform(3, i, ids(11)) for i in range(n)])
    else:
        values = np.concatenate([uniform(i, 5, ids(11)) for i in range(n)])
    counts = np.bincount((values * bins).astype(int), minlength=bins)
    assert 170 < chi_square(counts, np.full(bins, n / bins)) < 350  # 255 degrees of freedom: 0.002 to 99.99 %


@pytest.mark.parametrize(("seed_step", "position_step", "token_step"), [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0)])
def test_neighbours_are_not_correlated(seed_step: int, position_step: int, token_step: int) -> None:
    tokens = np.arange(100, dtype=np.uint32)
    here = np.concatenate([uniform(s, p, tokens) for s in range(20) for p in range(20)])
    there = np.concatenate(
        [
            uniform(s + seed_step, p + position_step, tokens + np.uint32(token_step))
            for s in range(20)
            for p in range(20)
        ]
    )
    assert abs(np.corrcoef(here, there)[0, 1]) < 4 / np.sqrt(len(here))


def test_gumbel_argmax_frequencies_match_softmax() -> None:
    logits = np.linspace(0.0, 3.5, 30)
    probabilities = np.exp(logits) / np.exp(logits).sum()
    tokens = np.arange(30, dtype=np.uint32)
    draws = 15_000
    chosen = [int((logits + gumbel(2024, position, tokens)).argmax()) for position in range(draws)]
    counts = np.bincount(chosen, minlength=30)
    assert chi_square(counts, probabilities * draws) < 58.3  # 29 degrees of freedom, 99.9 %

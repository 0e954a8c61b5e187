"""Estimates of the queue: how fast it empties, when to come back, who need not wait; and how long answers become."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.admission.shedding import (
    DEFAULT_OUTPUT_TOKENS,
    MAX_RETRY_AFTER_MS,
    MIN_RETRY_AFTER_MS,
    DrainRate,
    OutputLengths,
    is_hopeless,
)


def drained(tokens_per_s: int, seconds: int, start: float = 0.0) -> DrainRate:
    """A queue that stood for so long and emptied at that rate, in ten requests a second."""
    rate = DrainRate(start)
    rate.queue_is(True, start)
    for tick in range(1, seconds * 10 + 1):
        rate.served(tokens_per_s // 10, start + tick / 10)
    return rate


def test_the_rate_is_what_went_by_the_time_in_which_somebody_waited() -> None:
    rate = drained(1000, 20)
    assert rate.tokens_per_s(20.0) == pytest.approx(1000, rel=0.05)
    assert rate.wait_s(5000, 20.0) == pytest.approx(5, rel=0.05)


def test_time_without_a_queue_says_nothing_of_the_rate() -> None:
    rate = drained(1000, 20)
    rate.queue_is(False, 20.0)
    for second in range(21, 500):
        rate.served(1, float(second))
    assert rate.tokens_per_s(500.0) == pytest.approx(1000, rel=0.05)


def test_a_cluster_that_became_slower_is_known_for_it_soon() -> None:
    rate = drained(1000, 60)
    for second in range(61, 121):
        rate.served(100, float(second))
    assert rate.tokens_per_s(120.0) == pytest.approx(100, rel=0.7)


def test_too_little_seen_gives_no_rate_and_no_wait() -> None:
    rate = DrainRate(0.0)
    rate.queue_is(True, 0.0)
    for moment in (0.1, 0.2, 0.3, 0.4, 0.5):
        rate.served(100, moment)
    assert rate.wait_s(100, 1.0) is None
    assert rate.wait_s(100, 3.0) is not None
    slow = DrainRate(0.0)
    slow.queue_is(True, 0.0)
    slow.served(100, 1.0)
    assert slow.wait_s(100, 10.0) is None


def test_while_nothing_is_known_the_queue_is_expected_to_stand_as_long_again() -> None:
    rate = DrainRate(0.0)
    assert rate.retry_after_ms(100, 50.0) == MIN_RETRY_AFTER_MS
    rate.queue_is(True, 50.0)
    assert rate.retry_after_ms(100, 57.0) == 7000


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10**9), st.integers(10, 10**6))
def test_the_time_to_come_back_is_one_second_to_sixty(tokens_ahead: int, tokens_per_s: int) -> None:
    retry_after_ms = drained(tokens_per_s, 5).retry_after_ms(tokens_ahead, 5.0)
    assert MIN_RETRY_AFTER_MS <= retry_after_ms <= MAX_RETRY_AFTER_MS
    assert retry_after_ms == pytest.approx(
        min(60_000, max(1000, 1000 * tokens_ahead / (tokens_per_s // 10 * 10))), rel=0.1
    )


def test_only_clear_evidence_makes_a_request_hopeless() -> None:
    assert not is_hopeless(None, 0.001)
    assert not is_hopeless(10.0, 10.0)
    assert not is_hopeless(14.9, 10.0)
    assert is_hopeless(15.1, 10.0)


def test_answers_are_expected_to_be_as_long_as_they_were() -> None:
    lengths = OutputLengths()
    assert lengths.expect("a", 10_000) == DEFAULT_OUTPUT_TOKENS
    assert lengths.expect("a", 7) == 7
    for _ in range(8):
        lengths.note("a", 1000)
    assert lengths.expect("a", 10_000) == 1000
    assert lengths.expect("somebody new", 10_000) == 1000
    for _ in range(8):
        lengths.note("b", 10)
    assert lengths.expect("b", 10_000) == 10
    assert lengths.expect("a", 10_000) == 1000
    assert lengths.expect("a", 100) == 100


def test_of_answers_that_vary_more_than_the_mean_is_expected_and_less_than_the_longest() -> None:
    lengths = OutputLengths()
    for number in range(400):
        lengths.note("a", 100 if number % 2 else 500)
    assert 400 <= lengths.expect("a", 10_000) <= 520


def test_the_tenants_remembered_are_bounded() -> None:
    lengths = OutputLengths()
    for number in range(3000):
        for _ in range(8):
            lengths.note(f"tenant-{number}", 50)
    for _ in range(300):
        lengths.note("one more", 900)
    assert lengths.expect("tenant-0", 10_000) > 50
    assert lengths.expect("tenant-2999", 10_000) == 50

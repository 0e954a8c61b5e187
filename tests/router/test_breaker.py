"""When a worker that keeps failing gets no more requests, and when it gets one again."""

from hypothesis import given, settings
from hypothesis import strategies as st

from router.workers.breaker import FIRST_OPEN_S, LONGEST_OPEN_S, MAX_FAILURES, Breaker, BreakerState

HALF = 0.5  # jitter that changes nothing


def opened(at: float = 0.0) -> Breaker:
    breaker = Breaker()
    for _ in range(MAX_FAILURES):
        breaker.failed(at, HALF)
    return breaker


def test_failures_in_a_row_open_it_and_a_success_between_them_does_not() -> None:
    breaker = Breaker()
    for _ in range(5 * MAX_FAILURES):
        breaker.failed(0.0, HALF)
        assert breaker.state(0.0) is BreakerState.CLOSED
        breaker.succeeded()
    for count in range(1, MAX_FAILURES + 1):
        breaker.failed(0.0, HALF)
        assert (breaker.state(0.0) is BreakerState.OPEN) is (count == MAX_FAILURES)
    assert not breaker.lets_through(0.0)


def test_after_a_while_one_probe_goes_through_and_no_second_one() -> None:
    breaker = opened()
    assert breaker.state(FIRST_OPEN_S * 0.99) is BreakerState.OPEN
    assert breaker.state(FIRST_OPEN_S) is BreakerState.HALF_OPEN
    assert breaker.lets_through(FIRST_OPEN_S)
    probe = breaker.entered()
    assert probe
    assert not breaker.lets_through(FIRST_OPEN_S)
    breaker.left(probe)
    assert breaker.lets_through(FIRST_OPEN_S), "it was cancelled: nothing is known"


def test_a_probe_that_ends_well_closes_it_and_the_count_starts_anew() -> None:
    breaker = opened()
    breaker.entered()
    breaker.succeeded()
    assert breaker.state(FIRST_OPEN_S) is BreakerState.CLOSED
    breaker.failed(FIRST_OPEN_S, HALF)
    assert breaker.state(FIRST_OPEN_S) is BreakerState.CLOSED


def test_a_probe_that_fails_opens_it_for_longer_up_to_a_bound() -> None:
    breaker, now, wait_s = opened(), 0.0, FIRST_OPEN_S
    for _ in range(20):
        now += wait_s
        assert breaker.state(now) is BreakerState.HALF_OPEN
        breaker.failed(now, HALF)
        wait_s = min(2 * wait_s, LONGEST_OPEN_S)
        assert breaker.state(now + 0.99 * wait_s) is BreakerState.OPEN


def test_requests_that_were_there_before_are_no_probes_and_their_failures_prolong_nothing() -> None:
    breaker = Breaker()
    earlier = [breaker.entered() for _ in range(10)]
    for _ in range(10):
        breaker.failed(0.0, HALF)
    assert breaker.state(FIRST_OPEN_S) is BreakerState.HALF_OPEN
    assert breaker.lets_through(FIRST_OPEN_S), "those still under way do not stand in the way of the probe"
    for was_probe in earlier:
        breaker.left(was_probe)
    assert breaker.lets_through(FIRST_OPEN_S)


def test_several_routers_probe_at_different_times() -> None:
    early, late = Breaker(), Breaker()
    for _ in range(MAX_FAILURES):
        early.failed(0.0, 0.0)
        late.failed(0.0, 1.0)
    assert early.state(0.8 * FIRST_OPEN_S) is BreakerState.HALF_OPEN
    assert late.state(1.2 * FIRST_OPEN_S) is BreakerState.OPEN


@settings(deadline=None, max_examples=60)
@given(st.lists(st.sampled_from(["enter", "leave", "succeed", "fail", "wait"]), max_size=40))
def test_it_always_lets_somebody_through_again_within_the_longest_wait(steps: list[str]) -> None:
    breaker, now = Breaker(), 0.0
    entered: list[bool] = []
    for step in steps:
        if step == "enter":
            entered.append(breaker.entered())
        elif step == "leave" and entered:
            breaker.left(entered.pop())
        elif step == "succeed":
            breaker.succeeded()
            assert breaker.lets_through(now)
        elif step == "fail":
            breaker.failed(now, HALF)
        else:
            now += 0.7
    for was_probe in entered:
        breaker.left(was_probe)
    assert breaker.lets_through(now + 1.25 * LONGEST_OPEN_S)

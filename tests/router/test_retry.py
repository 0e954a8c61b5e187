"""The bounds on trying again."""

import random

from kvferry_rpc.common_pb2 import ErrorCode
from router.dispatch.retry import RetryBudget, backoff_s, is_retriable
from runtime.clock import ManualClock
from runtime.errors import KvferryError


def test_the_retry_budget_is_a_tenth_of_the_requests_and_a_trickle() -> None:
    # H032
    clock = ManualClock()
    budget = RetryBudget(5, clock)
    assert [budget.withdraw() for _ in range(6)] == [True] * 5 + [False]
    for _ in range(19):
        budget.deposit()
    assert [budget.withdraw() for _ in range(2)] == [True, False]
    clock.advance(2.0)
    assert [budget.withdraw() for _ in range(4)] == [True, True, False, False]
    clock.advance(10_000)
    assert sum(budget.withdraw() for _ in range(100)) == 5


def test_backoff_grows_and_is_jittered() -> None:
    rng = random.Random(3)
    delays = [[backoff_s(failures, rng) for _ in range(200)] for failures in (1, 2, 3)]
    means = [sum(each) / len(each) for each in delays]
    assert means[0] * 1.5 < means[1] < means[2] / 1.5
    assert all(len(set(each)) > 150 for each in delays)
    assert max(backoff_s(50, rng) for _ in range(200)) <= 1.5


def test_only_failures_that_another_worker_may_not_have_are_tried_again() -> None:
    retried = {code for code in ErrorCode.values() if code and is_retriable(KvferryError(code, ""))}
    assert retried == {ErrorCode.UNAVAILABLE, ErrorCode.HANDOFF_FAILED}

"""Whose turn it is: fair between tenants, in order and without starving within one, nothing lost."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.admission.fair_queue import (
    AGING_TOKENS,
    QUANTUM_TOKENS,
    Excess,
    FairQueue,
    QueueBounds,
    TenantShare,
    TenantShares,
    Waiting,
    equal_shares,
)

MAX_COST = 6000


def queue_of(share_of: TenantShares = equal_shares, max_requests: int = 10**6, max_tokens: int = 10**9) -> FairQueue:
    return FairQueue(QueueBounds(max_requests, max_tokens), share_of)


def anything(_: Waiting) -> bool:
    return True


def nothing(_: Waiting) -> bool:
    return False


def test_equal_requests_of_one_tenant_go_in_the_order_of_their_arrival() -> None:
    queue = queue_of()
    waiting = [queue.push("a", 0, 10) for _ in range(5)]
    assert [queue.pop(anything) for _ in range(6)] == [*waiting, None]


def test_a_higher_priority_goes_first_within_its_tenant() -> None:
    queue = queue_of()
    low, high, low_too = queue.push("a", -1, 10), queue.push("a", 5, 10), queue.push("a", -1, 10)
    assert [queue.pop(anything) for _ in range(3)] == [high, low, low_too]


def test_a_small_tenant_does_not_wait_for_the_backlog_of_a_large_one() -> None:
    queue = queue_of()
    for _ in range(1000):
        queue.push("large", 100, 1000)
    small = queue.push("small", -100, 1000)
    turns = [queue.pop(anything) for _ in range(6)]
    assert small in turns


def test_one_request_larger_than_many_quanta_costs_its_tenant_rounds_and_comes_through() -> None:
    queue = queue_of()
    large = queue.push("a", 0, 100 * QUANTUM_TOKENS)
    for _ in range(200):
        queue.push("b", 0, QUANTUM_TOKENS)
    order = [queue.pop(anything) for _ in range(201)]
    assert 90 <= order.index(large) <= 110


@settings(deadline=None, max_examples=40)
@given(
    weights=st.lists(st.sampled_from([0.1, 0.5, 1.0, 2.0, 7.0]), min_size=2, max_size=4),
    costs=st.lists(st.integers(1, MAX_COST), min_size=1, max_size=40),
    turns=st.integers(1, 120),
)
def test_while_tenants_wait_what_they_are_served_by_weight_differs_by_a_constant(
    weights: list[float], costs: list[int], turns: int
) -> None:
    names = [f"tenant-{index}" for index in range(len(weights))]
    share = dict(zip(names, weights, strict=True))
    queue = queue_of(lambda name: TenantShare(weight=share[name]))
    number = 0
    for name in names * 3:
        queue.push(name, 0, costs[number % len(costs)])
        number += 1
    served: Counter[str] = Counter()
    history: list[dict[str, float]] = [dict.fromkeys(names, 0.0)]
    for _ in range(turns):
        gone = queue.pop(anything)
        assert gone is not None
        served[gone.tenant] += gone.cost
        history.append({name: served[name] / share[name] for name in names})
        queue.finished(gone)
        queue.push(gone.tenant, 0, costs[number % len(costs)])  # All of them always have something waiting.
        number += 1
    largest = max(costs)
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            gaps = [at[one] - at[other] for at in history]
            # Over every interval, not only from the start. (A quantum is a whole number: hence the small change.)
            bound = QUANTUM_TOKENS + largest / share[one] + largest / share[other]
            assert max(gaps) - min(gaps) <= bound * 1.01 + 20


@settings(deadline=None, max_examples=25)
@given(
    low=st.integers(-10, 0),
    highs=st.lists(st.tuples(st.integers(-10, 10), st.integers(MAX_COST // 20, MAX_COST)), min_size=1, max_size=30),
    backlog=st.lists(st.tuples(st.integers(-100, 100), st.integers(1, MAX_COST)), max_size=20),
)
def test_no_request_starves_whatever_comes_after_it(
    low: int, highs: list[tuple[int, int]], backlog: list[tuple[int, int]]
) -> None:
    queue = queue_of()
    for priority, cost in backlog:
        queue.push("a", priority, cost)
    patient = queue.push("a", low, 10)
    served = number = 0
    top = max(priority for priority, _ in highs)
    # What was there, and what comes while its priority still counts.
    may_pass = sum(cost for _, cost in backlog)
    while True:
        high = highs[number % len(highs)]
        queue.push("a", *high)
        may_pass += high[1] if served <= max(0, top - low) * AGING_TOKENS else 0
        gone = queue.pop(anything)
        assert gone is not None
        if gone is patient:
            break
        served += gone.cost
        number += 1
        queue.finished(gone)
        assert served <= may_pass


def test_what_does_not_fit_is_passed_by_other_tenants_but_only_for_as_much_as_it_has_itself() -> None:
    queue = queue_of()
    large = queue.push("large", 0, 1000)
    small = [queue.push("small", 0, 300) for _ in range(10)]
    passed = [queue.pop(lambda waiting: waiting is not large) for _ in range(4)]
    assert passed == [*small[:3], None]
    assert queue.pop(anything) is large
    assert queue.pop(anything) is small[3]


def test_within_its_tenant_nobody_passes_what_does_not_fit() -> None:
    queue = queue_of()
    large, small = queue.push("a", 0, 1000), queue.push("a", 0, 10)
    assert queue.pop(lambda waiting: waiting is small) is None
    assert [queue.pop(anything) for _ in range(2)] == [large, small]


def test_what_has_passed_pays_for_it() -> None:
    queue = queue_of()
    large = queue.push("large", 0, 4 * QUANTUM_TOKENS)
    others = [queue.push("large", 0, QUANTUM_TOKENS) for _ in range(8)]
    small = [queue.push("small", 0, QUANTUM_TOKENS) for _ in range(12)]
    order = [queue.pop(lambda waiting: waiting is not large) for _ in range(4)]
    assert order == small[:4]
    order = [queue.pop(anything) for _ in range(1 + 4)]
    assert order[0] is large
    assert sum(gone in others for gone in order[1:]) >= 2


def test_a_tenant_with_enough_out_is_passed_over_and_saves_nothing() -> None:
    queue = queue_of(lambda name: TenantShare(max_in_flight=2 if name == "a" else None))
    mine = [queue.push("a", 0, 10) for _ in range(4)]
    first, second = queue.pop(anything), queue.pop(anything)
    assert [first, second] == mine[:2]
    assert queue.pop(anything) is None
    other = queue.push("b", 0, 10)
    assert queue.pop(anything) is other
    assert first is not None
    queue.finished(first)
    assert queue.pop(anything) is mine[2]
    assert queue.pop(anything) is None


def test_a_request_that_was_put_back_has_its_old_place() -> None:
    queue = queue_of()
    first, second = queue.push("a", 0, 10), queue.push("a", 0, 10)
    gone = queue.pop(anything)
    assert gone is first
    queue.put_back(first)
    assert (len(queue), queue.tokens) == (2, 20)
    assert [queue.pop(anything), queue.pop(anything)] == [first, second]


def test_a_tenant_that_tries_in_vain_loses_no_share() -> None:
    queue = queue_of()
    for name in ("a", "b"):
        for _ in range(40):
            queue.push(name, 0, QUANTUM_TOKENS)
    for _ in range(50):
        gone = queue.pop(lambda waiting: waiting.tenant == "a")
        if gone is not None:
            queue.put_back(gone)
    served = Counter(gone.tenant for gone in (queue.pop(anything) for _ in range(20)) if gone is not None)
    assert abs(served["a"] - served["b"]) <= 3


@pytest.mark.parametrize(
    ("bounds", "share", "excess"),
    [
        ({"max_requests": 2}, TenantShare(), Excess.REQUESTS),
        ({"max_tokens": 250}, TenantShare(), Excess.TOKENS),
        ({}, TenantShare(max_queued_tokens=250), Excess.TENANT_TOKENS),
    ],
)
def test_the_queue_says_which_bound_one_more_would_break(
    bounds: dict[str, int], share: TenantShare, excess: Excess
) -> None:
    queue = queue_of(lambda _: share, **bounds)
    assert [queue.excess(queue.push("a", 0, 100)) for _ in range(2)] == [None, None]
    third = queue.push("a", 0, 100)
    assert queue.excess(third) is excess
    queue.remove(third)
    queue.remove(third)
    assert (len(queue), queue.tokens) == (2, 200)


def test_the_tokens_ahead_are_those_of_its_tenant_and_what_others_are_due_meanwhile() -> None:
    queue = queue_of()
    for _ in range(100):
        queue.push("large", 0, 100)
    first = queue.push("small", 0, 100)
    assert queue.tokens_ahead(first) == 100
    second = queue.push("small", 0, 100)
    assert queue.tokens_ahead(second) == 100 + 200
    urgent = queue.push("small", 1, 100)
    assert queue.tokens_ahead(urgent) == 100
    assert queue.tokens_ahead(queue.push("large", 0, 100)) == 10_000 + 300


STEP = st.one_of(
    st.tuples(st.just("push"), st.sampled_from("abc"), st.integers(-100, 100), st.integers(1, 5000)),
    st.tuples(st.just("pop"), st.integers(0, 5000), st.just(0), st.just(0)),
    st.tuples(st.sampled_from(["remove", "put_back", "finish"]), st.integers(0, 1000), st.just(0), st.just(0)),
)


@settings(deadline=None, max_examples=100)
@given(st.lists(STEP, max_size=80))
def test_it_agrees_with_a_plain_list_whatever_happens(steps: list[tuple[str, object, int, int]]) -> None:
    caps = {"a": None, "b": 2, "c": 1}
    queue = queue_of(lambda name: TenantShare(max_in_flight=caps[name]))
    waiting: dict[Waiting, tuple[int, int]] = {}
    out: list[Waiting] = []
    order: dict[Waiting, tuple[int, int]] = {}  # Within a tenant: age less what priority makes up for, then number.
    served = 0
    for action, what, priority, cost in steps:
        if action == "push":
            one = queue.push(str(what), priority, cost)
            waiting[one] = order[one] = (served - priority * AGING_TOKENS, len(order))
        elif action == "pop":
            room = int(str(what))
            gone = queue.pop(lambda one, room=room: one.cost <= room)  # type: ignore[misc]
            able = {
                one
                for one in waiting
                if caps[one.tenant] is None or sum(o.tenant == one.tenant for o in out) < caps[one.tenant]
            }
            if gone is None:
                heads = [
                    min((o for o in able if o.tenant == name), key=waiting.__getitem__, default=None) for name in caps
                ]
                assert sum(head is not None and head.cost <= room for head in heads) <= 2  # Too much has passed.
                continue
            assert gone in able
            assert gone.cost <= room
            served += gone.cost
            out.append(gone)
            del waiting[gone]
        elif action == "remove" and waiting:
            one = list(waiting)[int(str(what)) % len(waiting)]
            queue.remove(one)
            del waiting[one]
        elif out:
            one = out.pop(int(str(what)) % len(out))
            if action == "put_back":
                queue.put_back(one)
                waiting[one] = order[one]
            else:
                queue.finished(one)
        assert len(queue) == len(waiting)
        assert queue.tokens == sum(one.cost for one in waiting)
    for one in out:
        queue.finished(one)
    emptied = []
    while (gone := queue.pop(anything)) is not None:
        emptied.append(gone)
        queue.finished(gone)
    assert set(emptied) == set(waiting)
    assert len(emptied) == len(waiting)
    assert not queue.pop(nothing)
    for name in caps:
        # Nobody else comes any more, so within a tenant they leave in order; one may have been held with its turn.
        mine = [waiting[one] for one in emptied if one.tenant == name]
        assert mine[1:] == sorted(mine[1:])

"""Which transport two ends should use, over every combination of what they have."""

import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.choice import (
    PREFERENCE,
    PREFERENCE_WITHOUT_RDMA,
    EndFacts,
    Pair,
    candidates,
    degraded,
    expected,
    order,
)

ALL = ("shm", "nixl", "ucx", "tcp")
SAME_HOST = Pair(same_host=True)
FAR = Pair()
RDMA = Pair(rdma=frozenset({"nixl", "ucx"}))


@pytest.mark.parametrize(
    ("offers", "usable", "pair", "tried", "best"),
    [
        # One host: shm, whatever else there is.
        (ALL, ALL, SAME_HOST, "shm tcp ucx nixl", "shm"),
        (ALL, ALL, Pair(True, frozenset({"nixl"})), "shm nixl tcp ucx", "shm"),
        # Two hosts with RDMA: one-sided first.
        (ALL, ALL, RDMA, "shm nixl ucx tcp", "nixl"),
        (("shm", "ucx", "tcp"), ALL, RDMA, "shm ucx tcp", "ucx"),
        (ALL, ALL, Pair(rdma=frozenset({"ucx"})), "shm ucx tcp nixl", "ucx"),
        # Two hosts without: plain sockets are faster than what the libraries make of TCP.
        (ALL, ALL, FAR, "shm tcp ucx nixl", "tcp"),
        (("nixl", "ucx"), ALL, FAR, "ucx nixl", "ucx"),
        (("nixl",), ALL, FAR, "nixl", "nixl"),
        # Forced: only one is usable at one end, in whichever direction.
        (ALL, ("ucx",), SAME_HOST, "ucx", "ucx"),
        (("nixl",), ALL, SAME_HOST, "nixl", "nixl"),
        # Forbidden at one end: not expected either.
        (ALL, ("tcp", "ucx"), SAME_HOST, "tcp ucx", "tcp"),
        (("ucx", "tcp"), ALL, RDMA, "ucx tcp", "ucx"),
        (("tcp",), ALL, RDMA, "tcp", "tcp"),
        # shm alone is tried even where it should not reach, and is then what was expected.
        (("shm",), ALL, FAR, "shm", "shm"),
        # Nothing in common, nothing offered, nothing usable.
        (("shm",), ("tcp",), SAME_HOST, "", ""),
        ((), ALL, SAME_HOST, "", ""),
        (ALL, (), RDMA, "", ""),
        ((), (), FAR, "", ""),
        # In one process.
        (("memory",), ("memory",), FAR, "memory", "memory"),
        (("memory", "tcp"), ("memory", "tcp"), FAR, "tcp memory", "tcp"),
        # A later version offers what these rules do not know.
        (("carrier-pigeon", "tcp"), ("carrier-pigeon", "tcp"), FAR, "tcp carrier-pigeon", "tcp"),
    ],
)
def test_the_table_of_combinations(
    offers: tuple[str, ...], usable: tuple[str, ...], pair: Pair, tried: str, best: str
) -> None:
    assert candidates(offers, usable, pair) == tried.split()
    assert expected(offers, usable, pair) == best


def test_the_order_in_which_the_ends_name_theirs_does_not_matter() -> None:
    for offers in itertools.permutations(ALL):
        assert candidates(offers, ALL, RDMA) == ["shm", "nixl", "ucx", "tcp"]
        assert candidates(ALL, offers, FAR) == ["shm", "tcp", "ucx", "nixl"]


def test_a_name_offered_twice_is_tried_once() -> None:
    assert candidates(("tcp", "tcp"), ("tcp", "tcp")) == ["tcp"]


@pytest.mark.parametrize(
    ("used", "best", "is_worse"),
    [
        ("tcp", "shm", True),
        ("tcp", "nixl", True),
        ("ucx", "nixl", True),
        ("ucx", "tcp", True),
        ("memory", "tcp", True),
        ("tcp", "tcp", False),
        ("shm", "tcp", False),  # better than what could be hoped for
        ("tcp", "", False),
        ("local", "", False),
    ],
)
def test_only_a_worse_one_than_expected_is_a_degradation(used: str, best: str, is_worse: bool) -> None:
    assert degraded(used, best) is is_worse


def test_what_two_ends_know_makes_the_pair() -> None:
    here = EndFacts("boot-1 pid:[1]", ("nixl", "ucx"))
    assert Pair.of(here, here) == Pair(True, frozenset({"nixl", "ucx"}))
    assert Pair.of(here, EndFacts("boot-2 pid:[1]", ("ucx",))) == Pair(False, frozenset({"ucx"}))
    assert Pair.of(here, EndFacts()) == Pair()
    assert Pair.of(EndFacts(), EndFacts()) == Pair()  # Two unknown hosts are not one host.
    assert Pair.of(EndFacts("h", ("tcp",)), EndFacts("h", ("tcp",))).rdma == frozenset()


def test_facts_of_an_older_end_without_fields_are_unknown_facts() -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode([]), type=EndFacts) == EndFacts()
    facts = EndFacts("h", ("nixl",))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(facts), type=EndFacts) == facts


def test_an_end_lists_what_it_has_best_first() -> None:
    assert order(("tcp", "nixl", "shm", "ucx")) == ("shm", "tcp", "ucx", "nixl")
    assert order(("tcp", "nixl", "shm", "ucx"), ("nixl",)) == ("shm", "nixl", "tcp", "ucx")
    assert order(()) == ()


_names = st.lists(st.sampled_from([*PREFERENCE, "other"]), max_size=6)


@given(_names, _names, st.booleans(), st.sets(st.sampled_from(PREFERENCE_WITHOUT_RDMA)))
@settings(max_examples=200, deadline=None)
def test_what_is_tried_is_what_both_have_and_the_expected_one_is_among_it(
    offers: list[str], usable: list[str], same_host: bool, rdma: set[str]
) -> None:
    pair = Pair(same_host, frozenset(rdma) & {"nixl", "ucx"})
    tried = candidates(offers, usable, pair)
    assert len(tried) == len(set(tried))
    assert set(tried) == set(offers) & set(usable)
    best = expected(offers, usable, pair)
    assert (best in tried) if tried else best == ""
    # Whatever is tried later than the one expected is a degradation, whatever is tried before it is not.
    for name in tried:
        assert degraded(name, best) is (tried.index(name) > tried.index(best))

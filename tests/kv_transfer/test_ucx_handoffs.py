"""Whole hand-offs over ucx: what arrives, what is refused, and that payload faults are noticed."""

from collections.abc import Iterator

import pytest

pytest.importorskip("libucx")

from kv_transfer.events import Committed, Failed, Sent
from kv_transfer.faults import FaultPlan
from kv_transfer.network import build_network
from kv_transfer.transport import Network
from tests.support.kv_pair import Pair

IDS, SOURCE = [3, 4, 7, 1], [9, 8, 2, 3]


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    made = build_network(["ucx", "tcp"], "127.0.0.1")
    yield made
    made.close()


def pair_over(network: Network, plan: FaultPlan | None = None) -> Pair:
    return Pair(transports=("ucx",), shared={"network": network}, sender={"faults": plan})


def test_hand_offs_arrive_verified_over_ucx(network: Network) -> None:
    with pair_over(network) as pair:
        for round_trip in range(5):
            ticket = pair.reserve(IDS, name=f"r{round_trip}")
            pair.send(ticket, SOURCE)
            received, sent = pair.outcome(ticket)
            assert isinstance(received, Committed)
            assert isinstance(sent, Sent)
            assert received.stats.transport == "ucx"
            assert received.stats.verified
            assert sent.stats.transport == "ucx"
            assert "lo" in sent.stats.transport_detail
            assert pair.equal(ticket, SOURCE)
            pair.receiver.release(ticket.handoff_id)


def test_many_hand_offs_at_once_share_the_link(network: Network) -> None:
    with pair_over(network) as pair:
        tickets = [pair.reserve([2 * index, 2 * index + 1], name=f"r{index}") for index in range(8)]
        for ticket in tickets:
            pair.send(ticket, SOURCE[:2])
        for ticket in tickets:
            assert isinstance(pair.outcome(ticket)[0], Committed)
            assert pair.equal(ticket, SOURCE[:2])


@pytest.mark.parametrize(
    "plan",
    [FaultPlan(corrupt_at_post=1), FaultPlan(skip_block=1), FaultPlan(swap_blocks=(0, 2))],
    ids=["corrupt", "skip", "swap"],
)
def test_payload_that_is_not_what_was_fingerprinted_is_refused(network: Network, plan: FaultPlan) -> None:
    with pair_over(network, plan) as pair:
        ticket = pair.reserve(IDS)
        pair.send(ticket, SOURCE)
        received, sent = pair.outcome(ticket)
        assert isinstance(received, Failed)
        assert isinstance(sent, Failed)


def test_an_aborted_hand_off_leaves_the_link_good_for_the_next(network: Network) -> None:
    with pair_over(network) as pair:
        first = pair.reserve(IDS, name="first")
        pair.open(first, SOURCE)
        pair.push(first, range(2))
        assert pair.receiver.abort(first.handoff_id, "enough")
        pair.push(first, range(2, 4))
        assert isinstance(pair.outcome(first)[0], Failed)
        second = pair.reserve(IDS, name="second")
        pair.send(second, SOURCE)
        assert isinstance(pair.outcome(second)[0], Committed)
        assert pair.equal(second, SOURCE)

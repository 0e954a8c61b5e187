"""Whole hand-offs over nixl, both ends in one process."""

from typing import Any

import pytest

pytest.importorskip("nixl_cu12")

from kv_transfer.events import Committed, Failed, Sent
from kv_transfer.faults import FaultPlan
from kv_transfer.network import build_network
from kv_transfer.receive_table import ReceiveCounts
from kv_transfer.transport import Network
from kvferry_rpc.common_pb2 import ErrorCode
from tests.support.kv_pair import LAYOUT, POISON, WAIT_S, Pair, block_of, poison

NOTHING = ReceiveCounts(0, 0, 0, 0)


@pytest.fixture(scope="module")
def network() -> Network:
    return build_network(["nixl", "tcp"], "127.0.0.1")


def nixl_pair(network: Network, **options: Any) -> Pair:
    return Pair(transports=("nixl",), shared={"network": network}, **options)


def test_the_decode_pool_holds_what_the_prefill_pool_held_and_both_say_so(network: Network) -> None:
    with nixl_pair(network) as pair:
        ticket, source = pair.reserve([3, 4, 7, 1]), [9, 8, 2, 3]
        pair.send(ticket, source)
        received, sent = pair.outcome(ticket)
        assert isinstance(received, Committed)
        assert isinstance(sent, Sent)
        assert pair.equal(ticket, source)
        assert (received.stats.transport, sent.stats.transport) == ("nixl", "nixl")
        assert received.stats.verified
        assert received.stats.digest == sent.stats.digest
        assert sent.stats.transport_detail.startswith("UCX, devices ")
        untouched = set(range(16)) - set(ticket.block_ids)
        assert not any(block_of(pair.decode, block).any() for block in untouched)
        pair.receiver.release(ticket.handoff_id)
        assert pair.receiver.snapshot().handoffs == NOTHING
        assert pair.sender.snapshot().handoffs == 0


def test_many_hand_offs_share_one_link(network: Network) -> None:
    with nixl_pair(network, num_blocks=64) as pair:
        jobs = []
        for index in range(12):
            ids = list(range(4 * index, 4 * index + 4))
            jobs.append((pair.reserve(ids), ids[::-1]))
        for ticket, source in jobs:
            pair.open(ticket, source)
        for layer in range(LAYOUT.num_layers):
            for ticket, _ in jobs:
                pair.push(ticket, range(4), range(layer, layer + 1))
        for ticket, _ in jobs:
            pair.commit(ticket, 4)
        for ticket, source in jobs:
            assert isinstance(pair.outcome(ticket)[0], Committed)
            assert pair.equal(ticket, source)
        assert pair.receiver.snapshot().links == 1


@pytest.mark.parametrize(
    "faults", [FaultPlan(corrupt_at_post=1), FaultPlan(skip_block=1), FaultPlan(swap_blocks=(0, 2))], ids=str
)
@pytest.mark.parametrize("verify", [True, False])
def test_wrong_content_is_refused_and_would_land_otherwise(network: Network, faults: FaultPlan, verify: bool) -> None:
    with nixl_pair(network, sender={"faults": faults}, receiver={"verify_checksums": verify}) as pair:
        ticket, source = pair.reserve([3, 4, 7]), [9, 8, 2]
        pair.send(ticket, source)
        received, sent = pair.outcome(ticket)
        assert isinstance(received, Failed if verify else Committed)
        if verify:
            assert isinstance(sent, Failed)
            assert "commit was refused" in received.error.message
        else:
            assert not pair.equal(ticket, source)
        again = pair.reserve([], first_block=1)
        pair.send(again, [0])
        assert isinstance(pair.outcome(again)[0], Committed)


def test_a_cancel_on_either_side_reaches_the_other(network: Network) -> None:
    with nixl_pair(network) as pair:
        first, second = pair.reserve([1]), pair.reserve([2])
        for ticket in (first, second):
            pair.open(ticket, [5])
        pair.wait_until_open(2)
        assert pair.receiver.abort(first.handoff_id, "the client left")
        pair.sender.abort(second.handoff_id, "the client left")
        for ticket in (first, second):
            received, sent = pair.outcome(ticket)
            assert received.error.code == sent.error.code == ErrorCode.CANCELLED


def test_after_the_fence_no_byte_lands(network: Network) -> None:
    """The blocks are poisoned at the fence, as by a new owner, and must stay so while the sender runs out."""
    slow = FaultPlan(bytes_per_second=LAYOUT.page_bytes * 1000)
    with nixl_pair(network, num_blocks=32, sender={"faults": slow}) as pair:
        tickets = []
        for index in range(8):
            ids = list(range(index * 4, index * 4 + 4))
            ticket = pair.reserve(ids)
            tickets.append(ticket)
            pair.send(ticket, [1, 2, 3, 4])
            pair.receiver.abort(ticket.handoff_id, "cancelled")
            pair.outcome(ticket)
            poison(pair.decode, ids)
        pair.sender.close(WAIT_S)
        for ticket in tickets:
            assert all((block_of(pair.decode, block) == POISON).all() for block in ticket.block_ids)


def test_closing_either_end_ends_what_is_open(network: Network) -> None:
    for which in ("sender", "receiver"):
        with nixl_pair(network) as pair:
            ticket = pair.reserve([1, 2])
            pair.open(ticket, [5, 6])
            pair.push(ticket, range(1))
            pair.wait_until_open(1)
            getattr(pair, which).close(WAIT_S)
            received, sent = pair.outcome(ticket)
            assert isinstance(received, Failed)
            assert isinstance(sent, Failed)
            assert pair.receiver.snapshot().handoffs == NOTHING

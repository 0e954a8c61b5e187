"""What a sender may say that writes into the pool by itself: its bytes cannot be kept out, its blocks are kept back."""

from collections.abc import Iterator

import pytest

from kv_transfer import pages
from kv_transfer.events import Failed, Fenced
from kv_transfer.messages import Fence, Open, Opened, Write
from kv_transfer.region import MemoryRegion
from kv_transfer.transport import Channel
from kvferry_rpc.internal_pb2 import Ticket
from tests.support.kv_pair import LAYOUT, Pair, block_of
from tests.support.kv_stranger import answer, greeted, say, still_works

LAYERS = LAYOUT.num_layers


@pytest.fixture
def pair() -> Iterator[Pair]:
    with Pair(transports=("shm",)) as both:
        yield both


def opened(pair: Pair, block_ids: list[int]) -> tuple[Channel, Ticket]:
    ticket = pair.reserve(block_ids)
    channel = greeted(pair, transport="shm")
    say(channel, Open(ticket.handoff_id, 1, ticket.incarnation, ticket.secret, "shm"))
    assert answer(channel) == Opened(ticket.handoff_id)
    return channel, ticket


BAD_WRITES = {
    "another block": (Write("", 0, (2,), 0, LAYERS), b""),
    "a block outside the pool": (Write("", 0, (10**9,), 0, LAYERS), b""),
    "a layer too many": (Write("", 0, (1,), 1, LAYERS), b""),
    "a payload behind it": (Write("", 0, (1,), 0, LAYERS), bytes(LAYOUT.block_bytes)),
    "no page at all": (Write("", 0, (), 0, LAYERS), b""),
}


@pytest.mark.parametrize("name", BAD_WRITES)
def test_a_bad_write_costs_the_link_and_its_blocks_wait_until_the_writer_is_gone(name: str, pair: Pair) -> None:
    channel, ticket = opened(pair, [1])
    message, payload = BAD_WRITES[name]
    say(channel, Write(ticket.handoff_id, message.block_index, message.block_ids, message.layer, LAYERS), payload)
    pair.received.wait(ticket.handoff_id, Failed)
    channel.wait_until_peer_closes()  # The receiver says no more.
    assert pair.receiver.snapshot().handoffs.quarantined == 1
    assert pair.received.kinds(ticket.handoff_id) == ["Failed"]
    channel.stop()
    pair.received.wait(ticket.handoff_id, Fenced)
    channel.close()
    assert still_works(pair)


def test_a_write_larger_than_one_may_be_costs_the_link(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "MAX_WRITE_BYTES", LAYOUT.block_bytes)
    channel, ticket = opened(pair, [1, 3])
    say(channel, Write(ticket.handoff_id, 0, (1, 3), 0, LAYERS))
    assert "the limit is" in pair.received.wait(ticket.handoff_id, Failed).error.message
    channel.stop()
    pair.received.wait(ticket.handoff_id, Fenced)
    channel.close()


def test_a_write_that_comes_after_an_abort_is_no_fault_and_its_fence_still_counts(pair: Pair) -> None:
    """The two passed each other. What landed did so before the fence."""
    channel, ticket = opened(pair, [1])
    pair.receiver.abort(ticket.handoff_id, "cancelled")
    with MemoryRegion.open_remote(ticket.transports[0].descriptor) as pool:
        pool.buffer[LAYOUT.block_bytes : 2 * LAYOUT.block_bytes] = b"\xee" * LAYOUT.block_bytes
    say(channel, Write(ticket.handoff_id, 0, (1,), 0, LAYERS))
    assert pair.received.kinds(ticket.handoff_id) == ["Failed"]
    say(channel, Fence(ticket.handoff_id))
    pair.received.wait(ticket.handoff_id, Fenced)
    assert (block_of(pair.decode, 1) == 0xEE).all()
    assert pair.receiver.snapshot().links == 1
    channel.stop()
    channel.close()


def test_a_stranger_cannot_write_notes_about_the_hand_off_of_another(pair: Pair) -> None:
    channel, ticket = opened(pair, [1])
    other = greeted(pair, transport="shm")
    say(other, Write(ticket.handoff_id, 0, (1,), 0, LAYERS))
    assert "never opened here" in str(answer(other))
    assert pair.received.kinds(ticket.handoff_id) == []
    for one in (other, channel):
        one.stop()
        one.close()

"""Which transport is taken, and what happens when the best one does not reach."""

import msgspec
import pytest

from kv_transfer.events import Drained, Failed, Sent
from kv_transfer.handoff import Failure
from kv_transfer.messages import Write
from kv_transfer.outlet import Backoff
from kv_transfer.receiver import HandoffReceiver
from kv_transfer.sender import SenderSnapshot
from kv_transfer.transport import Channel, TransportError
from kv_transfer.transport_memory import MemoryNetwork
from kv_transfer.transport_shm import PoolWriter
from kv_transfer.transport_tcp import TcpNetwork
from runtime.clock import SystemClock
from tests.support.kv_pair import LAYOUT, Events, Pair, make_identity
from tests.support.kv_stranger import still_works


def test_a_pool_that_cannot_be_mapped_is_reached_over_tcp(caplog: pytest.LogCaptureFixture) -> None:
    with Pair(transports=("shm", "tcp")) as pair:
        ticket = pair.reserve([1])
        assert [offer.name for offer in ticket.transports] == ["shm", "tcp"]
        descriptor = msgspec.msgpack.decode(ticket.transports[0].descriptor)
        descriptor["nonce"] = b"of another life."
        ticket.transports[0].descriptor = msgspec.msgpack.encode(descriptor)
        pair.send(ticket, [2])
        received, sent = pair.outcome(ticket)
        assert isinstance(sent, Sent)
        assert (sent.stats.transport, received.stats.transport) == ("tcp", "tcp")
        assert pair.equal(ticket, [2])
        assert still_works(pair)
        warnings = [record.message for record in caplog.records if "to decode over tcp" in record.message]
        assert len(warnings) == 1, "one for the pair, not one for each hand-off"
        assert "not over shm as expected: " in warnings[0]
        view = pair.sender.snapshot().transports["decode"]
        assert (view.transport, view.expected) == ("tcp", "shm")
        assert "is not the region described" in view.why_not


def test_the_best_transport_both_have_is_taken_and_can_be_forced() -> None:
    for forced, expected in ((None, "shm"), ("tcp", "tcp"), ("shm", "shm")):
        with Pair(transports=("shm", "tcp"), sender={"forced": forced}) as pair:
            ticket = pair.reserve([1])
            pair.send(ticket, [2])
            assert pair.outcome(ticket)[1].stats.transport == expected


def test_without_a_transport_in_common_the_hand_off_fails_naming_both_lists() -> None:
    with Pair(transports=("tcp",), sender={"transports": ("shm",)}) as pair:
        ticket = pair.reserve([1])
        pair.send(ticket, [2])
        message = pair.sent.wait(ticket.handoff_id, Failed).error.message
        assert "offers tcp" in message
        assert "uses shm" in message


def test_a_private_pool_is_not_offered_over_shm() -> None:
    private = make_identity("decode", 4, shared=False)
    receiver = HandoffReceiver(private, bind_host="127.0.0.1", clock=SystemClock(), on_event=Events())
    receiver.start()
    assert [offer.name for offer in receiver.reserve("r", 1, 0, [0], 8).transports] == ["tcp"]
    receiver.close(5.0)
    private.pool.close()


def test_a_peer_that_cannot_be_reached_is_not_dialled_again_at_once() -> None:
    dialled: list[str] = []

    class Counting(TcpNetwork):
        def connect(self, address: str, timeout_s: float) -> Channel:
            dialled.append(address)
            return super().connect(address, timeout_s)

    with Pair(transports=("tcp",), sender={"network": Counting()}) as pair:
        for round_ in range(20):
            ticket = pair.reserve([round_ % 16], name=f"r{round_}") if round_ < 16 else pair.reserve([], first_block=1)
            ticket.data_address = "127.0.0.1:1"
            pair.open(ticket, [0])
            failed = pair.sent.wait(ticket.handoff_id, Failed)
            assert "cannot be reached" in failed.error.message
            pair.sent.wait(ticket.handoff_id, Drained)
        assert 1 <= len(dialled) <= 10
        assert pair.sender.snapshot() == SenderSnapshot(0, {})


def test_the_pause_grows_to_a_bound_and_ends_with_success() -> None:
    backoff, key, failure = Backoff(), ("address", "decode", b"life"), Failure("no")
    now, pauses = 0.0, []
    for _ in range(12):
        backoff.failed(key, failure, now)
        start = now
        while backoff.refusal(key, now) is not None:
            now += 0.01
        pauses.append(now - start)
    assert pauses[0] < 0.2
    assert pauses[-1] > pauses[0]
    assert all(pause <= 5.1 for pause in pauses)
    backoff.failed(key, failure, now)
    assert backoff.refusal(("other", "decode", b"life"), now) is None
    backoff.succeeded(key)
    assert backoff.refusal(key, now) is None


@pytest.mark.parametrize("block_ids", [(4,), (-1,), (0, 4), (10**9,)])
def test_a_one_sided_write_outside_the_pool_is_refused_before_a_byte_lands(block_ids: tuple[int, ...]) -> None:
    pool, network = bytearray(LAYOUT.pool_bytes(4)), MemoryNetwork()
    channel = network.connect(network.listen("", 0).address, 1.0)
    writer = PoolWriter(memoryview(pool), LAYOUT, channel)
    source = [memoryview(b"\xee" * LAYOUT.block_bytes * len(block_ids))]
    with pytest.raises(TransportError, match="outside the peer's pool of 4 blocks"):
        writer.write(Write("h", 0, block_ids, 0, LAYOUT.num_layers), source, 1.0)
    assert not any(pool)

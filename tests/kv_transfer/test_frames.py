"""What may be said on a link: tickets, writes and frames that are not what they should be."""

import contextlib
import logging
import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from kv_transfer import handshake
from kv_transfer.events import Committed, Failed, Fenced
from kv_transfer.messages import (
    Abort,
    Accepted,
    Commit,
    Fence,
    Open,
    Opened,
    Renew,
    Write,
)
from kv_transfer.receive_table import ReceiveCounts
from kv_transfer.talk import Talk
from kv_transfer.transport_tcp import TcpChannel
from kv_transfer.wire import HEADER, decode_from_receiver, decode_from_sender, encode
from tests.support.kv_pair import LAYOUT, POISON, Pair, block_of
from tests.support.kv_stranger import TIMEOUT_S, answer, dial, greeted, heard_to_the_end, say, settled, still_works


@pytest.fixture
def pair() -> Iterator[Pair]:
    with Pair(transports=("tcp",)) as both:
        yield both


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"incarnation": b"x" * 16}, "another life"),
        ({"decode_worker_id": "someone"}, "another life"),
        ({"attempt": 2}, "attempt 1, not 2"),
        ({"secret": b"guess"}, "secret"),
        ({"handoff_id": "r/1/0000"}, "no such ticket"),
        ({"data_address": "127.0.0.1:1"}, "cannot be reached"),
        ({"data_address": "nonsense"}, "cannot be reached"),
        ({"data_address": "127.0.0.1:99999"}, "cannot be reached"),
    ],
)
def test_a_stale_or_forged_ticket_fails_at_the_sender_and_changes_nothing_at_the_receiver(
    pair: Pair, changes: dict[str, Any], reason: str
) -> None:
    ticket = pair.reserve([1])
    forged = type(ticket)()
    forged.CopyFrom(ticket)
    for name, value in changes.items():
        setattr(forged, name, value)
    pair.send(forged, [2])
    failed = pair.sent.wait(forged.handoff_id, Failed)
    assert reason in failed.error.message
    assert pair.receiver.snapshot().handoffs == ReceiveCounts(1, 0, 0, 0)
    assert not block_of(pair.decode, 1).any()
    assert still_works(pair)


def test_a_ticket_works_once(pair: Pair) -> None:
    ticket = pair.reserve([1])
    pair.send(ticket, [2])
    assert isinstance(pair.outcome(ticket)[0], Committed)
    pair.send(ticket, [3])
    failed = pair.sent.wait(ticket.handoff_id, Failed)
    assert "used already" in failed.error.message
    assert pair.equal(ticket, [2])


def test_a_second_link_cannot_touch_a_hand_off(pair: Pair) -> None:
    ticket = pair.reserve([1])
    pair.open(ticket, [2])
    pair.wait_until_open(1)
    channel = greeted(pair)
    say(channel, Open(ticket.handoff_id, 1, ticket.incarnation, ticket.secret, "tcp"))
    assert "used already" in str(answer(channel))
    payload = b"\xee" * LAYOUT.block_bytes
    say(channel, Write(ticket.handoff_id, 0, (1,), 0, LAYOUT.num_layers), payload)
    assert isinstance(answer(channel), Abort)
    say(channel, Commit(ticket.handoff_id, 5, b"", (1,), LAYOUT.num_layers))
    assert "never opened here" in str(answer(channel))
    for message in (Abort(ticket.handoff_id, 7, "forged"), Fence(ticket.handoff_id)):
        say(channel, message)
    say(channel, Renew((ticket.handoff_id,)))
    assert ticket.handoff_id in str(answer(channel))
    assert not block_of(pair.decode, 1).any()
    pair.push(ticket, range(1), range(LAYOUT.num_layers))
    pair.commit(ticket, 1)
    assert isinstance(pair.outcome(ticket)[0], Committed)
    channel.stop()
    channel.close()


BAD_WRITES = {
    "another block": Write("", 0, (2,), 0, LAYOUT.num_layers),
    "a block outside the pool": Write("", 0, (10**9,), 0, LAYOUT.num_layers),
    "a negative block": Write("", 0, (-1,), 0, LAYOUT.num_layers),
    "a layer too many": Write("", 0, (1,), 1, LAYOUT.num_layers),
    "a block too many": Write("", 0, (1, 1), 0, 1),
    "an index too high": Write("", 7, (1,), 0, LAYOUT.num_layers),
}


@pytest.mark.parametrize("name", BAD_WRITES)
def test_a_bad_write_is_refused_before_a_byte_lands_and_others_go_on(name: str, pair: Pair) -> None:
    bad, good = pair.reserve([1]), pair.reserve([3])
    channel = greeted(pair)
    for ticket in (bad, good):
        say(channel, Open(ticket.handoff_id, 1, ticket.incarnation, ticket.secret, "tcp"))
        assert answer(channel) == Opened(ticket.handoff_id)
    write = msgspec.structs.replace(BAD_WRITES[name], handoff_id=bad.handoff_id)
    say(channel, write, b"\xee" * (len(write.block_ids) * write.num_layers * LAYOUT.page_bytes))
    assert isinstance(answer(channel), Abort)
    assert "a write was refused" in pair.received.wait(bad.handoff_id, Failed).error.message
    pair.received.wait(bad.handoff_id, Fenced)
    assert not any(pair.decode.pool.buffer)
    # The frame was read to its end: the link goes on, and so do the other hand-offs on it.
    say(channel, Write(good.handoff_id, 0, (3,), 0, LAYOUT.num_layers), b"\xee" * LAYOUT.block_bytes)
    say(channel, Renew((good.handoff_id,)))
    answer(channel)
    assert (block_of(pair.decode, 3) == 0xEE).all()
    channel.stop()
    channel.close()


BAD_FRAMES = {
    "a payload of another size": (Write("h", 0, (1,), 0, 1), LAYOUT.page_bytes - 1),
    "a write without a payload": (Write("h", 0, (1,), 0, 1), 0),
    "a payload behind a Fence": (Fence("h"), 8),
    "an answer from the wrong side": (Accepted("h"), 0),
}


@pytest.mark.parametrize("name", BAD_FRAMES)
def test_a_malformed_frame_closes_its_link_and_fails_what_was_open_on_it(
    name: str, pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    ticket = pair.reserve([1])
    channel = greeted(pair)
    say(channel, Open(ticket.handoff_id, 1, ticket.incarnation, ticket.secret, "tcp"))
    answer(channel)
    message, size = BAD_FRAMES[name]
    say(channel, message, bytes(size))
    channel.wait_until_peer_closes()
    channel.close()
    assert "the link to the sender was lost" in pair.received.wait(ticket.handoff_id, Failed).error.message
    pair.received.wait(ticket.handoff_id, Fenced)
    assert len([record for record in caplog.records if "ended" in record.message]) == 1
    assert still_works(pair)


def test_a_payload_that_stalls_costs_its_link_and_is_fenced_by_the_lease() -> None:
    with Pair(transports=("tcp",), receiver={"lease_s": 0.3, "io_timeout_s": 60.0}) as pair, dial(pair) as sock:
        channel = TcpChannel(sock)
        talk = Talk(channel, TIMEOUT_S)
        handshake.greet(talk, pair.prefill)
        settled(talk)
        ticket = pair.reserve([1])
        say(channel, Open(ticket.handoff_id, 1, ticket.incarnation, ticket.secret, "tcp"))
        answer(channel)
        write = encode(Write(ticket.handoff_id, 0, (1,), 0, LAYOUT.num_layers))
        sock.setblocking(True)
        sock.sendall(HEADER.pack(len(write), LAYOUT.block_bytes) + write + b"\xee" * 100)
        assert "lease" in pair.received.wait(ticket.handoff_id, Failed).error.message
        pair.received.wait(ticket.handoff_id, Fenced)
        block_of(pair.decode, 1)[:] = POISON
        with contextlib.suppress(OSError):
            sock.sendall(b"\xee" * (LAYOUT.block_bytes - 100))
        heard_to_the_end(sock)
        assert (block_of(pair.decode, 1) == POISON).all()


def test_a_one_sided_link_that_talks_nonsense_is_fenced_only_when_its_peer_has_closed() -> None:
    """We can stop listening to such a peer, but not stop it from writing: only its end of the link says that."""
    with Pair(transports=("shm", "tcp")) as pair:
        ticket = pair.reserve([1])
        channel = greeted(pair, transport="shm")
        say(channel, Open(ticket.handoff_id, 1, ticket.incarnation, ticket.secret, "shm"))
        answer(channel)
        channel.send(b"\xc1", [], TIMEOUT_S)
        channel.wait_until_peer_closes()  # The receiver says no more.
        pair.received.wait(ticket.handoff_id, Failed)
        assert pair.receiver.snapshot().handoffs.quarantined == 1
        assert pair.received.kinds(ticket.handoff_id) == ["Failed"]
        channel.stop()
        pair.received.wait(ticket.handoff_id, Fenced)
        channel.close()


def test_random_bytes_after_the_greeting_never_stop_the_receiver(pair: Pair) -> None:
    rng = random.Random(5)
    for _ in range(40):
        channel = greeted(pair)
        data = bytearray(encode(Write("h", 0, (1, 2), 0, 2)))
        for _ in range(rng.randint(1, 6)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        say_raw = bytes(data) if rng.random() < 0.7 else rng.randbytes(rng.randint(1, 300))
        channel.send(say_raw, [memoryview(rng.randbytes(rng.choice((0, 1, 4 * LAYOUT.page_bytes))))], TIMEOUT_S)
        channel.stop_sending()
        channel.wait_until_peer_closes()
        channel.close()
    assert not any(pair.decode.pool.buffer)
    assert still_works(pair)


def test_a_peer_that_never_reads_slows_nobody_down(pair: Pair) -> None:
    channel = greeted(pair)
    for _ in range(300):
        say(channel, Renew(("x" * 1000,) * 100))
    assert still_works(pair)
    channel.stop()
    channel.close()


def test_frames_survive_the_round_trip() -> None:
    for message in (
        Open("h", 1, b"i", b"s", "t"),
        Write("h", 1, (2, 3), 0, 4),
        Commit("h", 9, b"t", (2**64 - 1, 0), 4),
        Renew(("a", "b")),
        Abort("h", 7, "why"),
        Fence("h"),
    ):
        assert decode_from_sender(encode(message)) == message
    assert decode_from_receiver(encode(Accepted("h"))) == Accepted("h")

"""How the two ends agree on the way of their payload, and what happens when they do not."""

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kv_cache.layout import KVCacheLayout, KVDtype
from kv_transfer import attachment
from kv_transfer.attachment import MAX_PROPOSALS, asking
from kv_transfer.events import Committed, Failed
from kv_transfer.messages import (
    MAX_GREETING_BYTES,
    Attach,
    Attached,
    Declined,
    Fence,
    Goodbye,
    Message,
    Open,
    Opened,
    Refused,
    Settled,
    Welcome,
)
from kv_transfer.region import MemoryRegion
from kv_transfer.talk import Talk
from kv_transfer.transport import Ask, Channel, LinkError, PayloadReader, PayloadWriter, TransportUnavailable
from kv_transfer.transport_inband import InBandTransport
from kv_transfer.transport_memory import MemoryNetwork
from kv_transfer.transport_tcp import TcpNetwork
from tests.support.kv_pair import LAYOUT, Pair, make_identity
from tests.support.kv_stranger import TIMEOUT_S, answer, greeted, introduced, say, settled, still_works


def wire(**changes: Any) -> bytes:
    layout: KVCacheLayout = dataclasses.replace(LAYOUT, total_kv_heads=None, **changes)
    return layout.to_proto().SerializeToString()


DECLINED = {
    "a transport that is not offered": (Attach("carrier pigeon", b"", b""), "is not offered here"),
    "a name without an end": (Attach("x" * 30_000, b"", b""), "xxx"),
    "pages of another block size": (
        Attach("tcp", b"", wire(block_size=16)),
        "may differ from the pool's in dtype only",
    ),
    "pages of another model": (Attach("tcp", b"", wire(model_id="other", dtype=KVDtype.INT8)), "in dtype only"),
    "other pages for a one-sided writer": (Attach("shm", b"", wire(dtype=KVDtype.INT8)), "own layout only"),
    "a layout that is none": (Attach("tcp", b"", b"\xff\xff"), "makes no sense"),
}


@pytest.mark.parametrize("name", DECLINED)
def test_what_cannot_be_is_declined_and_another_way_is_taken(name: str) -> None:
    proposal, reason = DECLINED[name]
    with Pair(transports=("shm", "tcp")) as pair:
        talk = introduced(pair)
        talk.say(proposal)
        declined = talk.hear()
        assert isinstance(declined, Declined)
        assert reason in declined.reason
        assert len(declined.reason) <= 1000
        channel = settled(talk)
        ticket = pair.reserve([1])
        say(channel, Open(ticket.handoff_id, 1, ticket.incarnation, ticket.secret, "tcp"))
        assert answer(channel) == Opened(ticket.handoff_id)
        channel.stop()
        channel.close()


OUT_OF_TURN: dict[str, Sequence[Message]] = {
    "an Open before anything is attached": [Open("h", 1, b"i" * 16, b"s", "tcp")],
    "settled on nothing": [Settled()],
    "settled on what was declined": [Attach("pigeon", b"", b""), Settled()],
    "an answer for a question": [Attached(b"")],
    "the greeting again": [Welcome(b"", "prefill", b"i" * 16, b"")],
    "a hand-off message": [Fence("h")],
    "a goodbye": [Goodbye(7, "no")],
    "too many proposals": [Attach("pigeon", b"", b"")] * (MAX_PROPOSALS + 1),
    "too many agreements": [Attach("tcp", b"", b"")] * (MAX_PROPOSALS + 1),
    "a proposal larger than a greeting may be": [Attach("tcp", bytes(MAX_GREETING_BYTES), b"")],
}


@pytest.mark.parametrize("name", OUT_OF_TURN)
def test_whoever_attaches_out_of_turn_is_shown_out(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with Pair(transports=("tcp",)) as pair:
        talk = introduced(pair)
        for message in OUT_OF_TURN[name]:
            talk.say(message)
        talk.channel.wait_until_peer_closes()
        talk.channel.close()
        assert still_works(pair)
        assert len([record for record in caplog.records if "refused a link" in record.message]) == 1
        assert pair.receiver.snapshot().links == 1


def test_whoever_introduces_himself_and_says_no_more_is_shown_out() -> None:
    with Pair(transports=("tcp",), receiver={"io_timeout_s": 0.1}) as pair:
        for messages in ([], [Attach("tcp", b"", b"")]):
            talk = introduced(pair)
            for message in messages:
                talk.say(message)
            talk.channel.wait_until_peer_closes()
            talk.channel.close()
        assert still_works(pair)


def test_a_hand_off_by_another_way_than_its_link_is_refused() -> None:
    with Pair(transports=("shm", "tcp")) as pair:
        ticket = pair.reserve([1])
        channel = greeted(pair, transport="tcp")
        say(channel, Open(ticket.handoff_id, 1, ticket.incarnation, ticket.secret, "shm"))
        refused = answer(channel)
        assert isinstance(refused, Refused)
        assert "payload by tcp, not by shm" in refused.reason
        say(channel, Open(ticket.handoff_id, 1, ticket.incarnation, ticket.secret, "tcp"))
        assert answer(channel) == Opened(ticket.handoff_id)
        channel.stop()
        channel.close()


class Picky(InBandTransport):
    """In band under the name of a better transport, and with a reason not to work at one of its ends."""

    def __init__(self, name: str = "ucx", *, here: str = "", there: str = "", broken: str = "") -> None:
        super().__init__(name)
        self.here, self.there, self.broken = here, there, broken
        self.readers: list[Closing] = []
        self.closed = 0

    def connect(
        self, offer: bytes, channel: Channel, layout: KVCacheLayout, memory: Sequence[MemoryRegion], ask: Ask
    ) -> PayloadWriter:
        assert ask(b"hello") == b"welcome"
        if self.here:
            raise TransportUnavailable(self.here)
        if self.broken:
            raise LinkError(self.broken)
        return super().connect(offer, channel, layout, memory, lambda data: b"")

    def accept(
        self, data: bytes, channel: Channel, layout: KVCacheLayout, pool: MemoryRegion
    ) -> tuple[bytes, PayloadReader]:
        assert data == b"hello"
        if self.there:
            raise TransportUnavailable(self.there)
        self.readers.append(Closing(super().accept(b"", channel, layout, pool)[1]))
        return b"welcome", self.readers[-1]

    def close(self) -> None:
        self.closed += 1


class Closing:
    """Notes how a reader ends."""

    def __init__(self, reader: PayloadReader) -> None:
        self._reader = reader
        self.said: list[str] = []
        self.read, self.skip = reader.read, reader.skip
        self.over = threading.Event()

    def stop(self) -> None:
        self.said.append("stop")

    def close(self) -> None:
        self.said.append("close")
        self.over.set()


@pytest.mark.parametrize("end", ["here", "there"])
def test_a_transport_that_one_end_cannot_use_gives_way_to_the_next(end: str) -> None:
    best = Picky("shm", here="no device here") if end == "here" else Picky("shm", there="no device there")
    network = TcpNetwork((best, InBandTransport("tcp")))
    with Pair(transports=("shm", "tcp"), shared={"network": network}) as pair:
        ticket = pair.reserve([1])
        pair.send(ticket, [2])
        received, sent = pair.outcome(ticket)
        assert isinstance(received, Committed)
        assert pair.equal(ticket, [2])
        assert (sent.stats.transport, sent.stats.expected_transport) == ("tcp", "shm")
        view = pair.sender.snapshot().transports["decode"]
        assert (view.transport, view.expected) == ("tcp", "shm")
        assert f"no device {end}" in view.why_not
        assert [reader.said for reader in best.readers] == ([["stop", "close"]] if end == "here" else [])


def test_a_way_that_breaks_while_it_is_made_costs_the_link_only() -> None:
    ucx = Picky(broken="the endpoint died")
    with Pair(transports=("ucx",), shared={"network": TcpNetwork((ucx,))}) as pair:
        ticket = pair.reserve([1])
        pair.send(ticket, [2])
        assert "the endpoint died" in pair.sent.wait(ticket.handoff_id, Failed).error.message
        assert ucx.readers[0].over.wait(TIMEOUT_S)
        assert pair.receiver.snapshot().links == 0


def test_readers_are_stopped_and_closed_with_their_link() -> None:
    ucx = Picky()
    with Pair(transports=("ucx",), shared={"network": TcpNetwork((ucx,))}) as pair:
        ticket = pair.reserve([1])
        pair.send(ticket, [2])
        assert isinstance(pair.outcome(ticket)[0], Committed)
        (reader,) = ucx.readers
        assert reader.said == []
        next(iter(pair.receiver._inlets.values())).link.break_off("test")
        assert reader.over.wait(TIMEOUT_S)
        assert reader.said == ["stop", "close"]
    assert ucx.closed == 0, "the network is not theirs to close"


def answering(reply: Message) -> Callable[[], object]:
    """`asking` of a peer that says this."""
    network = MemoryNetwork()
    listener = network.listen("", 0)
    sender = Talk(network.connect(listener.address, TIMEOUT_S), TIMEOUT_S)
    Talk(listener.accept(), TIMEOUT_S).say(reply)
    return lambda: asking(sender, "tcp", b"")(b"data")


def test_a_sender_knows_yes_from_no_and_from_nonsense() -> None:
    assert answering(Attached(b"yes"))() == b"yes"
    with pytest.raises(TransportUnavailable, match=r"declined: n{1000}$"):
        answering(Declined("n" * 9000))()
    for nonsense in (Settled(), Attach("tcp", b"", b""), Welcome(b"", "", b"", b"")):
        with pytest.raises(LinkError, match="out of turn"):
            answering(nonsense)()
    with pytest.raises(LinkError, match="refused the link"):
        answering(Goodbye(7, "no"))()


def test_a_reader_is_not_left_behind_when_the_sender_is_gone_before_the_answer() -> None:
    ucx, network = Picky(), MemoryNetwork()
    listener = network.listen("", 0)
    sender = Talk(network.connect(listener.address, TIMEOUT_S), TIMEOUT_S)
    receiving = listener.accept()
    sender.say(Attach("ucx", b"hello", b""))
    talk = Talk(receiving, TIMEOUT_S)
    sender.channel.stop_receiving()
    identity = make_identity("decode", 1)
    with identity.pool, pytest.raises(LinkError):
        attachment.agree(talk, {"ucx": ucx}, identity)
    assert ucx.readers[0].said == ["stop", "close"]

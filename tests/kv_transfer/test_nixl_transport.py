"""The nixl transport by itself: what lands and what is refused."""

import os
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

pytest.importorskip("nixl_cu12")

from kv_transfer import nixl_link
from kv_transfer.nixl_greeting import MAX_METADATA_BYTES, TOKEN_BYTES, Answer, Proposal
from kv_transfer.pages import MAX_WRITE_BYTES
from kv_transfer.region import MemoryRegion
from kv_transfer.transport import LinkError, TransportError, TransportUnavailable
from kv_transfer.transport_nixl import NixlTransport
from tests.support.nixl_peer import (
    LAYOUT,
    LONG_S,
    NUM_BLOCKS,
    POISON,
    Link,
    Peer,
    SenderEnd,
    digest,
    pages,
    pool,
    write_of,
)

BLOCKS_A_WRITE = 4 * 1024 * 1024 // LAYOUT.block_bytes
EVERYTHING = list(range(NUM_BLOCKS))
OVER_TCP = {"UCX_TLS": "tcp"}


def blocks(region: MemoryRegion, block_ids: list[int]) -> list[bytes]:
    return [bytes(pages(region, [block_id])[0]) for block_id in block_ids]


def failure_of(call: Callable[[], Any]) -> tuple[threading.Thread, list[Exception]]:
    """Run it on a thread, and collect what it raises."""
    raised: list[Exception] = []

    def run() -> None:
        try:
            call()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, raised


# ---- what lands


def test_scattered_blocks_arrive_and_nothing_else_changes(open_link: Callable[..., Link]) -> None:
    link = open_link()
    link.send([7, 3, 4, 100, 5], [0, 1, 2, 3, 4])
    link.send([NUM_BLOCKS - 1], [9])
    got = blocks(link.receiver.region, EVERYTHING)
    want = [bytes([POISON]) * LAYOUT.block_bytes] * NUM_BLOCKS
    for target, source in [(7, 0), (3, 1), (4, 2), (100, 3), (5, 4), (NUM_BLOCKS - 1, 9)]:
        want[target] = blocks(link.sender.region, [source])[0]
    assert got == want


def test_some_layers_of_some_blocks_arrive(open_link: Callable[..., Link]) -> None:
    link = open_link()
    taking = threading.Thread(target=link.receiver.take)
    taking.start()
    source = [view[: LAYOUT.page_bytes] for view in pages(link.sender.region, [0, 2, 4], range(1))]
    link.sender.writer.write(write_of([5, 6, 9], range(2, 3)), source, LONG_S)
    taking.join(LONG_S)
    for block_id, view in zip([5, 6, 9], source, strict=True):
        assert bytes(pages(link.receiver.region, [block_id], range(2, 3))[0]) == bytes(view)
        assert set(bytes(pages(link.receiver.region, [block_id], range(2))[0])) == {POISON}
        assert set(bytes(pages(link.receiver.region, [block_id], range(3, 4))[0])) == {POISON}


@pytest.mark.parametrize("environment", [{}, OVER_TCP], ids=["any", "tcp"])
def test_a_whole_pool_arrives_in_another_process(
    nixl_transport: NixlTransport, start_peer: Callable[..., Peer], environment: dict[str, str]
) -> None:
    receiver = start_peer("receive", environment=environment)
    sender = SenderEnd(nixl_transport, pool(), receiver.hear()["address"])
    assert sender.writer.detail.startswith("UCX, devices ")
    count = NUM_BLOCKS // BLOCKS_A_WRITE
    receiver.tell(f"read {count}")
    for index in range(count):
        sender.write(EVERYTHING[index::count])
    assert receiver.hear() == {"read": count}
    assert receiver.ask("digest") == {"digest": digest(sender.region)}
    sender.close()
    assert receiver.ask("close") == {"closed": True}
    receiver.tell("quit")
    assert receiver.process.wait(LONG_S) == 0


def test_writes_that_come_before_their_frames_are_read_are_not_lost(
    start_peer: Callable[..., Peer], nixl_transport: NixlTransport
) -> None:
    receiver = start_peer("receive")
    sender = SenderEnd(nixl_transport, pool(), receiver.hear()["address"])
    receiver.tell("read 20")
    for index in range(20):
        sender.write([index])
    assert receiver.hear() == {"read": 20}
    sender.close()


def test_two_links_into_one_pool_do_not_take_each_others_notes(open_link: Callable[..., Link]) -> None:
    target = pool(POISON)
    one, other = open_link(target), open_link(target)
    for index in range(10):
        one.send([2 * index], [index])
        other.send([2 * index + 1], [index + 100])
    for index in range(10):
        got = blocks(target, [2 * index, 2 * index + 1])
        assert got == blocks(one.sender.region, [index, index + 100])


def test_a_refused_write_is_waited_for_too(open_link: Callable[..., Link]) -> None:
    link = open_link()

    def refuse() -> None:
        link.receiver.frame()
        link.receiver.reader.skip(LAYOUT.block_bytes, 0, LONG_S)

    refusing, raised = failure_of(refuse)
    link.sender.write([1])
    refusing.join(LONG_S)
    assert raised == []
    link.send([2])
    assert blocks(link.receiver.region, [2]) == blocks(link.sender.region, [2])


def test_memory_is_registered_once_a_link_however_much_is_written(
    nixl_transport: NixlTransport, open_link: Callable[..., Link]
) -> None:
    before = nixl_transport.num_registrations
    link = open_link()
    for index in range(200):
        link.send([index % NUM_BLOCKS, (7 * index + 1) % NUM_BLOCKS], [0, 1])
    assert nixl_transport.num_registrations == before + 2
    link.close()
    assert nixl_transport.num_registrations == before


# ---- what is refused


@pytest.mark.parametrize("block_ids", [[NUM_BLOCKS], [-1], [0, NUM_BLOCKS + 5], []])
def test_blocks_outside_the_pool_are_refused_before_anything_is_sent(
    open_link: Callable[..., Link], block_ids: list[int]
) -> None:
    link = open_link()
    with pytest.raises(TransportError, match="outside the peer's pool"):
        link.sender.writer.write(write_of(block_ids), pages(link.sender.region, [0]), LONG_S)
    link.send([1])  # The first frame that the receiver sees.
    assert blocks(link.receiver.region, [1]) == blocks(link.sender.region, [1])


def test_layers_outside_the_layout_are_refused(open_link: Callable[..., Link]) -> None:
    link = open_link()
    layers = range(LAYOUT.num_layers, LAYOUT.num_layers + 1)
    with pytest.raises(TransportError, match="layers"):
        link.sender.writer.write(write_of([0], layers), pages(link.sender.region, [0], range(1)), LONG_S)
    link.send([1])


def test_a_source_of_another_length_is_refused(open_link: Callable[..., Link]) -> None:
    link = open_link()
    for block_ids, source in [([0, 1], [0]), ([0], [0, 1]), ([0], [])]:
        with pytest.raises(TransportError, match="not as long"):
            link.sender.writer.write(write_of(block_ids), pages(link.sender.region, source), LONG_S)
    link.send([1])


def test_a_source_outside_the_registered_memory_is_copied_first(
    open_link: Callable[..., Link], nixl_transport: NixlTransport
) -> None:
    link = open_link()
    for index in range(3):
        content = os.urandom(LAYOUT.block_bytes)
        mixed = [*pages(link.sender.region, [7]), memoryview(content)]
        taking = threading.Thread(target=link.receiver.take)
        taking.start()
        link.sender.writer.write(write_of([index, 9]), mixed, LONG_S)
        taking.join(LONG_S)
        assert blocks(link.receiver.region, [index, 9]) == [*blocks(link.sender.region, [7]), content]
        assert nixl_transport.num_registrations == 3  # The pool, the memory, and one for all copies.
    with pytest.raises(TransportError, match="the limit is"):
        link.sender.writer.write(write_of([0]), [memoryview(bytes(MAX_WRITE_BYTES + 4096))], LONG_S)


def test_a_frame_that_says_a_payload_follows_ends_the_link(open_link: Callable[..., Link]) -> None:
    link = open_link()
    for take in (link.receiver.reader.skip, lambda *a: link.receiver.reader.read(a[0], a[1], [], a[2])):
        with pytest.raises(LinkError, match="a payload of 5 bytes"):
            take(5, 5, LONG_S)


@pytest.mark.parametrize("data", [b"", b"\xff", b"\x80", os.urandom(300), bytes(70000)])
def test_a_malformed_greeting_is_no_way_to_reach_a_peer(nixl_transport: NixlTransport, data: bytes) -> None:
    before = nixl_transport.num_registrations
    link_channel: Any = None  # Neither end uses it so early.
    with pytest.raises(TransportUnavailable):
        nixl_transport.accept(data, link_channel, LAYOUT, pool(POISON))
    with pytest.raises(TransportUnavailable):
        nixl_transport.connect(nixl_transport.offer(pool()) or b"", link_channel, LAYOUT, [pool()], lambda _: data)
    assert nixl_transport.num_registrations == before


def _answer(proposal: Proposal, **changes: Any) -> Answer:
    """An answer from the proposer itself, as whose metadata is good, with changes."""
    fields = {"agent": proposal.agent, "metadata": proposal.metadata, "address": 4096, "size_bytes": 1 << 20}
    return Answer.of(**{**fields, "token": bytes(TOKEN_BYTES), **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "answer",
    [
        lambda good: msgspec.structs.replace(_answer(good), metadata=good.metadata[:-1] + b"?"),
        lambda good: _answer(good, metadata=bytes(MAX_METADATA_BYTES + 1)),
        lambda good: _answer(good, metadata=b""),
        lambda good: _answer(good, metadata=b"nonsense"),
        lambda good: _answer(good, agent="somebody else"),
        lambda good: _answer(good, address=0),
        lambda good: _answer(good, size_bytes=2**63),
    ],
    ids=["garbled", "oversized", "empty", "nonsense", "of another agent", "no address", "too large"],
)
def test_an_answer_that_no_peer_gives_is_refused(
    nixl_transport: NixlTransport, answer: Callable[[Proposal], Answer]
) -> None:
    channel: Any = None

    def ask(data: bytes) -> bytes:
        return msgspec.msgpack.encode(answer(msgspec.msgpack.decode(data, type=Proposal)))

    with pytest.raises(TransportUnavailable):
        nixl_transport.connect(nixl_transport.offer(pool()) or b"", channel, LAYOUT, [pool()], ask)
    with pytest.raises(TransportUnavailable):
        nixl_transport.accept(ask(msgspec.msgpack.encode(Proposal.of("x", b"y"))), channel, LAYOUT, pool(POISON))


def test_another_offer_is_not_understood(nixl_transport: NixlTransport) -> None:
    channel: Any = None
    with pytest.raises(TransportUnavailable, match="another kind"):
        nixl_transport.connect(b"nixl 2 VRAM", channel, LAYOUT, [pool()], lambda data: data)


def test_an_agent_that_is_not_reached_is_found_out_before_the_first_write(
    nixl_transport: NixlTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_link, "_HELLO_S", 0.05)
    channel: Any = None
    target = pool(POISON)
    readers = []

    def ask(data: bytes) -> bytes:
        answer, reader = nixl_transport.accept(data, channel, LAYOUT, target)
        reader.stop()  # Nobody drives its agent from here on.
        readers.append(reader)
        return answer

    with pytest.raises(TransportUnavailable, match="not reached"):
        nixl_transport.connect(nixl_transport.offer(target) or b"", channel, LAYOUT, [pool()], ask)
    readers[0].close()


def test_a_closed_transport_makes_no_links() -> None:
    transport = NixlTransport("127.0.0.1")
    transport.close()
    transport.close()
    channel: Any = None
    with pytest.raises(TransportUnavailable, match="closed"):
        transport.connect(transport.offer(pool()) or b"", channel, LAYOUT, [pool()], lambda data: data)

"""What arrives over ucx, what does not, and how a link ends, with both ends in one process."""

import itertools
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("libucx")

from kv_transfer import transport_ucx
from kv_transfer.transport import LinkError, TransportError, TransportUnavailable
from kv_transfer.transport_ucx import Greeting, UcxTransport, _cut, _parse, _pieces
from kv_transfer.ucx_library import HOST_MEMORY
from kv_transfer.ucx_port import MAX_UNANSWERED, Span
from tests.support.ucx_ends import LARGE, LAYOUT, OFFER, WAIT_S, Link, Pools, channels, in_thread, take, write_of

ALL = range(LAYOUT.num_layers)


@pytest.fixture
def link(ucx_transport: UcxTransport, pools: Pools) -> Iterator[Link]:
    made = Link(ucx_transport, pools)
    yield made
    made.close()


def equal(pools: Pools, source: list[int], target: list[int], layers: range = ALL) -> bool:
    """Whether these pages of the target are those of the source."""
    return b"".join(pools.in_target(target, layers)) == b"".join(pools.from_source(source, layers))


@pytest.mark.parametrize(
    ("source", "target"),
    [([5], [2]), ([1, 2, 3, 4], [9, 10, 11, 12]), ([7, 8, 2, 3], [3, 4, 9, 1]), ([0, 9, 10, 3], [3, 4, 5, 12])],
    ids=["one block", "a run at both ends", "runs cut differently", "a run at the receiver"],
)
def test_blocks_arrive_and_nothing_else_changes(link: Link, pools: Pools, source: list[int], target: list[int]) -> None:
    link.move(source, target, ALL)
    assert equal(pools, source, target)
    assert pools.landed() == set(target)


def test_a_layer_of_scattered_blocks_arrives(link: Link, pools: Pools) -> None:
    source, target = [7, 8, 2, 3], [3, 4, 9, 1]
    for layer in ALL:
        link.move(source, target, range(layer, layer + 1))
        assert equal(pools, source, target, range(layer, layer + 1))
    assert equal(pools, source, target)


def test_many_writes_go_over_one_link(link: Link, pools: Pools) -> None:
    for count in range(100):
        source, target = [count % 16, (count * 7 + 3) % 16], [(count * 5) % 16, (count * 5 + 1) % 16]
        link.move(source, target, ALL)
        assert equal(pools, source, target)


def test_pages_of_4_mib_arrive(ucx_transport: UcxTransport, large: Pools) -> None:
    assert LARGE.page_bytes == 4 << 20
    link = Link(ucx_transport, large)
    for layer in range(2):
        link.move([0], [1], range(layer, layer + 1))
    assert equal(large, [0], [1], range(2))
    link.close()


def test_what_is_skipped_lands_nowhere_and_the_next_write_arrives(link: Link, pools: Pools) -> None:
    def skip_then_take() -> None:
        _, size = link.receiving.receive(max_message_bytes=1 << 20, max_payload_bytes=1 << 22, timeout_s=WAIT_S)
        link.reader.skip(2 * LAYOUT.block_bytes, size, WAIT_S)
        take(link.reader, link.receiving, pools, WAIT_S)

    reading = in_thread(skip_then_take)
    link.writer.write(write_of([3, 9], ALL), pools.from_source([1, 2], ALL), WAIT_S)
    link.writer.write(write_of([5, 6], ALL), pools.from_source([3, 4], ALL), WAIT_S)
    reading()
    assert equal(pools, [3, 4], [5, 6])
    assert pools.landed() == {5, 6}


def test_two_ways_of_cutting_the_same_bytes_agree(link: Link, pools: Pools) -> None:
    """The wire may be a staging area at either end: one piece there, many here."""
    whole = bytearray(4 * LAYOUT.block_bytes)

    def read() -> None:
        _, size = link.receiving.receive(max_message_bytes=1 << 20, max_payload_bytes=1 << 22, timeout_s=WAIT_S)
        link.reader.read(len(whole), size, [memoryview(whole)], WAIT_S)

    reading = in_thread(read)
    source = pools.from_source([7, 8, 2, 3], ALL)
    link.writer.write(write_of([3, 4, 9, 1], ALL), source, WAIT_S)
    reading()
    assert bytes(whole) == b"".join(source)


def test_a_layer_of_neighbouring_blocks_is_no_neighbour_in_the_pool(link: Link, pools: Pools) -> None:
    staged = pools.source.buffer[: 3 * LAYOUT.page_bytes]
    reading = in_thread(lambda: take(link.reader, link.receiving, pools, WAIT_S))
    link.writer.write(write_of([3, 4, 5], range(1, 2)), [staged], WAIT_S)
    reading()
    assert b"".join(pools.in_target([3, 4, 5], range(1, 2))) == bytes(staged)


def test_what_ucx_chose_is_told(link: Link) -> None:
    assert "lo" in link.writer.detail


def test_a_read_that_nobody_feeds_fails_at_its_deadline_and_nothing_lands_later(link: Link, pools: Pools) -> None:
    into = pools.in_target([3, 4], ALL)
    with pytest.raises(LinkError, match="too long"):
        link.reader.read(2 * LAYOUT.block_bytes, 0, into, 0.05)
    until_it_fails(link, pools)
    with pytest.raises(LinkError, match="has ended"):
        link.reader.read(2 * LAYOUT.block_bytes, 0, into, 0.05)
    assert pools.landed() == set()


def until_it_fails(link: Link, pools: Pools) -> None:
    """A few small writes may get out before UCX notices that nobody is there."""
    for _ in range(MAX_UNANSWERED):
        with suppress(LinkError):
            link.writer.write(write_of([3, 4], ALL), pools.from_source([1, 2], ALL), WAIT_S)
    with pytest.raises(LinkError, match=r"lost|ended"):
        link.writer.write(write_of([3, 4], ALL), pools.from_source([1, 2], ALL), WAIT_S)


def test_a_write_that_nobody_takes_fails_at_its_deadline(ucx_transport: UcxTransport, large: Pools) -> None:
    link = Link(ucx_transport, large)
    with pytest.raises(LinkError, match="too long"):
        link.writer.write(write_of([1], range(1)), large.from_source([0], range(1)), 0.1)
    with pytest.raises(LinkError, match="has ended"):
        link.writer.write(write_of([1], range(1)), large.from_source([0], range(1)), WAIT_S)
    # What was announced never comes.
    with pytest.raises(LinkError):
        take(link.reader, link.receiving, large, WAIT_S)
    assert large.landed() == set()
    link.close()


def test_a_reader_that_is_stopped_comes_out(link: Link, pools: Pools) -> None:
    begun = threading.Event()

    def read() -> None:
        begun.set()
        link.reader.read(LAYOUT.block_bytes, 0, pools.in_target([3], ALL), WAIT_S)

    reading = in_thread(read)
    assert begun.wait(WAIT_S)
    link.reader.stop()
    with pytest.raises(LinkError, match="stopped"):
        reading()
    with pytest.raises(LinkError):
        link.reader.skip(LAYOUT.block_bytes, 0, WAIT_S)


def test_a_reader_stopped_before_it_reads_does_not_wait(link: Link, pools: Pools) -> None:
    link.reader.stop()
    with pytest.raises(LinkError, match="stopped"):
        link.reader.read(LAYOUT.block_bytes, 0, pools.in_target([3], ALL), WAIT_S)


def test_a_writer_notices_a_reader_that_has_closed(ucx_transport: UcxTransport, large: Pools) -> None:
    link = Link(ucx_transport, large)
    link.move([0], [1], range(1))
    link.reader.close()
    with pytest.raises(LinkError, match="lost"):
        link.writer.write(write_of([1], range(1)), large.from_source([0], range(1)), WAIT_S)
    link.close()


@pytest.mark.parametrize(
    ("told", "why"),
    [(b"abc", "behind a write"), (b"\0\0\0\1" * 4, "comes in pieces of 4"), (b"\0" * 8, "comes in pieces of 0")],
)
def test_a_frame_that_says_nonsense_ends_the_link(link: Link, pools: Pools, told: bytes, why: str) -> None:
    link.sending.send(b"?", [memoryview(told)], WAIT_S)
    _, size = link.receiving.receive(max_message_bytes=10, max_payload_bytes=100, timeout_s=WAIT_S)
    with pytest.raises(LinkError, match=why):
        link.reader.read(LAYOUT.block_bytes, size, pools.in_target([3], ALL), WAIT_S)
    assert pools.landed() == set()


def test_pieces_that_do_not_fit_the_memory_are_refused(link: Link, pools: Pools) -> None:
    half = LAYOUT.block_bytes // 2
    told = b"".join(size.to_bytes(4, "big") for size in (half, 2 * half, half))
    link.sending.send(b"?", [memoryview(told)], WAIT_S)
    _, size = link.receiving.receive(max_message_bytes=10, max_payload_bytes=100, timeout_s=WAIT_S)
    with pytest.raises(LinkError, match="cut otherwise"):
        link.reader.read(2 * LAYOUT.block_bytes, size, pools.in_target([3, 9], ALL), WAIT_S)


@pytest.mark.parametrize(("sent", "why"), [(2, "truncated"), (0.5, "3072 bytes came over ucx where 6144 were")])
def test_a_message_of_another_size_than_announced_ends_the_link(
    link: Link, pools: Pools, sent: float, why: str
) -> None:
    assert LAYOUT.block_bytes == 3 * 2048

    def read() -> None:
        _, size = link.receiving.receive(max_message_bytes=1 << 20, max_payload_bytes=1 << 22, timeout_s=WAIT_S)
        link.reader.read(LAYOUT.block_bytes, size, pools.in_target([3], ALL), WAIT_S)

    reading = in_thread(read)
    source = pools.source.buffer[: int(sent * LAYOUT.block_bytes)]
    with suppress(LinkError):  # If the writer hears in time.
        link.writer.write(write_of([3], ALL), [source], WAIT_S)
    with pytest.raises(LinkError, match=why):
        reading()
    assert pools.landed() <= {3}


def test_a_source_that_is_no_whole_blocks_is_refused_before_anything_is_sent(link: Link, pools: Pools) -> None:
    for source in (pools.source.buffer[:100], pools.source.buffer[:0]):
        with pytest.raises(TransportError):
            link.writer.write(write_of([3, 4, 5], ALL), [source], WAIT_S)
    link.move([1], [2], ALL)
    assert equal(pools, [1], [2])


def test_closing_twice_is_like_closing_once(ucx_transport: UcxTransport, pools: Pools) -> None:
    link = Link(ucx_transport, pools)
    for _ in range(2):
        link.writer.close()
        link.reader.close()
    link.reader.stop()
    link.close()


def test_links_leave_no_file_descriptor_behind(ucx_transport: UcxTransport, pools: Pools, large: Pools) -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    def cycle(count: int) -> None:
        link = Link(ucx_transport, pools)
        if count % 2:
            link.move([1], [2], ALL)
        link.close()
        if count % 10 == 0:  # One that fails half-way.
            link = Link(ucx_transport, large)
            with pytest.raises(LinkError):
                link.writer.write(write_of([1], range(1)), large.from_source([0], range(1)), 0.01)
            link.close()

    cycle(0)
    cycle(1)
    before = open_files()
    for count in range(50):
        cycle(count)
    assert open_files() == before


def test_an_open_link_costs_nothing_while_no_write_is_under_way(link: Link) -> None:
    link.move([1], [2], ALL)
    before = time.process_time()
    threading.Event().wait(1.0)
    assert time.process_time() - before < 0.02


def test_waiting_for_bytes_costs_next_to_nothing(link: Link, pools: Pools) -> None:
    link.move([1], [2], ALL)
    before = time.process_time()
    with pytest.raises(LinkError, match="too long"):
        link.reader.read(LAYOUT.block_bytes, 0, pools.in_target([3], ALL), 1.0)
    assert time.process_time() - before < 0.1


def test_it_listens_at_the_address_given_and_no_other(link: Link) -> None:
    link.move([1], [2], ALL)
    mine = {os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine:
                address = fields[1].split(":")[0]
                assert table == "tcp"
                assert socket.inet_ntoa(bytes.fromhex(address)[::-1]) == "127.0.0.1"


def test_a_link_that_is_not_agreed_leaves_no_worker_behind(
    ucx_transport: UcxTransport, pools: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    sending, receiving = channels()

    def ask(data: bytes) -> bytes:
        monkeypatch.setattr(transport_ucx, "_MAX_ADDRESS_BYTES", 1)
        with pytest.raises(TransportUnavailable, match="use fewer network devices"):
            ucx_transport.accept(data, receiving, LAYOUT, pools.target)
        raise TransportUnavailable("declined")

    with pytest.raises(TransportUnavailable, match="declined"):
        ucx_transport.connect(OFFER, sending, LAYOUT, [pools.source], ask)
    assert not ucx_transport._ports
    sending.close()
    receiving.close()


def test_the_two_sides_must_speak_of_the_same(ucx_transport: UcxTransport, pools: Pools) -> None:
    sending, receiving = channels()
    with pytest.raises(TransportUnavailable, match="another kind"):
        ucx_transport.connect(b"ucx 2", sending, LAYOUT, [pools.source], lambda data: data)
    with pytest.raises(TransportUnavailable, match="malformed"):
        ucx_transport.connect(OFFER, sending, LAYOUT, [pools.source], lambda data: b"?")
    with pytest.raises(TransportUnavailable, match="garbled"):
        ucx_transport.accept(garbled(), receiving, LAYOUT, pools.target)
    sending.close()
    receiving.close()


def garbled() -> bytes:
    return msgspec.msgpack.encode(Greeting(b"some address", b"and its digest"))


def test_a_closed_transport_makes_no_more_links(pools: Pools) -> None:
    assert UcxTransport("127.0.0.1").offer(pools.target) == OFFER
    transport = UcxTransport("127.0.0.1")
    link = Link(transport, pools)
    transport.close()
    with pytest.raises(TransportUnavailable, match="closed"):
        transport.connect(OFFER, link.sending, LAYOUT, [pools.source], lambda data: data)
    link.move([1], [2], ALL)  # What is open goes on.
    link.close()
    transport.close()


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.lists(st.integers(1, 50), min_size=1, max_size=12))
def test_the_cut_fits_both_ends_and_is_no_finer_than_it_must(here: list[int], there: list[int]) -> None:
    there = [*there, sum(here) - sum(there)] if sum(there) < sum(here) else cut_off(there, sum(here))
    sizes = _cut(here, there)
    assert sum(sizes) == sum(here)
    for end in (here, there):
        starts = [0, *itertools.accumulate(end)]
        spans = [Span(1000 * number, size, HOST_MEMORY) for number, size in enumerate(end)]
        pieces = _pieces(spans, sizes)
        flat = [starts[piece.address // 1000] + piece.address % 1000 for piece in pieces]
        assert flat == [0, *itertools.accumulate(sizes)][:-1]
    borders = {*itertools.accumulate(here), *itertools.accumulate(there)}
    assert len(sizes) == len(borders)


def cut_off(sizes: list[int], total: int) -> list[int]:
    kept: list[int] = []
    for size in sizes:
        kept.append(min(size, total - sum(kept)))
    return [size for size in kept if size]


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=80))
def test_no_bytes_of_a_stranger_reach_ucx(data: bytes) -> None:
    with pytest.raises(TransportUnavailable):
        _parse(data)

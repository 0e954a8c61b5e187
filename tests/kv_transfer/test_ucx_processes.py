"""ucx between two real processes, and what one of them does when the other is killed or stopped in mid-transfer."""

import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("libucx")

from kv_transfer.transport import LinkError
from kv_transfer.transport_ucx import UcxTransport
from kv_transfer.ucx_port import MAX_UNANSWERED
from tests.support.ucx_ends import LAYOUT, WAIT_S, Link, Peer, Pools, in_thread, next_write, take, write_of

ALL = range(LAYOUT.num_layers)
SOURCE, TARGET = [7, 8, 2, 3], [3, 4, 9, 1]


@pytest.fixture
def start(ucx_transport: UcxTransport) -> Iterator[Callable[[str, Pools], Peer]]:
    peers: list[Peer] = []

    def start(role: str, pools: Pools) -> Peer:
        peers.append(Peer(role, ucx_transport, pools))
        return peers[-1]

    yield start
    for peer in peers:
        peer.close()


Start = Callable[[str, Pools], Peer]


def test_writes_of_another_process_arrive(start: Start, pools: Pools) -> None:
    sender = start("sender", pools)
    for _ in range(20):
        pools.mark()
        sender.do("write", SOURCE, TARGET, WAIT_S)
        take(sender.reader, sender.channel, pools, WAIT_S)
        assert sender.answer() == "done"
        assert b"".join(pools.in_target(TARGET, ALL)) == b"".join(pools.from_source(SOURCE, ALL))
        assert pools.landed() == set(TARGET)


def test_writes_arrive_in_another_process(start: Start, large: Pools) -> None:
    receiver = start("receiver", large)
    for layer in range(2):
        receiver.do("read", WAIT_S)
        source = large.from_source([0], range(layer, layer + 1))
        receiver.writer.write(write_of([1], range(layer, layer + 1)), source, WAIT_S)
        assert receiver.answer() == b"".join(source)


def half_written(sender: Peer, pools: Pools) -> Callable[[], None]:
    """Begin to read a write that its sender leaves half done; returns when the first half is in."""
    sender.do("half", SOURCE, TARGET)
    reading = in_thread(lambda: take(sender.reader, sender.channel, pools, WAIT_S))
    until = time.monotonic() + WAIT_S
    while not pools.landed():
        assert time.monotonic() < until
        threading.Event().wait(0.005)
    return reading


def test_a_sender_killed_in_mid_transfer_is_noticed_before_the_deadline(
    start: Start, ucx_transport: UcxTransport, pools: Pools
) -> None:
    sender = start("sender", pools)
    reading = half_written(sender, pools)
    sender.signal(signal.SIGKILL)
    with pytest.raises(LinkError, match="lost"):
        reading()
    assert pools.landed() <= set(TARGET[:2])
    works(ucx_transport, pools)


def test_a_stopped_sender_is_given_up_at_the_deadline_and_writes_nowhere_later(
    start: Start, ucx_transport: UcxTransport, pools: Pools
) -> None:
    sender = start("sender", pools)
    sender.do("half", SOURCE, TARGET)
    _, told = next_write(sender.channel, pools)
    sender.signal(signal.SIGSTOP)
    with pytest.raises(LinkError, match="too long"):
        sender.reader.read(4 * LAYOUT.block_bytes, told, pools.in_target(TARGET, ALL), 0.5)
    pools.mark()
    works(ucx_transport, pools)
    sender.signal(signal.SIGCONT)
    # The half may have left in good order. But what follows meets a closed door, and not our memory.
    for _ in range(MAX_UNANSWERED + 1):
        sender.do("write", SOURCE, TARGET, WAIT_S)
    answers = [sender.answer() for _ in range(MAX_UNANSWERED + 2)]
    assert "lost" in answers[-1] or "ended" in answers[-1]
    assert pools.landed() == {15}


def test_a_receiver_killed_in_mid_transfer_is_noticed_before_the_deadline(
    start: Start, ucx_transport: UcxTransport, large: Pools, pools: Pools
) -> None:
    receiver = start("receiver", large)
    receiver.do("look")
    writing = in_thread(
        lambda: receiver.writer.write(write_of([1], range(1)), large.from_source([0], range(1)), WAIT_S)
    )
    assert receiver.answer() == "done"
    receiver.signal(signal.SIGKILL)
    with pytest.raises(LinkError, match="lost"):
        writing()
    works(ucx_transport, pools)


def test_a_stopped_receiver_is_given_up_at_the_deadline(
    start: Start, ucx_transport: UcxTransport, large: Pools, pools: Pools
) -> None:
    receiver = start("receiver", large)
    receiver.do("look")
    writing = in_thread(lambda: receiver.writer.write(write_of([1], range(1)), large.from_source([0], range(1)), 1.0))
    assert receiver.answer() == "done"
    receiver.signal(signal.SIGSTOP)
    with pytest.raises(LinkError, match="too long"):
        writing()
    receiver.writer.close()
    works(ucx_transport, pools)


def works(ucx_transport: UcxTransport, pools: Pools) -> None:
    """This process, and its UCX, are as good as before."""
    link = Link(ucx_transport, pools)
    link.move([5], [15], ALL)
    assert b"".join(pools.in_target([15], ALL)) == b"".join(pools.from_source([5], ALL))
    link.close()

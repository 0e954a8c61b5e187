"""What an end of a nixl link does when the other one is in trouble, and what links cost the process."""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("nixl_cu12")

from kv_transfer.transport import LinkError
from kv_transfer.transport_nixl import NixlTransport
from tests.support.listening import listening
from tests.support.nixl_peer import (
    LAYOUT,
    LONG_S,
    NUM_BLOCKS,
    POISON,
    Link,
    Peer,
    ReceiverEnd,
    SenderEnd,
    pool,
)

# UCX over TCP moves bytes only while both ends drive it, and these are more than the sockets between them hold: so the
# write of them is under way for as long as its receiver does not read. By a way of the kernel it could be over at once.
EVERYTHING = list(range(NUM_BLOCKS))
OVER_TCP = {"UCX_TLS": "tcp"}


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


# ---- trouble


def test_a_sender_that_is_killed_in_a_write_is_noticed(
    nixl_transport: NixlTransport, start_peer: Callable[..., Peer]
) -> None:
    end = ReceiverEnd(nixl_transport, pool(POISON))
    sender = start_peer("send", end.address, environment=OVER_TCP)
    end.accept()
    assert sender.hear()["connected"]
    end.settle()
    sender.tell(str([EVERYTHING]))
    end.frame()
    sender.signal(signal.SIGKILL)
    sender.process.wait(LONG_S)
    with pytest.raises(LinkError, match="failed"):
        end.reader.read(LAYOUT.block_bytes * NUM_BLOCKS, 0, [], LONG_S)
    end.close()


def test_a_receiver_that_is_killed_in_a_write_is_noticed(
    nixl_transport: NixlTransport, start_peer: Callable[..., Peer]
) -> None:
    receiver = start_peer("receive", environment=OVER_TCP)
    sender = SenderEnd(nixl_transport, pool(), receiver.hear()["address"])
    assert receiver.ask("settle") == {"settled": True}
    receiver.tell("frame")  # It reads the frame and does not drive its agent.
    writing, raised = failure_of(lambda: sender.write(EVERYTHING))
    assert receiver.hear() == {"frame": EVERYTHING}
    receiver.signal(signal.SIGKILL)
    writing.join(LONG_S)
    assert "did not take" not in str(raised[0])
    assert isinstance(raised[0], LinkError)
    with pytest.raises(LinkError, match="ended"):
        sender.write([1])
    sender.close()


def test_a_stopped_receiver_holds_a_write_until_its_deadline_and_gets_no_more_of_it(
    nixl_transport: NixlTransport, start_peer: Callable[..., Peer]
) -> None:
    receiver = start_peer("receive", environment=OVER_TCP)
    sender = SenderEnd(nixl_transport, pool(), receiver.hear()["address"])
    assert receiver.ask("settle") == {"settled": True}
    receiver.signal(signal.SIGSTOP)
    with pytest.raises(LinkError, match="did not take"):
        sender.write(EVERYTHING, timeout_s=0.3)
    sender.close()
    receiver.signal(signal.SIGCONT)
    assert "failed" in receiver.ask("read 1")["error"]  # The sender's agent is gone: found out, not waited for.
    assert receiver.ask("close") == {"closed": True}
    settled = receiver.ask("digest")
    assert receiver.ask("digest") == settled


def test_a_stopped_sender_is_not_waited_for_beyond_the_deadline(
    nixl_transport: NixlTransport, start_peer: Callable[..., Peer]
) -> None:
    end = ReceiverEnd(nixl_transport, pool(POISON))
    sender = start_peer("send", end.address, environment=OVER_TCP)
    end.accept()
    assert sender.hear()["connected"]
    end.settle()
    sender.tell(str([EVERYTHING]))
    end.frame()
    sender.signal(signal.SIGSTOP)
    with pytest.raises(LinkError, match="did not land"):
        end.reader.read(LAYOUT.block_bytes * NUM_BLOCKS, 0, [], 0.3)
    end.close()


def test_bytes_still_under_way_land_nowhere_once_both_ends_are_closed(
    open_link: Callable[..., Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while the same pool goes on being written over another link."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    target = pool(POISON)
    late, healthy = open_link(target), open_link(target)
    late.receiver.settle()
    with pytest.raises(LinkError, match="did not take"):
        late.sender.write(EVERYTHING, timeout_s=0.05)
    late.sender.close()
    late.receiver.reader.stop()
    late.receiver.reader.close()
    whole = np.frombuffer(target.buffer, np.uint8)
    whole[:] = POISON
    for _ in range(20):
        healthy.send([500], [0])
    whole[500 * LAYOUT.block_bytes : 501 * LAYOUT.block_bytes] = POISON
    assert bool((whole == POISON).all())


def test_a_waiting_reader_can_be_stopped(open_link: Callable[..., Link]) -> None:
    link = open_link()
    waiting, raised = failure_of(lambda: link.receiver.reader.read(LAYOUT.block_bytes, 0, [], LONG_S))
    link.receiver.reader.stop()
    waiting.join(LONG_S)
    assert "stopped" in str(raised[0])
    assert isinstance(raised[0], LinkError)
    with pytest.raises(LinkError, match="stopped"):
        link.receiver.reader.read(LAYOUT.block_bytes, 0, [], LONG_S)


# ---- what it costs the process


def test_links_come_and_go_without_leaving_anything_open(nixl_transport: NixlTransport) -> None:
    target, source = pool(POISON), pool()

    def cycle() -> int:
        link = Link(nixl_transport, target, source)
        link.send([3])
        link.close()
        link.close()
        return len(os.listdir("/proc/self/fd"))

    first = cycle()
    assert [cycle() for _ in range(20)][-1] <= first


def test_an_idle_link_polls_nothing(start_peer: Callable[..., Peer], nixl_transport: NixlTransport) -> None:
    receiver = start_peer("receive")
    sender = SenderEnd(nixl_transport, pool(), receiver.hear()["address"])
    receiver.tell("read 1")
    sender.write([1])
    assert receiver.hear() == {"read": 1}
    before = _switches(receiver.process.pid)
    threading.Event().wait(1.0)
    assert _switches(receiver.process.pid) - before < 20  # A poll is at least one, and would come each millisecond.
    sender.close()


def _switches(pid: int) -> int:
    """How often the threads of a process went to sleep of themselves."""
    total = 0
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        for line in status.read_text(encoding="ascii").splitlines():
            if line.startswith("voluntary_ctxt_switches"):
                total += int(line.split()[1])
    return total


def test_ucx_listens_on_the_address_of_the_worker_alone(
    start_peer: Callable[..., Peer], nixl_transport: NixlTransport
) -> None:
    receiver = start_peer("receive")
    sender = SenderEnd(nixl_transport, pool(), receiver.hear()["address"])
    for pid in (receiver.process.pid, os.getpid()):
        assert {address for address, _ in listening(pid)} == {"0100007F"}
    sender.close()

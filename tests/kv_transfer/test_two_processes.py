"""Hand-offs between two real processes, and what one of them does when the other is killed or stopped."""

import hashlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kv_transfer.events import Committed, Drained, Failed, Fenced, Sent
from kv_transfer.receive_table import ReceiveCounts
from kvferry_rpc.common_pb2 import ErrorCode
from kvferry_rpc.internal_pb2 import Ticket
from runtime.clock import ManualClock
from tests.support.kv_pair import LAYOUT, LIBRARIES, WAIT_S, Pair, block_of, wiring
from tests.support.kv_process import Peer

NUM_BLOCKS = 16
LONG_S = 60.0  # A lease or timeout that no test waits for.


class RemotePrefill:
    """A receiver here, whose leases run out when the test says so, and a sender in another process."""

    def __init__(self, kind: str) -> None:
        self.clock = ManualClock()
        options = {"lease_s": LONG_S, "io_timeout_s": LONG_S, "clock": self.clock}
        self.pair = Pair(num_blocks=NUM_BLOCKS, receiver=options, **wiring(kind))
        self.peer = Peer("prefill", kind, NUM_BLOCKS, {"io_timeout_s": LONG_S})
        self.ids, self.source = [3, 4, 7, 1], [9, 8, 2, 3]
        self.ticket = self.pair.reserve(self.ids)

    def do(self, what: str, **fields: Any) -> None:
        self.peer.do(do=what, ticket=self.ticket.SerializeToString().hex(), **fields)

    def send_half(self) -> None:
        """Open and push two of four blocks; return when they have landed."""
        self.do("open", num_tokens=self.pair.tokens(4), within_s=LONG_S)
        self.push(0, 2)
        self.pair.wait_until_noted(self.ticket, 2)
        assert all(self.landed(index) for index in range(2))

    def pass_lease(self) -> None:
        self.clock.advance(LONG_S)
        self.pair.receiver.sweep(self.clock.now())

    def fail_by_lease(self) -> None:
        """Let the lease run out, and once more if a write that had landed was still being noted."""
        deadline = time.monotonic() + WAIT_S
        while not self.kinds():
            assert time.monotonic() < deadline
            self.pass_lease()
            threading.Event().wait(0.005)
        assert "lease" in self.wait(Failed).error.message

    def push(self, start: int, stop: int) -> None:
        self.do("push", first=start, blocks=self.source[start:stop])

    def landed(self, index: int) -> bool:
        return bool(
            (block_of(self.pair.decode, self.ids[index]) == block_of(self.pair.prefill, self.source[index])).all()
        )

    def kinds(self) -> list[str]:
        return self.pair.received.kinds(self.ticket.handoff_id)

    def wait(self, *kinds: type) -> Any:
        return self.pair.received.wait(self.ticket.handoff_id, *kinds)


@pytest.fixture
def remote(request: pytest.FixtureRequest) -> Iterator[RemotePrefill]:
    both = RemotePrefill(request.param)
    try:
        yield both
    finally:
        both.peer.close()
        both.pair.__exit__()


def over(*kinds: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("remote", kinds, indirect=True)


@over("tcp", "shm", *LIBRARIES)
def test_the_content_of_another_process_arrives(remote: RemotePrefill) -> None:
    remote.send_half()
    remote.push(2, 4)
    remote.do("commit", num_tokens=remote.pair.tokens(4))
    assert isinstance(remote.wait(Committed, Failed), Committed)
    assert all(remote.landed(index) for index in range(4))
    assert remote.peer.wait_event("Sent", "Failed")["event"] == "Sent"
    assert remote.peer.wait_event("Drained")


@over("tcp", "shm", *LIBRARIES)
def test_a_sender_killed_in_mid_transfer_is_noticed_at_once_and_fenced(remote: RemotePrefill) -> None:
    remote.send_half()
    remote.peer.signal(signal.SIGKILL)
    assert "link to the sender was lost" in remote.wait(Failed).error.message
    remote.wait(Fenced)
    assert remote.kinds() == ["Failed", "Fenced"]
    assert remote.pair.receiver.snapshot().handoffs == ReceiveCounts(0, 0, 0, 0)
    remote.pair.reserve(remote.ids)  # The blocks are free for the next.


@over("tcp")
def test_a_stopped_sender_over_tcp_fails_by_its_lease_and_is_fenced_at_once(remote: RemotePrefill) -> None:
    remote.send_half()
    remote.peer.signal(signal.SIGSTOP)
    remote.fail_by_lease()
    remote.wait(Fenced)
    remote.peer.signal(signal.SIGCONT)
    remote.push(2, 4)
    assert "lease" in remote.peer.wait_event("Failed")["message"]
    remote.peer.wait_event("Drained")
    assert not remote.landed(2)
    assert remote.kinds() == ["Failed", "Fenced"]


@over("shm")
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGCONT])
def test_a_stopped_sender_over_shm_keeps_its_blocks_in_quarantine_until_it_cannot_write(
    remote: RemotePrefill, ending: int
) -> None:
    remote.send_half()
    remote.peer.signal(signal.SIGSTOP)
    remote.fail_by_lease()
    # It has our memory mapped and may be in the middle of a copy: no time that passes makes this safe.
    for _ in range(10):
        remote.pass_lease()
    assert remote.kinds() == ["Failed"]
    assert remote.pair.receiver.snapshot().handoffs.quarantined == 1
    with pytest.raises(ValueError, match="still writable"):
        remote.pair.reserve(remote.ids[:1])
    remote.peer.signal(ending)
    remote.wait(Fenced)
    assert remote.kinds() == ["Failed", "Fenced"]
    remote.pair.reserve(remote.ids[:1])
    if ending == signal.SIGCONT:
        assert "lease" in remote.peer.wait_event("Failed")["message"]
        remote.peer.wait_event("Drained")


@over("shm")
def test_a_receiver_closes_in_time_although_a_stopped_sender_has_its_memory(
    remote: RemotePrefill, caplog: pytest.LogCaptureFixture
) -> None:
    remote.send_half()
    remote.peer.signal(signal.SIGSTOP)
    remote.fail_by_lease()
    remote.pair.receiver.close(0.5)
    assert "may still write into the pool" in caplog.text
    assert remote.kinds() == ["Failed"], "nobody may be told that the blocks are safe"


class RemoteDecode:
    """A sender here, a receiver in another process."""

    def __init__(self, kind: str, *, num_blocks: int = NUM_BLOCKS, io_timeout_s: float = LONG_S) -> None:
        self.pair = Pair(num_blocks=num_blocks, sender={"io_timeout_s": io_timeout_s}, **wiring(kind))
        self.peer = Peer("decode", kind, num_blocks, {"lease_s": LONG_S, "io_timeout_s": LONG_S})

    def reserve(self, num_blocks: int) -> Ticket:
        return self.peer.reserve(range(num_blocks), self.pair.tokens(num_blocks))

    def __enter__(self) -> "RemoteDecode":
        return self

    def __exit__(self, *_: object) -> None:
        self.peer.close()
        self.pair.__exit__()


@pytest.mark.parametrize("kind", ["tcp", "shm", *LIBRARIES])
def test_the_content_arrives_in_another_process(kind: str) -> None:
    with RemoteDecode(kind) as remote:
        ticket, source = remote.reserve(4), [9, 8, 2, 3]
        remote.pair.send(ticket, source)
        assert isinstance(remote.pair.sent.wait(ticket.handoff_id, Sent, Failed), Sent)
        content = hashlib.blake2b()
        for block_id in source:
            content.update(block_of(remote.pair.prefill, block_id))
        assert remote.peer.wait_event("Committed", "Failed")["content"] == content.hexdigest()


@pytest.mark.parametrize("kind", ["tcp", "shm", *LIBRARIES])
def test_a_killed_receiver_is_noticed_at_once(kind: str) -> None:
    with RemoteDecode(kind) as remote:
        ticket = remote.reserve(4)
        remote.pair.open(ticket, [9, 8, 2, 3], within_s=LONG_S)
        remote.pair.push(ticket, range(2), range(LAYOUT.num_layers))
        remote.peer.signal(signal.SIGKILL)
        failed = remote.pair.sent.wait(ticket.handoff_id, Failed)
        assert failed.error.code == ErrorCode.HANDOFF_FAILED
        remote.pair.sent.wait(ticket.handoff_id, Drained)
        assert remote.pair.sent.kinds(ticket.handoff_id) == ["Failed", "Drained"]


@pytest.mark.parametrize("kind", ["tcp", "shm", *LIBRARIES])
@pytest.mark.parametrize("when", ["before the greeting", "after half", "with the commit"])
def test_a_stopped_receiver_is_given_up_in_time(kind: str, when: str) -> None:
    with RemoteDecode(kind, io_timeout_s=0.5) as remote:
        ticket = remote.reserve(4)
        if when == "before the greeting":
            remote.peer.signal(signal.SIGSTOP)
        remote.pair.open(ticket, [9, 8, 2, 3], within_s=LONG_S)
        remote.pair.push(ticket, range(2), range(LAYOUT.num_layers))
        if when == "after half":
            remote.peer.signal(signal.SIGSTOP)
        remote.pair.push(ticket, range(4), range(LAYOUT.num_layers))
        if when == "with the commit":
            remote.peer.signal(signal.SIGSTOP)
            remote.pair.commit(ticket, 4)
        remote.pair.sent.wait(ticket.handoff_id, Failed)
        remote.pair.sent.wait(ticket.handoff_id, Drained)
        assert remote.pair.sent.kinds(ticket.handoff_id) == ["Failed", "Drained"]


def test_a_sender_stuck_in_a_write_to_a_stopped_receiver_comes_out_in_time() -> None:
    """More bytes than the kernel buffers: the writer blocks in mid-frame, holding the local pool, until its timeout."""
    num_blocks = 4096
    with RemoteDecode("tcp", num_blocks=num_blocks, io_timeout_s=1.0) as remote:
        ticket, source = remote.reserve(num_blocks), list(range(num_blocks))
        remote.pair.open(ticket, source, within_s=LONG_S)
        remote.pair.push(ticket, range(1), range(LAYOUT.num_layers))
        remote.peer.signal(signal.SIGSTOP)
        remote.pair.push(ticket, range(1, num_blocks), range(LAYOUT.num_layers))
        remote.pair.sent.wait(ticket.handoff_id, Failed)
        remote.pair.sent.wait(ticket.handoff_id, Drained)
        assert remote.pair.sender.snapshot().handoffs == 0


def test_the_shared_pool_leaves_nothing_behind_when_its_owner_is_killed() -> None:
    before = set(os.listdir("/dev/shm"))
    with RemoteDecode("shm") as remote:
        remote.reserve(1)
        remote.peer.signal(signal.SIGKILL)
        remote.peer.process.wait(10.0)
    assert set(os.listdir("/dev/shm")) <= before

"""How hand-offs end early: cancels, leases, deadlines, closings, lost links, lost messages. Nothing is left."""

import gc
import os
import threading
import time
import tracemalloc

import numpy as np
import pytest

from kv_transfer import transport_memory
from kv_transfer.events import Committed, Drained, Failed, Fenced, Sent
from kv_transfer.faults import FaultPlan
from kv_transfer.fingerprinter import Fingerprinter, PageFingerprints
from kv_transfer.messages import Write
from kv_transfer.pages import PagesAt
from kv_transfer.receive_table import ReceiveCounts
from kv_transfer.transport_shm import PoolWriter
from kvferry_rpc.common_pb2 import ErrorCode
from runtime.clock import ManualClock
from runtime.errors import KvferryError
from tests.support.kv_pair import KINDS, LAYOUT, LIBRARIES, POISON, WAIT_S, Pair, block_of, poison, wiring

NOTHING = ReceiveCounts(0, 0, 0, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_after_the_fence_no_byte_lands(kind: str) -> None:
    """The blocks are poisoned at the fence, as by a new owner, and must stay so while the sender runs out."""
    slow = FaultPlan(bytes_per_second=LAYOUT.page_bytes * 1000)
    with Pair(num_blocks=32, sender={"faults": slow}, **wiring(kind)) as pair:
        tickets = []
        for round_ in range(8):
            ids = list(range(round_ * 4, round_ * 4 + 4))
            ticket, source = pair.reserve(ids), [1, 2, 3, 4]
            tickets.append(ticket)
            pair.open(ticket, source)
            for layer in range(LAYOUT.num_layers):
                pair.push(ticket, range(4), range(layer, layer + 1))
            pair.commit(ticket, 4)
            time.sleep(0.003 * round_)
            aborted = pair.receiver.abort(ticket.handoff_id, "cancelled")
            pair.outcome(ticket)
            assert aborted == (pair.received.kinds(ticket.handoff_id) == ["Failed", "Fenced"])
            poison(pair.decode, ids)
        pair.sender.close(10.0)
        for ticket in tickets:
            assert all((block_of(pair.decode, block) == POISON).all() for block in ticket.block_ids)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cancel_on_either_side_reaches_the_other(kind: str) -> None:
    with Pair(**wiring(kind)) as pair:
        first, second = pair.reserve([1]), pair.reserve([2])
        for ticket in (first, second):
            pair.open(ticket, [5])
        pair.wait_until_open(2)
        assert pair.receiver.abort(first.handoff_id, "the client left")
        pair.sender.abort(second.handoff_id, "the client left")
        for ticket in (first, second):
            received, sent = pair.outcome(ticket)
            assert isinstance(received, Failed)
            assert isinstance(sent, Failed)
            assert received.error.code == sent.error.code == ErrorCode.CANCELLED
            assert "the client left" in received.error.message
            assert "the client left" in sent.error.message
        assert not pair.receiver.abort(first.handoff_id, "again")
        assert not pair.receiver.abort("unknown", "why")


def test_a_place_that_nobody_opened_is_fenced_at_once_by_an_abort() -> None:
    with Pair(**wiring("tcp")) as pair:
        ticket = pair.reserve([1])
        assert pair.receiver.abort(ticket.handoff_id, "cancelled")
        assert pair.received.kinds(ticket.handoff_id) == ["Failed", "Fenced"]
        pair.send(ticket, [3])
        sent = pair.sent.wait(ticket.handoff_id, Failed)
        assert "no such ticket" in sent.error.message


@pytest.mark.parametrize("kind", KINDS)
def test_two_hundred_quick_rounds_leave_nothing(kind: str) -> None:
    """H061: each request follows one that is cancelled."""
    with Pair(**wiring(kind)) as pair:  # What a library opens once stays open.
        pair.send(pair.reserve([0]), [1])
    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    with Pair(**wiring(kind)) as pair:
        first = pair.reserve([0])
        pair.send(first, [1])  # A hand-off aborted before its link is up is known to the receiver by its lease only.
        pair.outcome(first)
        pair.receiver.release(first.handoff_id)
        for round_ in range(200):
            cancelled, wanted = pair.reserve([1, 2]), pair.reserve([3])
            pair.open(cancelled, [4, 5])
            pair.push(cancelled, range(2), range(LAYOUT.num_layers))
            if round_ % 2:
                pair.receiver.abort(cancelled.handoff_id, "cancelled")
            else:
                pair.sender.abort(cancelled.handoff_id, "cancelled")
            pair.send(wanted, [round_ % 16])
            assert isinstance(pair.outcome(wanted)[0], Committed)
            assert pair.equal(wanted, [round_ % 16])
            assert isinstance(pair.outcome(cancelled)[0], Failed)
            pair.receiver.release(wanted.handoff_id)
        assert pair.receiver.snapshot().handoffs == NOTHING
        assert pair.receiver.snapshot().links == 1
        assert pair.sender.snapshot().handoffs == 0
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before


@pytest.mark.parametrize("kind", ["memory", "tcp", "shm", *LIBRARIES])
def test_memory_does_not_grow_with_the_number_of_hand_offs(kind: str) -> None:
    """A leak shows in every period. In a single one Python may have rebuilt a large table of its own, that of interned
    strings for one, whose new memory counts and whose old one, older than the counting, does not."""

    def growth(count: int) -> int:
        """By how many bytes that Python holds."""
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(count):
            ticket = pair.reserve([1, 2])
            pair.send(ticket, [3, 4])
            pair.outcome(ticket)
            pair.receiver.release(ticket.handoff_id)
            pair.forget()
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before

    with Pair(**wiring(kind)) as pair:
        tracemalloc.start()
        try:
            growth(20)
            grown = [growth(30) for _ in range(3)]
        finally:
            tracemalloc.stop()
    assert min(grown) < 30 * 16, f"each hand-off leaves something behind: {grown}"


def test_a_lease_runs_out_with_no_traffic_at_all() -> None:
    with Pair(receiver={"lease_s": 0.05}, **wiring("tcp")) as pair:
        ticket = pair.reserve([1])
        failed = pair.received.wait(ticket.handoff_id, Failed)
        assert "lease" in failed.error.message
        pair.received.wait(ticket.handoff_id, Fenced)
        assert pair.receiver.snapshot().handoffs == NOTHING


@pytest.mark.parametrize("kind", KINDS)
def test_renewals_keep_many_hand_offs_that_wait(kind: str) -> None:
    """H087."""
    clock, lease_s = ManualClock(), 3.0
    both = {"clock": clock}
    with Pair(num_blocks=128, receiver={"lease_s": lease_s, **both}, sender=both, **wiring(kind)) as pair:
        tickets = [pair.reserve([block]) for block in range(128)]
        for ticket in tickets:
            pair.open(ticket, [ticket.block_ids[0]])
        pair.wait_until_open(128)
        for _ in range(5):
            clock.advance(lease_s / 2)
            pair.sender.sweep(clock.now())
            pair.wait_until_renewed(clock.now() + lease_s)
        for ticket in tickets:
            pair.push(ticket, range(1), range(LAYOUT.num_layers))
            pair.commit(ticket, 1)
        assert all(isinstance(pair.outcome(ticket)[0], Committed) for ticket in tickets)


def test_a_hand_off_past_its_deadline_fails_on_both_sides() -> None:
    clock = ManualClock(time.monotonic())
    with Pair(sender={"clock": clock}, **wiring("tcp")) as pair:
        ticket = pair.reserve([1])
        pair.open(ticket, [1])
        pair.wait_until_open(1)  # before that, the receiver could learn of it by its lease only
        clock.advance(2 * WAIT_S)
        pair.sender.sweep(clock.now())
        received, sent = pair.outcome(ticket)
        assert isinstance(sent, Failed)
        assert sent.error.code == received.error.code == ErrorCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize("kind", KINDS)
def test_closing_the_sender_tells_the_receiver_and_ends_all_hand_offs(kind: str) -> None:
    with Pair(**wiring(kind)) as pair:
        tickets = [pair.reserve([block]) for block in range(3)]
        for ticket in tickets:
            pair.open(ticket, [1])
        pair.wait_until_open(3)
        pair.sender.close(10.0)
        for ticket in tickets:
            received, _ = pair.outcome(ticket)
            assert received.error.code in (ErrorCode.CANCELLED, ErrorCode.HANDOFF_FAILED)
        with pytest.raises(KvferryError, match="closing"):
            pair.open(pair.reserve([5]), [1])


@pytest.mark.parametrize("kind", KINDS)
def test_closing_the_receiver_tells_the_sender_and_ends_all_hand_offs(kind: str) -> None:
    with Pair(**wiring(kind)) as pair:
        tickets = [pair.reserve([block]) for block in range(3)]
        for ticket in tickets:
            pair.open(ticket, [1])
        pair.wait_until_open(3)
        pair.receiver.close(10.0)
        for ticket in tickets:
            _, sent = pair.outcome(ticket)
            assert isinstance(sent, Failed)
        with pytest.raises(KvferryError, match="closing"):
            pair.reserve([9])


@pytest.mark.parametrize("kind", KINDS)
def test_a_receiver_closed_right_after_a_commit_has_said_so(kind: str) -> None:
    """Closing loses no last message: what the receiver took, the sender knows."""
    for _ in range(20):
        with Pair(**wiring(kind)) as pair:
            ticket = pair.reserve([1, 2])
            pair.send(ticket, [3, 4])
            pair.received.wait(ticket.handoff_id, Committed)
            pair.receiver.close(10.0)
            assert isinstance(pair.outcome(ticket)[1], Sent)


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_a_link_lost_on_one_side_only_is_replaced_and_links_do_not_pile_up(side: str) -> None:
    with Pair(**wiring("tcp")) as pair:
        for round_ in range(30):
            ticket = pair.reserve([1])
            pair.send(ticket, [round_ % 16])
            received, _ = pair.outcome(ticket)
            if isinstance(received, Committed):
                pair.receiver.release(ticket.handoff_id)
            outlet = next(iter(pair.sender._outlets.values()), None)
            if round_ % 2 and outlet is not None:
                ends = [outlet.link] if side == "sender" else [inlet.link for inlet in pair.receiver._inlets.values()]
                for link in ends:
                    link.break_off("test")
                if outlet.thread is not None:
                    outlet.thread.join(10.0)
        last = pair.reserve([1])
        pair.send(last, [7])
        assert isinstance(pair.outcome(last)[0], Committed)
        assert pair.receiver.snapshot().links <= 2
        assert pair.sender.snapshot().transports["decode"].transport == "tcp"


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kind", ["memory", "memory-direct"])
def test_seeded_message_faults_never_give_wrong_content_or_an_open_end(seed: int, kind: str) -> None:
    plan = FaultPlan(seed=seed, drop=0.03, duplicate=0.05, delay=0.2, reorder=0.1)
    timing = {"network": None, "io_timeout_s": 0.5}
    arguments = wiring(kind, plan)
    timing["network"] = arguments.pop("shared")["network"]
    with Pair(num_blocks=32, shared=timing, receiver={"lease_s": 0.4}, **arguments) as pair:
        random = np.random.default_rng(seed)
        jobs = []
        # No block twice: one that was committed is the caller's again, and a later hand-off would overwrite it.
        blocks = random.permutation(32).tolist()
        while len(blocks) >= 3:
            ids = [blocks.pop() for _ in range(random.integers(1, 4))]
            ticket = pair.reserve(ids)
            source = random.integers(0, 32, len(ids)).tolist()
            pair.send(ticket, source, within_s=0.8)
            if random.random() < 0.2:
                pair.receiver.abort(ticket.handoff_id, "cancelled")
            jobs.append((ticket, source))
        for ticket, source in jobs:
            received, sent = pair.outcome(ticket)
            if isinstance(received, Committed):
                assert pair.equal(ticket, source)
                pair.receiver.release(ticket.handoff_id)
            else:
                assert isinstance(sent, Failed)
            assert pair.received.kinds(ticket.handoff_id) in (["Committed"], ["Failed", "Fenced"])
            assert pair.sent.kinds(ticket.handoff_id)[-1] == "Drained"
            assert len(pair.sent.kinds(ticket.handoff_id)) == 2
        assert pair.receiver.snapshot().handoffs == NOTHING


class Gate(PoolWriter):
    """A one-sided writer that can be held in the middle of its copy."""

    inside = threading.Event()
    may_copy = threading.Event()

    def write_pages(
        self, message: Write, source: PagesAt, seed: int, fingerprinter: Fingerprinter, timeout_s: float
    ) -> PageFingerprints:
        Gate.inside.set()
        assert Gate.may_copy.wait(WAIT_S)
        return super().write_pages(message, source, seed, fingerprinter, timeout_s)


def test_a_broken_link_is_not_a_fence_while_its_sender_is_in_the_middle_of_a_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sender may close its end only when its last copy is over: to the receiver, that close is the fence."""
    monkeypatch.setattr(transport_memory, "PoolWriter", Gate)
    Gate.inside.clear()
    Gate.may_copy.clear()
    with Pair(receiver={"lease_s": 0.2}, **wiring("memory-direct")) as pair:
        ticket, source = pair.reserve([3]), [9]
        pair.open(ticket, source)
        pair.push(ticket, range(1), range(LAYOUT.num_layers))
        assert Gate.inside.wait(WAIT_S)
        next(iter(pair.sender._outlets.values())).link.break_off("test")
        pair.sent.wait(ticket.handoff_id, Failed)
        pair.received.wait(ticket.handoff_id, Failed)
        time.sleep(0.3)
        assert pair.received.kinds(ticket.handoff_id) == ["Failed"]
        assert pair.sent.kinds(ticket.handoff_id) == ["Failed"], "not drained: the pool is being read"
        Gate.may_copy.set()
        pair.received.wait(ticket.handoff_id, Fenced)
        assert pair.equal(ticket, source), "the copy had landed before the fence"
        pair.sent.wait(ticket.handoff_id, Drained)


@pytest.mark.parametrize("name", ["kv-send", "kv-listen", "kv-receive", "kv-answer"])
def test_without_a_thread_to_spare_one_hand_off_fails_and_the_next_works(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first thread of this name cannot be started."""
    left = [name]
    start = threading.Thread.start

    def starve(self: threading.Thread) -> None:
        if self.name in left:
            left.remove(self.name)
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", starve)
    with Pair(**wiring("tcp")) as pair:
        ticket = pair.reserve([1])
        pair.send(ticket, [2])
        assert isinstance(pair.sent.wait(ticket.handoff_id, Sent, Failed), Failed)
        pair.receiver.sweep(time.monotonic() + WAIT_S)  # no link told it: its lease has to
        received, sent = pair.outcome(ticket)
        assert isinstance(received, Failed)
        assert isinstance(sent, Failed)
        time.sleep(0.15)  # the pause after a link that could not be made
        again = pair.reserve([1])
        pair.send(again, [2])
        assert isinstance(pair.outcome(again)[0], Committed)

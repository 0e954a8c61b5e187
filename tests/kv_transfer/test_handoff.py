"""Whole hand-offs between a sender and a receiver in one process, over every transport."""

import time

import numpy as np
import pytest

from kv_transfer.events import CommitRecord, Committed, Drained, Failed, Fenced, Sent
from kv_transfer.faults import FaultPlan
from kv_transfer.outlet import LinkView
from kv_transfer.receive_table import ReceiveCounts
from kv_transfer.receiver import MAX_HANDOFFS, HandoffReceiver
from kv_transfer.sender import HandoffSender
from kvferry_rpc.common_pb2 import ErrorCode
from kvferry_rpc.internal_pb2 import Ticket
from runtime.clock import SystemClock
from runtime.errors import KvferryError
from tests.support.kv_pair import KINDS, LAYOUT, LIBRARIES, Events, Pair, block_of, make_identity, wiring

NOTHING = ReceiveCounts(0, 0, 0, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_decode_pool_holds_what_the_prefill_pool_held_and_both_say_the_same(kind: str) -> None:
    with Pair(**wiring(kind)) as pair:
        ticket, source = pair.reserve([3, 4, 7, 1]), [9, 8, 2, 3]
        pair.send(ticket, source)
        received, sent = pair.outcome(ticket)
        assert isinstance(received, Committed)
        assert isinstance(sent, Sent)
        assert pair.equal(ticket, source)
        assert received.record == CommitRecord(pair.tokens(4), b"first token", received.record.checksums)
        assert len(received.record.checksums) == 4
        assert received.stats.digest == sent.stats.digest
        assert len(sent.stats.digest) == 16
        assert received.stats.verified
        name = kind.removesuffix("-direct")
        assert (received.stats.transport, sent.stats.transport) == (name, name)
        assert received.stats.num_blocks == sent.stats.num_blocks == 4
        assert received.stats.size_bytes == sent.stats.size_bytes == 4 * LAYOUT.block_bytes
        assert sent.stats.first_write_at is not None
        assert sent.stats.last_write_at is not None
        assert sent.stats.first_write_at <= sent.stats.last_write_at <= sent.stats.acknowledged_at
        assert received.stats.commit_received_at <= received.stats.verified_at
        assert pair.received.kinds(ticket.handoff_id) == ["Committed"]
        assert pair.sent.kinds(ticket.handoff_id) == ["Sent", "Drained"]
        untouched = set(range(16)) - set(ticket.block_ids)
        assert not any(block_of(pair.decode, block).any() for block in untouched)
        pair.receiver.release(ticket.handoff_id)
        assert pair.receiver.snapshot().handoffs == NOTHING
        assert pair.sender.snapshot().handoffs == 0
        view = pair.sender.snapshot().transports["decode"]
        assert view == LinkView(name, view.detail, name, "")
        assert bool(view.detail) == (kind in LIBRARIES), "what the library chose"
        assert received.stats.first_write_at <= received.stats.last_write_at <= received.stats.commit_received_at


@pytest.mark.parametrize("kind", KINDS)
def test_many_scattered_blocks_arrive_though_they_take_several_looks(kind: str) -> None:
    with Pair(num_blocks=1000, **wiring(kind)) as pair:
        ids, source = (np.random.default_rng(seed).permutation(1000)[:900].tolist() for seed in (1, 2))
        ticket = pair.reserve(ids)
        pair.open(ticket, source)
        pair.push(ticket, range(900))
        pair.commit(ticket, 900)
        assert isinstance(pair.outcome(ticket)[0], Committed)
        assert pair.equal(ticket, source)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first_block", range(5))
def test_only_the_tail_that_is_missing_is_sent(kind: str, first_block: int) -> None:
    """All prefix hits from none to everything; in the last case only the commit record travels."""
    with Pair(**wiring(kind)) as pair:
        source = [5, 1, 8, 2]
        ticket = pair.reserve([10, 3, 11, 7][first_block:], first_block=first_block)
        pair.send(ticket, source)
        received, sent = pair.outcome(ticket)
        assert isinstance(received, Committed), received
        assert pair.equal(ticket, source)
        assert sent.stats.num_blocks == received.stats.num_blocks == 4 - first_block
        assert sent.stats.digest == received.stats.digest
        if first_block == 4:
            assert (sent.stats.size_bytes, sent.stats.first_write_at, sent.stats.last_write_at) == (0, None, None)


@pytest.mark.parametrize("num_tokens", [1, 7, 8, 9, 16, 17])
def test_prompts_around_block_borders(num_tokens: int) -> None:
    with Pair(**wiring("tcp")) as pair:
        num_blocks = LAYOUT.blocks_for(num_tokens)
        ticket = pair.receiver.reserve("r", 1, 0, list(range(num_blocks)), num_tokens)
        source = list(range(5, 5 + num_blocks))
        pair.open(ticket, source)
        pair.push(ticket, range(num_blocks), range(LAYOUT.num_layers))
        pair.sender.commit(ticket.handoff_id, CommitRecord(num_tokens, b""))
        assert isinstance(pair.outcome(ticket)[0], Committed)
        assert pair.equal(ticket, source)


@pytest.mark.parametrize("kind", KINDS)
def test_many_hand_offs_share_one_link(kind: str) -> None:
    with Pair(num_blocks=64, **wiring(kind)) as pair:
        random = np.random.default_rng(7)
        free = random.permutation(64).tolist()
        jobs: list[tuple[Ticket, list[int]]] = []
        while len(free) >= 4:
            count = int(random.integers(0, 4))
            ticket = pair.reserve([free.pop() for _ in range(count)], first_block=int(random.integers(1, 3)))
            jobs.append((ticket, random.integers(0, 64, ticket.first_block + count).tolist()))
        for ticket, source in jobs:
            pair.open(ticket, source)
        for layer in range(LAYOUT.num_layers):  # Interleaved, as a prefill worker that batches would do it.
            for ticket, source in jobs:
                pair.push(ticket, range(len(source)), range(layer, layer + 1))
        for ticket, source in jobs:
            pair.commit(ticket, len(source))
        for ticket, source in jobs:
            assert isinstance(pair.outcome(ticket)[0], Committed)
            assert pair.equal(ticket, source)
        assert pair.receiver.snapshot().links == 1


MUTATIONS = {
    "a corrupt byte": FaultPlan(corrupt_at_post=1),
    "a skipped block": FaultPlan(skip_block=1),
    "swapped blocks": FaultPlan(swap_blocks=(0, 2)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_wrong_content_is_refused(kind: str, mutation: str) -> None:
    with Pair(sender={"faults": MUTATIONS[mutation]}, **wiring(kind)) as pair:
        ticket = pair.reserve([3, 4, 7])
        pair.send(ticket, [9, 8, 2])
        received, sent = pair.outcome(ticket)
        assert isinstance(received, Failed)
        assert isinstance(sent, Failed)
        assert received.error.code == sent.error.code == ErrorCode.HANDOFF_FAILED
        assert "commit was refused" in received.error.message
        assert "refused the commit" in sent.error.message
        assert pair.received.kinds(ticket.handoff_id) == ["Failed", "Fenced"]
        # The link is as good as before: the next hand-off on it succeeds.
        again = pair.reserve([], first_block=1)
        pair.send(again, [0])
        assert isinstance(pair.outcome(again)[0], Committed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_with_checksums_off_wrong_content_lands(kind: str, mutation: str) -> None:
    """The control: an equality test above this package must be able to turn red."""
    pair = Pair(sender={"faults": MUTATIONS[mutation]}, receiver={"verify_checksums": False}, **wiring(kind))
    with pair:
        ticket, source = pair.reserve([3, 4, 7]), [9, 8, 2]
        pair.send(ticket, source)
        received, _ = pair.outcome(ticket)
        assert isinstance(received, Committed)
        assert (received.stats.verified, received.stats.digest) == (False, b"")
        assert not pair.equal(ticket, source)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("post", [1, 2, 3])
def test_a_write_that_fails_fails_its_hand_off_only(kind: str, post: int) -> None:
    with Pair(sender={"faults": FaultPlan(fail_at_post=post)}, **wiring(kind)) as pair:
        ticket, source = pair.reserve([3, 4, 7]), [9, 8, 2]
        pair.open(ticket, source)
        for block in range(3):  # Not one run: each block waits for the one before.
            pair.push(ticket, range(block, block + 1), range(LAYOUT.num_layers))
            if block < post - 1:
                time.sleep(0.02)
        pair.commit(ticket, 3)
        received, sent = pair.outcome(ticket)
        if isinstance(sent, Sent):  # The runs were joined after all, and the plan's write never came.
            assert pair.equal(ticket, source)
        else:
            assert "fault" in sent.error.message
            assert isinstance(received, Failed)
        again = pair.reserve([5])
        pair.send(again, [1])
        outcome = pair.outcome(again)
        assert isinstance(outcome[0], Committed) or "fault" in outcome[1].error.message
        assert pair.receiver.snapshot().links == 1


def test_nonsense_from_the_worker_is_refused_before_anything_is_held() -> None:
    with Pair(**wiring("tcp")) as pair:
        for first, ids, tokens in ((0, [1], 9), (0, [1], 0), (-1, [1, 2], 5), (2, [1], 8)):
            with pytest.raises(ValueError, match="fill"):
                pair.receiver.reserve("r", 1, first, ids, tokens)
        ticket = pair.reserve([1, 2])
        for num_tokens in (0, -1, 8, 17):
            with pytest.raises(ValueError, match=r"the ticket is for 2 blocks of 8 tokens"):
                pair.sender.open(ticket, num_tokens, time.monotonic() + 9.0)
        with pytest.raises(ValueError, match="lease"):
            pair.open(Ticket(handoff_id="x"), [])
        pair.open(ticket, [1, 2])
        for local in ([16], [-1]):
            with pytest.raises(ValueError, match="outside the pool"):
                pair.sender.push(ticket.handoff_id, 0, local, range(1))
        with pytest.raises(ValueError, match="open already"):
            pair.open(ticket, [1, 2])
        pair.sender.push("unknown", 0, [1], range(1))
        pair.sender.commit("unknown", CommitRecord(1, b""))
        pair.sender.abort("unknown", "why")
        pair.receiver.release("unknown")
        for bad in ({"transports": ("ucx",)}, {"transports": ()}):
            with pytest.raises(ValueError, match="transports must be some of"):
                HandoffReceiver(pair.decode, bind_host="127.0.0.1", clock=SystemClock(), on_event=Events(), **bad)
        with pytest.raises(ValueError, match="transports must be some of"):
            HandoffSender(pair.prefill, forced="rdma", clock=SystemClock(), on_event=Events())


def test_too_many_places_are_refused_at_once() -> None:
    with Pair(**wiring("memory")) as pair:
        for _ in range(MAX_HANDOFFS):
            pair.receiver.reserve("r", 1, 1, (), 8)
        with pytest.raises(KvferryError) as caught:
            pair.receiver.reserve("r", 1, 1, (), 8)
        assert caught.value.code == ErrorCode.OVERLOADED
        assert caught.value.retry_after_ms > 0


def test_an_event_handler_that_raises_loses_no_other_event(caplog: pytest.LogCaptureFixture) -> None:
    events = Events()

    def handler(event: Committed | Failed | Fenced) -> None:
        events(event)
        raise RuntimeError("a defect in the worker")

    identity = make_identity("decode", 4)
    receiver = HandoffReceiver(
        identity, bind_host="127.0.0.1", clock=SystemClock(), on_event=handler, transports=("tcp",)
    )
    receiver.start()
    ticket = receiver.reserve("r", 1, 0, (0,), 8)
    receiver.abort(ticket.handoff_id, "cancelled")
    assert events.kinds(ticket.handoff_id) == ["Failed", "Fenced"]
    assert "failed on Failed" in caplog.text
    receiver.close(5.0)
    identity.pool.close()


def test_an_event_handler_may_call_back() -> None:
    with Pair(**wiring("tcp")) as pair:
        seen = Events()

        def handler(event: Committed | Failed | Fenced) -> None:
            if isinstance(event, Committed):
                pair.receiver.release(event.handoff_id)
            pair.receiver.abort(event.handoff_id, "from the handler")
            seen(event)

        pair.receiver._events._on_event = handler
        ticket = pair.reserve([1])
        pair.send(ticket, [2])
        seen.wait(ticket.handoff_id, Committed)
        pair.sent.wait(ticket.handoff_id, Drained)
        assert pair.receiver.snapshot().handoffs == NOTHING

"""What goes wrong in the middle of a write, over every transport: an end always comes, once, and is the right one."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from kv_transfer.events import Committed, Drained, Failed, Fenced, Sent
from kv_transfer.inlet import Inlet
from kv_transfer.outlet import Outlet
from kv_transfer.receive_table import ReceiveCounts
from kv_transfer.transport import LinkError, PeerGone, TransportError
from kvferry_rpc.common_pb2 import ErrorCode
from kvferry_rpc.internal_pb2 import Ticket
from runtime.clock import ManualClock
from tests.support.kv_pair import KINDS, LAYOUT, POISON, WAIT_S, Pair, block_of, poison, wiring

NOTHING = ReceiveCounts(0, 0, 0, 0)
SOURCE, TARGET = [9, 8, 2, 3, 11], [3, 4, 7, 1, 12]
WRITES = len(SOURCE)  # One block each.


def one_block_a_write(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    for transport in pair.sender._transports.values():
        monkeypatch.setattr(transport, "write_bytes", LAYOUT.block_bytes)


def warmed_up(pair: Pair) -> None:
    """The link is up, and the classes of its ends are those of its transport."""
    ticket = pair.reserve([15])
    pair.send(ticket, [5])
    assert isinstance(pair.outcome(ticket)[0], Committed)
    pair.receiver.release(ticket.handoff_id)


def outlet_of(pair: Pair) -> Outlet:
    return next(iter(pair.sender._outlets.values()))


def inlet_of(pair: Pair) -> Inlet:
    return next(iter(pair.receiver._inlets.values()))


class Breaks:
    """Calls go through but the n-th, which raises: before or after it was carried out."""

    def __init__(self, number: int, error: Exception, *, after: bool = False) -> None:
        self._left, self._error, self._after = number, error, after

    def install(self, end: Any, names: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
        for name in names:
            real = getattr(type(end), name, None)
            if real is not None:
                monkeypatch.setattr(type(end), name, self._around(real))

    def _around(self, real: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            self._left -= 1
            if self._left == 0 and not self._after:
                raise self._error
            result = real(*arguments, **options)
            if self._left == 0:
                raise self._error
            return result

        return call


def ends_and_goes_on(pair: Pair, ticket: Ticket, source: list[int]) -> tuple[Any, Any]:
    """The hand-off ended once at both ends, nothing is held, and the next one works."""
    received, sent = pair.outcome(ticket)
    assert pair.received.kinds(ticket.handoff_id) in (["Committed"], ["Failed", "Fenced"])
    assert pair.sent.kinds(ticket.handoff_id) in (["Sent", "Drained"], ["Failed", "Drained"])
    if isinstance(received, Committed):
        assert pair.equal(ticket, source)
        pair.receiver.release(ticket.handoff_id)
    again = pair.reserve(ticket.block_ids)
    pair.send(again, source)
    outcome = pair.outcome(again)
    if isinstance(outcome[0], Failed):  # It was opened on the link that was just being lost.
        again = pair.reserve(ticket.block_ids)
        pair.send(again, source)
        outcome = pair.outcome(again)
    assert isinstance(outcome[0], Committed), outcome
    assert pair.equal(again, source)
    pair.receiver.release(again.handoff_id)
    assert pair.receiver.snapshot().handoffs == NOTHING
    assert pair.sender.snapshot().handoffs == 0
    return received, sent


ERRORS = {
    "this write only": TransportError("planned"),
    "the link": LinkError("planned"),
    "the peer is gone": PeerGone("planned"),
    "a defect": RuntimeError("planned"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", [1, 3, WRITES])
@pytest.mark.parametrize("error", ERRORS)
def test_an_exception_at_any_write_ends_its_hand_off_at_both_ends(
    kind: str, number: int, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H073."""
    with Pair(**wiring(kind)) as pair:
        one_block_a_write(pair, monkeypatch)
        warmed_up(pair)
        # What fails only this write says that none of its bytes can land any more: so it comes before them.
        breaks = Breaks(number, ERRORS[error], after=error != "this write only" and number == WRITES)
        breaks.install(outlet_of(pair).payload(), ("write", "write_pages"), monkeypatch)
        ticket = pair.reserve(TARGET)
        pair.open(ticket, SOURCE)
        pair.push(ticket, range(WRITES))
        pair.commit(ticket, WRITES)
        received, sent = ends_and_goes_on(pair, ticket, SOURCE)
        assert isinstance(received, Failed)
        assert isinstance(sent, Failed)
        assert "planned" in sent.error.message
        assert sent.error.code == (ErrorCode.INTERNAL if error == "a defect" else ErrorCode.HANDOFF_FAILED)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", [1, 3, WRITES])
@pytest.mark.parametrize("error", ["the link", "a defect"])
def test_an_exception_at_any_read_ends_its_hand_off_at_both_ends(
    kind: str, number: int, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The receiver's half of H073."""
    with Pair(**wiring(kind)) as pair:
        one_block_a_write(pair, monkeypatch)
        warmed_up(pair)
        inlet = inlet_of(pair)
        Breaks(number, ERRORS[error], after=number == 3).install(inlet._reader, ("read", "read_pages"), monkeypatch)
        ticket = pair.reserve(TARGET)
        pair.open(ticket, SOURCE)
        pair.push(ticket, range(WRITES))
        pair.commit(ticket, WRITES)
        received, sent = ends_and_goes_on(pair, ticket, SOURCE)
        assert isinstance(received, Failed)
        assert isinstance(sent, Failed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_after_a_defect_in_mid_write_the_library_is_stopped_before_blocks_are_given_back(
    kind: str, side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H084: nobody knows what it had begun."""
    steps: list[str] = []
    with Pair(**wiring(kind)) as pair:
        warmed_up(pair)
        end = outlet_of(pair).payload() if side == "sender" else inlet_of(pair)._reader
        events = pair.sender._events if side == "sender" else pair.receiver._events
        real, tell = type(end).close, events._on_event
        monkeypatch.setattr(type(end), "close", lambda self: (steps.append("closed"), real(self)))
        monkeypatch.setattr(events, "_on_event", lambda event: (steps.append(type(event).__name__), tell(event)))
        names = ("write", "write_pages", "read", "read_pages")
        Breaks(1, ERRORS["a defect"], after=True).install(end, names, monkeypatch)
        ticket = pair.reserve(TARGET)
        pair.send(ticket, SOURCE)
        assert isinstance(pair.outcome(ticket)[side == "sender"], Failed)
        assert steps.index("closed") < steps.index("Drained" if side == "sender" else "Fenced")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_a_link_that_breaks_at_any_write_never_gives_a_wrong_block(
    kind: str, side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H078: at each place within a hand-off, from whichever side, while another one is on its way too."""
    with Pair(**wiring(kind)) as pair:
        one_block_a_write(pair, monkeypatch)
        for number in range(1, WRITES + 1):
            warmed_up(pair)
            link = outlet_of(pair).link if side == "sender" else inlet_of(pair).link
            ticket, other = pair.reserve(TARGET), pair.reserve([0, 2])
            for each, source in ((ticket, SOURCE), (other, [6, 10])):
                pair.open(each, source)
            pair.wait_until_open(2)  # Before that, the receiver could learn of the break by its leases only.
            for index in range(WRITES):
                pair.push(ticket, range(index, index + 1))
                if index + 1 == number:
                    link.break_off("test")
            pair.push(other, range(2))
            pair.commit(ticket, WRITES)
            pair.commit(other, 2)
            received, _ = pair.outcome(other)
            assert isinstance(received, Failed) or pair.equal(other, [6, 10])
            pair.receiver.release(other.handoff_id)
            ends_and_goes_on(pair, ticket, SOURCE)


@contextmanager
def held(end: Any, names: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, ...]]:
    """Calls wait inside, before they do anything, until they are let go: (is inside, may go on)."""
    inside, let_go = threading.Event(), threading.Event()

    def around(real: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            inside.set()
            assert let_go.wait(WAIT_S)
            return real(*arguments, **options)

        return call

    with monkeypatch.context() as patch:
        for name in names:
            real = getattr(type(end), name, None)
            if real is not None:
                patch.setattr(type(end), name, around(real))
        try:
            yield inside, let_go
        finally:
            let_go.set()


@pytest.mark.parametrize("kind", KINDS)
def test_what_completes_after_its_deadline_stays_failed_and_is_given_back_once(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H084: the deadline passes in the middle of a write, which then completes; its blocks have an owner again."""
    clock = ManualClock()
    with Pair(sender={"clock": clock}, **wiring(kind)) as pair:
        warmed_up(pair)
        for _ in range(20):
            ticket = pair.reserve([3, 4])
            pair.sender.open(ticket, pair.tokens(2), clock.now() + 1.0)
            with held(outlet_of(pair).payload(), ("write", "write_pages"), monkeypatch) as (inside, let_go):
                pair.sender.push(ticket.handoff_id, 0, [9, 8], range(LAYOUT.num_layers))
                assert inside.wait(WAIT_S)
                clock.advance(1.0)
                pair.sender.sweep(clock.now())
                pair.sent.wait(ticket.handoff_id, Failed)
                assert pair.sent.kinds(ticket.handoff_id) == ["Failed"], "its blocks are still being read"
                let_go.set()
                pair.sent.wait(ticket.handoff_id, Drained)
            pair.received.wait(ticket.handoff_id, Fenced)
            poison(pair.decode, [3, 4])
            assert pair.received.kinds(ticket.handoff_id) == ["Failed", "Fenced"]
            assert pair.sent.kinds(ticket.handoff_id) == ["Failed", "Drained"]
            assert pair.receiver.snapshot().handoffs == NOTHING
        warmed_up(pair)
        assert all((block_of(pair.decode, block) == POISON).all() for block in (3, 4))


@pytest.mark.parametrize("kind", KINDS)
def test_a_sender_closed_right_after_a_commit_never_loses_it_in_silence(kind: str) -> None:
    """H083: whoever is told `Sent` can rely on it, and whoever is not is told so."""
    for _ in range(10):
        with Pair(num_blocks=400, **wiring(kind)) as pair:
            ids = list(range(399, -1, -1))
            ticket = pair.reserve(ids)
            pair.open(ticket, ids)
            pair.push(ticket, range(400))
            pair.commit(ticket, 400)
            pair.sender.close(10.0)
            sent = pair.sent.wait(ticket.handoff_id, Sent, Failed)
            if isinstance(sent, Sent):
                pair.received.wait(ticket.handoff_id, Committed)
                assert pair.equal(ticket, ids)


CYCLES = {"memory": 100, "memory-direct": 100, "tcp": 100, "shm": 100}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_an_end_closed_on_one_side_only_is_replaced_and_nothing_piles_up(kind: str, side: str) -> None:
    """H080."""
    with Pair(**wiring(kind)) as pair:
        warmed_up(pair)
        threads = threading.active_count()
        for _ in range(CYCLES.get(kind, 20)):
            outlet = outlet_of(pair)
            link = outlet.link if side == "sender" else inlet_of(pair).link
            link.break_off("test")
            assert outlet.thread is not None
            outlet.thread.join(WAIT_S)
            pair.wait_until_links(0)
            warmed_up(pair)  # The next one succeeds at the first try.
        deadline = time.monotonic() + WAIT_S
        while threading.active_count() > threads + 1:  # Those of the link broken last may still be leaving.
            assert time.monotonic() < deadline, threading.enumerate()
            time.sleep(0.01)
        assert pair.receiver.snapshot().links == 1
        assert len(pair.sender._links) == 1

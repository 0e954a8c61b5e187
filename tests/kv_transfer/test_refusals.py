"""Forged, replayed, expired and cross-request tickets over real links: refused, counted by kind, and harmless."""

import time
from collections.abc import Callable, Iterator

import pytest

from kv_transfer.events import Committed
from kv_transfer.messages import Abort, Commit, Open, Opened, Refused, Rejected, Write
from kv_transfer.refusals import Refusal, RefusalLog
from kv_transfer.transport import Channel
from kvferry_rpc.internal_pb2 import Ticket
from tests.support.kv_pair import LAYOUT, POISON, Pair, block_of, poison
from tests.support.kv_stranger import answer, greeted, say, still_works

BLOCK = 3


@pytest.fixture(params=["tcp", "shm"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with Pair(transports=(request.param,)) as both:
        yield both


def stranger(pair: Pair) -> Channel:
    """A second link from a worker that has the cluster's secret, but not this ticket."""
    (transport,) = pair.receiver._transports
    return greeted(pair, transport=transport)


def opening(ticket: Ticket, **changes: object) -> Open:
    fields: dict[str, object] = {
        "handoff_id": ticket.handoff_id,
        "attempt": ticket.attempt,
        "incarnation": ticket.incarnation,
        "secret": ticket.secret,
        "transport": ticket.transports[0].name,
        **changes,
    }
    return Open(**fields)  # type: ignore[arg-type]


def writing(pair: Pair, ticket: Ticket, blocks: tuple[int, ...]) -> tuple[Write, bytes]:
    """A Write to these blocks, with the payload that its transport puts behind it."""
    size = len(blocks) * LAYOUT.block_bytes
    in_band = ticket.transports[0].name == "tcp"
    return Write(ticket.handoff_id, ticket.first_block, blocks, 0, LAYOUT.num_layers), bytes(size) if in_band else b""


FORGERIES: dict[Refusal, dict[str, object]] = {
    Refusal.UNKNOWN: {"handoff_id": "r/1/guess"},
    Refusal.WRONG_SECRET: {"secret": b"x" * 16},
    Refusal.OTHER_INCARNATION: {"incarnation": b"e" * 16},
    Refusal.OTHER_ATTEMPT: {"attempt": 7},
    Refusal.OTHER_TRANSPORT: {"transport": "ucx"},
}


@pytest.mark.parametrize("kind", FORGERIES, ids=lambda kind: kind.value)
def test_a_forged_ticket_is_refused_and_counted_and_the_real_one_still_works(kind: Refusal, pair: Pair) -> None:
    ticket = pair.reserve([BLOCK])
    poison(pair.decode, [BLOCK])
    channel = stranger(pair)
    for _ in range(2):
        say(channel, opening(ticket, **FORGERIES[kind]))
        assert isinstance(answer(channel), Refused)
    assert pair.receiver.snapshot().refused == {kind.value: 2}
    assert pair.receiver.snapshot().handoffs.reserved == 1
    assert (block_of(pair.decode, BLOCK) == POISON).all()
    pair.send(ticket, [5])
    received, _ = pair.outcome(ticket)
    assert isinstance(received, Committed)
    assert pair.equal(ticket, [5])
    channel.stop()
    channel.close()


def replay_open(pair: Pair, ticket: Ticket, channel: Channel) -> None:
    say(channel, opening(ticket))
    assert isinstance(answer(channel), Refused)


def replay_write(pair: Pair, ticket: Ticket, channel: Channel) -> None:
    say(channel, *writing(pair, ticket, (BLOCK,)))
    assert isinstance(answer(channel), Abort)


def replay_commit(pair: Pair, ticket: Ticket, channel: Channel) -> None:
    say(channel, Commit(ticket.handoff_id, pair.tokens(1), b"", (0,), LAYOUT.num_layers))
    assert isinstance(answer(channel), Rejected)


@pytest.mark.parametrize("replay", [replay_open, replay_write, replay_commit])
def test_what_another_link_says_of_an_open_hand_off_is_refused_and_counted(
    replay: Callable[[Pair, Ticket, Channel], None], pair: Pair
) -> None:
    ticket = pair.reserve([BLOCK])
    pair.open(ticket, [5])
    pair.wait_until_open(1)
    poison(pair.decode, [BLOCK])
    channel = stranger(pair)
    replay(pair, ticket, channel)
    assert pair.receiver.snapshot().refused == {"other_link": 1}
    assert (block_of(pair.decode, BLOCK) == POISON).all()
    pair.push(ticket, range(1))
    pair.commit(ticket, 1)
    received, _ = pair.outcome(ticket)
    assert isinstance(received, Committed)
    assert pair.equal(ticket, [5])
    channel.stop()
    channel.close()


def test_a_ticket_used_up_cannot_be_used_again(pair: Pair) -> None:
    ticket = pair.reserve([BLOCK])
    pair.send(ticket, [5])
    pair.outcome(ticket)
    for released, kind in ((False, "other_link"), (True, "unknown")):
        if released:
            pair.receiver.release(ticket.handoff_id)
        channel = stranger(pair)
        replay_open(pair, ticket, channel)
        assert pair.receiver.snapshot().refused[kind] == 1
        channel.stop()
        channel.close()
    assert pair.equal(ticket, [5])


def test_an_expired_ticket_is_refused_and_counted_and_its_blocks_are_free(pair: Pair) -> None:
    ticket = pair.reserve([BLOCK])
    pair.receiver.sweep(time.monotonic() + 1000.0)
    poison(pair.decode, [BLOCK])
    pair.send(ticket, [5])
    _, sent = pair.outcome(ticket)
    assert "refused the ticket" in sent.error.message
    assert pair.receiver.snapshot().refused == {"expired": 1}
    assert (block_of(pair.decode, BLOCK) == POISON).all()
    again = pair.reserve([BLOCK])
    pair.send(again, [5])
    assert isinstance(pair.outcome(again)[0], Committed)


def test_a_ticket_does_not_reach_the_blocks_of_another_request() -> None:
    """In band, so that the bytes can be kept out. Who writes by shm has the whole pool: it costs him the link."""
    with Pair(transports=("tcp",)) as pair:
        mine, other = pair.reserve([1], name="mine"), pair.reserve([BLOCK], name="other")
        poison(pair.decode, [BLOCK])
        channel = stranger(pair)
        say(channel, opening(mine))
        assert answer(channel) == Opened(mine.handoff_id)
        say(channel, *writing(pair, mine, (BLOCK,)))
        stop = answer(channel)
        assert isinstance(stop, Abort)
        assert "not those of the ticket" in stop.reason
        assert pair.receiver.snapshot().refused == {"outside": 1}
        assert (block_of(pair.decode, BLOCK) == POISON).all()
        pair.send(other, [5])
        assert isinstance(pair.outcome(other)[0], Committed)
        channel.stop()
        channel.close()


def test_refusals_are_logged_once_for_each_link_and_kind(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    ticket = pair.reserve([BLOCK])
    for _ in range(2):
        channel = stranger(pair)
        for kind in (Refusal.WRONG_SECRET, Refusal.UNKNOWN):
            for _ in range(3):
                say(channel, opening(ticket, **FORGERIES[kind]))
                answer(channel)
        channel.stop()
        channel.close()
    said = [record.getMessage() for record in caplog.records if "refused a ticket" in record.message]
    assert len(said) == 4
    assert "from prefill: wrong_secret" in said[0]
    assert ticket.secret.hex() not in caplog.text
    assert pair.receiver.snapshot().refused == {"wrong_secret": 6, "unknown": 6}
    assert still_works(pair)


def test_links_that_are_over_are_not_remembered() -> None:
    log = RefusalLog()
    for link in range(3):
        log.begin(link, "prefill")
        log.note(link, "h", Refusal.UNKNOWN)
        log.forget(link)
        log.note(link, "h", Refusal.UNKNOWN)
    assert not log._peers
    assert not log._said

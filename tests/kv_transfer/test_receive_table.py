"""The decode side's table: every message in every state, and every way out."""

from collections.abc import Callable

import pytest

from kv_transfer.handoff import (
    Effect,
    HandoffState,
    IllegalTransition,
    Post,
    ReportRefused,
    advance,
)
from kv_transfer.messages import Abort, Fence, Opened, Refused, Renew
from kv_transfer.receive_table import ReceiveCounts, ReceiveTable
from kv_transfer.refusals import ExpiredTickets, Refusal
from tests.support.receive_states import (
    FIRST,
    LAYERS,
    LEASE_S,
    LINK,
    OTHER,
    SECRET,
    answers,
    commit_message,
    do_open,
    do_write,
    in_state,
    make_table,
    write_message,
)

MESSAGES: dict[str, Callable[[ReceiveTable, int], list[Effect]]] = {
    "open": lambda table, link: do_open(table, link),
    "write": lambda table, link: do_write(table, link),
    "commit": lambda table, link: table.commit(link, commit_message(), 5.0),
    "abort": lambda table, link: table.peer_abort(link, Abort("h", 7, "gave up")),
    "fence": lambda table, link: table.fence(link, Fence("h")),
    "renew": lambda table, link: table.renew(link, Renew(("h",)), 5.0),
}
FAILED = ["ReportFailed", "ReportFenced"]
REFUSED = ["ReportRefused", "Refused"]
# What each message does in each state, in-band. The hand-off of "reserved" is bound to no link yet.
IN_BAND = {
    ("reserved", "open"): ["Opened"],
    ("reserved", "write"): ["ReportRefused", "Abort"],
    ("reserved", "commit"): ["ReportRefused", "Rejected"],
    ("reserved", "abort"): [],
    ("reserved", "fence"): [],
    ("reserved", "renew"): ["Renewed"],
    ("transferring", "open"): ["Opened"],
    ("transferring", "write"): [],
    ("transferring", "commit"): ["ReportFailed", "Rejected", "ReportFenced"],
    ("transferring", "abort"): FAILED,
    ("transferring", "fence"): FAILED,
    ("transferring", "renew"): ["Renewed"],
    ("written", "open"): ["Opened"],
    ("written", "write"): [],
    ("written", "commit"): ["ReportCommitted", "Accepted"],
    ("written", "abort"): FAILED,
    ("written", "fence"): FAILED,
    ("written", "renew"): ["Renewed"],
    ("committed", "open"): REFUSED,
    ("committed", "write"): ["Abort"],
    ("committed", "commit"): ["Accepted"],
    ("committed", "abort"): [],
    ("committed", "fence"): [],
    ("committed", "renew"): ["Renewed"],
    ("gone", "open"): REFUSED,
    ("gone", "write"): ["Abort"],
    ("gone", "commit"): ["Rejected"],
    ("gone", "abort"): [],
    ("gone", "fence"): [],
    ("gone", "renew"): ["Renewed"],
}
ONE_SIDED = {
    ("transferring", "write"): [],
    ("transferring", "commit"): ["ReportFailed", "Rejected", "ReportFenced"],
    ("transferring", "abort"): ["ReportFailed"],
    ("transferring", "fence"): FAILED,
    ("written", "commit"): ["ReportCommitted", "Accepted"],
    ("written", "abort"): ["ReportFailed"],
    ("committed", "fence"): [],
    ("aborted", "open"): REFUSED,
    ("aborted", "write"): ["Abort"],
    ("aborted", "commit"): ["Rejected"],
    ("aborted", "abort"): [],
    ("aborted", "fence"): ["ReportFenced"],
    ("aborted", "renew"): ["Renewed"],
    ("gone", "fence"): [],
}


@pytest.mark.parametrize(("state", "message"), IN_BAND)
def test_each_message_in_each_state_in_band(state: str, message: str) -> None:
    assert answers(MESSAGES[message](in_state(state), LINK)) == IN_BAND[state, message]


@pytest.mark.parametrize(("state", "message"), ONE_SIDED)
def test_each_message_in_each_state_one_sided(state: str, message: str) -> None:
    assert answers(MESSAGES[message](in_state(state, one_sided=True), LINK)) == ONE_SIDED[state, message]


@pytest.mark.parametrize("state", ["transferring", "written", "committed", "aborted"])
@pytest.mark.parametrize("message", MESSAGES)
def test_another_link_can_change_nothing(state: str, message: str) -> None:
    table = in_state(state, one_sided=True)
    before = table.counts()
    effects = MESSAGES[message](table, OTHER)
    assert all(isinstance(effect, Post | ReportRefused) and effect.link == OTHER for effect in effects)
    counted = [effect.kind for effect in effects if isinstance(effect, ReportRefused)]
    assert counted == ([Refusal.OTHER_LINK] if message in ("open", "write", "commit") else [])
    assert not [effect for effect in effects if isinstance(effect, Post) and isinstance(effect.message, Opened)]
    assert table.counts() == before


@pytest.mark.parametrize(
    ("changes", "reason", "kind"),
    [
        ({"secret": b"guess!"}, "secret", Refusal.WRONG_SECRET),
        ({"secret": b""}, "secret", Refusal.WRONG_SECRET),
        ({"handoff_id": "x"}, "unknown", Refusal.UNKNOWN),
        ({"attempt": 1}, "attempt 2, not 1", Refusal.OTHER_ATTEMPT),
        ({"incarnation": b"earlier"}, "another life", Refusal.OTHER_INCARNATION),
        ({"transport": "other"}, "by t, not by other", Refusal.OTHER_TRANSPORT),
    ],
)
def test_a_forged_or_stale_ticket_is_refused_and_counted_and_its_place_stays_held(
    changes: dict[str, object], reason: str, kind: Refusal
) -> None:
    table = make_table()
    report, effect = do_open(table, **changes)
    assert report == ReportRefused(LINK, str(changes.get("handoff_id", "h")), kind)
    assert table.refused == {kind: 1}
    assert isinstance(effect, Post)
    assert isinstance(effect.message, Refused)
    assert reason in effect.message.reason
    assert table.counts() == ReceiveCounts(reserved=1, transferring=0, quarantined=0, committed=0)
    assert answers(do_open(table)) == ["Opened"]
    assert table.refused == {kind: 1}


@pytest.mark.parametrize(("secret", "kind"), [(SECRET, Refusal.EXPIRED), (b"guess!", Refusal.WRONG_SECRET)])
def test_a_ticket_that_nobody_used_in_time_is_counted_as_expired_to_who_knows_it(secret: bytes, kind: Refusal) -> None:
    table = make_table()
    table.expire(LEASE_S)
    report, effect = do_open(table, secret=secret)
    assert report == ReportRefused(LINK, "h", kind)
    assert isinstance(effect, Post)
    assert isinstance(effect.message, Refused)
    assert "unknown, over" in effect.message.reason, "the peer hears no more than about any other ticket"


def test_no_more_than_the_last_expired_tickets_are_remembered() -> None:
    expired = ExpiredTickets()
    for number in range(2000):
        expired.add(str(number), b"s")
    assert expired.kind("0", b"s") is Refusal.UNKNOWN
    assert expired.kind("1999", b"s") is Refusal.EXPIRED
    assert len(expired._secrets) == len(expired._order) == 1024


def test_a_late_write_or_commit_is_refused_but_is_no_misuse_of_a_ticket() -> None:
    table = in_state("gone")
    do_write(table)
    table.commit(LINK, commit_message(), 5.0)
    assert table.refused == {}


def test_a_ticket_opened_again_for_another_transport_is_refused() -> None:
    table = in_state("transferring")
    assert answers(do_open(table, transport="other")) == REFUSED


def test_a_ticket_opened_twice_on_its_link_is_refused_but_the_same_open_twice_is_answered_twice() -> None:
    table = make_table()
    for _ in range(2):
        assert do_open(table, number=7) == [Post(LINK, Opened("h", 7))]
    report, _ = do_open(table, number=8)
    assert report == ReportRefused(LINK, "h", Refusal.REUSED)
    assert table.counts().transferring == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"block_ids": (9, 4)},
        {"block_ids": (4, 8)},
        {"block_ids": (4,), "block_index": FIRST + 1},
        {"block_ids": (4, 9, 9)},
        {"block_ids": ()},
        {"block_index": FIRST - 1},
        {"block_index": FIRST + 1},
        {"block_index": -1},
        {"layer": -1},
        {"layer": LAYERS},
        {"num_layers": LAYERS + 1},
        {"layer": 1, "num_layers": LAYERS},
        {"num_layers": 0},
        {"num_layers": -1},
        {"num_layers": 2**40},
    ],
)
@pytest.mark.parametrize("verify", [True, False], ids=["checksums", "no checksums"])
def test_a_write_outside_its_ticket_never_lands_and_fails_the_hand_off(
    changes: dict[str, object], verify: bool
) -> None:
    table = make_table(verify=verify)
    do_open(table)
    seed, effects = table.begin_write(LINK, write_message(**changes), 2.0)
    assert seed is None
    assert answers(effects) == ["ReportRefused", "ReportFailed", "Abort", "ReportFenced"]
    assert table.refused == {Refusal.OUTSIDE: 1}


def test_a_one_sided_write_outside_its_ticket_costs_the_link_and_is_fenced_when_that_is_closed() -> None:
    """It may have landed anywhere already. All that can be done is to hear no more from such a writer."""
    table = make_table()
    do_open(table, one_sided=True)
    seed, effects = table.begin_write(LINK, write_message(block_ids=(9, 4)), 2.0)
    assert seed is None
    assert answers(effects) == ["ReportRefused", "ReportFailed", "Abort", "CloseLink"]
    assert table.link_failed(LINK, "broken off") == []
    assert table.must_outlive(LINK)
    assert answers(table.link_closed(LINK)) == ["ReportFenced"]


def test_terminal_states_are_never_left() -> None:
    for terminal in (HandoffState.COMMITTED, HandoffState.ABORTED):
        for to in HandoffState:
            with pytest.raises(IllegalTransition):
                advance(terminal, to)

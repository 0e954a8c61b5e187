"""The decode side's table: every message in every state, and every way out."""

from collections.abc import Callable

import pytest

from kv_transfer.handoff import (
    Effect,
    HandoffState,
    IllegalTransition,
    Post,
    advance,
)
from kv_transfer.messages import Abort, Fence, Opened, Refused, Renew
from kv_transfer.receive_table import ReceiveCounts, ReceiveTable
from tests.support.receive_states import (
    FIRST,
    LAYERS,
    LINK,
    OTHER,
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
# What each message does in each state, in-band. The hand-off of "reserved" is bound to no link yet.
IN_BAND = {
    ("reserved", "open"): ["Opened"],
    ("reserved", "write"): ["Abort"],
    ("reserved", "commit"): ["Rejected"],
    ("reserved", "abort"): [],
    ("reserved", "fence"): [],
    ("reserved", "renew"): ["Renewed"],
    ("transferring", "open"): ["Opened"],
    ("transferring", "write"): [],
    ("transferring", "commit"): ["ReportFailed", "Rejected", "ReportFenced"],
    ("transferring", "abort"): FAILED,
    ("transferring", "fence"): FAILED,
    ("transferring", "renew"): ["Renewed"],
    ("sealed", "open"): ["Refused"],
    ("sealed", "write"): ["Abort"],
    ("sealed", "commit"): [],
    ("sealed", "abort"): FAILED,
    ("sealed", "fence"): [],
    ("sealed", "renew"): ["Renewed"],
    ("committed", "open"): ["Refused"],
    ("committed", "write"): ["Abort"],
    ("committed", "commit"): ["Accepted"],
    ("committed", "abort"): [],
    ("committed", "fence"): [],
    ("committed", "renew"): ["Renewed"],
    ("gone", "open"): ["Refused"],
    ("gone", "write"): ["Abort"],
    ("gone", "commit"): ["Rejected"],
    ("gone", "abort"): [],
    ("gone", "fence"): [],
    ("gone", "renew"): ["Renewed"],
}
ONE_SIDED = {
    ("transferring", "write"): ["ReportFailed", "Abort"],
    ("transferring", "commit"): ["Verify"],
    ("transferring", "abort"): ["ReportFailed"],
    ("transferring", "fence"): FAILED,
    ("sealed", "abort"): FAILED,
    ("sealed", "fence"): [],
    ("committed", "fence"): [],
    ("aborted", "open"): ["Refused"],
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


@pytest.mark.parametrize("state", ["transferring", "sealed", "committed", "aborted"])
@pytest.mark.parametrize("message", MESSAGES)
def test_another_link_can_change_nothing(state: str, message: str) -> None:
    table = in_state(state, one_sided=True)
    before = table.counts()
    effects = MESSAGES[message](table, OTHER)
    assert all(isinstance(effect, Post) and effect.link == OTHER for effect in effects)
    assert not [effect for effect in effects if isinstance(effect, Post) and isinstance(effect.message, Opened)]
    assert table.counts() == before


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"secret": b"guess!"}, "secret"),
        ({"secret": b""}, "secret"),
        ({"handoff_id": "x"}, "unknown"),
        ({"attempt": 1}, "attempt 2, not 1"),
        ({"incarnation": b"earlier"}, "another life"),
    ],
)
def test_a_forged_or_stale_ticket_is_refused_and_its_place_stays_held(changes: dict[str, object], reason: str) -> None:
    table = make_table()
    (effect,) = do_open(table, **changes)
    assert isinstance(effect, Post)
    assert isinstance(effect.message, Refused)
    assert reason in effect.message.reason
    assert table.counts() == ReceiveCounts(reserved=1, transferring=0, quarantined=0, committed=0)
    assert answers(do_open(table)) == ["Opened"]


def test_a_ticket_opened_again_for_another_transport_is_refused() -> None:
    table = in_state("transferring")
    assert answers(do_open(table, transport="other")) == ["Refused"]


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
    allowed, effects = table.begin_write(LINK, write_message(**changes), 2.0)
    assert not allowed
    assert answers(effects) == ["ReportFailed", "Abort", "ReportFenced"]


def test_terminal_states_are_never_left() -> None:
    for terminal in (HandoffState.COMMITTED, HandoffState.ABORTED):
        for to in HandoffState:
            with pytest.raises(IllegalTransition):
                advance(terminal, to)

"""The prefill side's table: every message in every state, what is written when, and every way out."""

import math

import pytest

from kv_transfer.handoff import CloseLink, Failure, Post, ReportFailed, ReportSent
from kv_transfer.messages import (
    MAX_REASON_CHARACTERS,
    MAX_RENEW_IDS,
    Abort,
    Accepted,
    Commit,
    Fence,
    Open,
    Opened,
    ReceiverMessage,
    Refused,
    Rejected,
    Renew,
    Renewed,
)
from kv_transfer.pages import PageRun
from kv_transfer.send_table import SendTable
from kvferry_rpc.common_pb2 import ErrorCode
from tests.support.kv_pair import LAYOUT
from tests.support.send_states import (
    ALL,
    ANSWER_S,
    LEASE_S,
    LINK,
    OTHER,
    RECORD,
    answers,
    drive,
    in_state,
    make_handoff,
)

MESSAGES: dict[str, ReceiverMessage] = {
    "opened": Opened("h", 1),
    "refused": Refused("h", "no"),
    "accepted": Accepted("h"),
    "rejected": Rejected("h", "no"),
    "abort": Abort("h", ErrorCode.CANCELLED, "client left"),
    "unknown": Renewed(("h",)),
}
FAILED = ["ReportFailed", "Fence", "ReportDrained"]
NO_FENCE = ["ReportFailed", "ReportDrained"]
EXPECTED = {
    ("connecting", "opened"): [],
    ("connecting", "refused"): NO_FENCE,
    ("connecting", "accepted"): [],
    ("connecting", "rejected"): NO_FENCE,
    ("connecting", "abort"): NO_FENCE,
    ("connecting", "unknown"): NO_FENCE,
    ("asked", "opened"): [],
    ("asked", "refused"): FAILED,
    ("asked", "accepted"): [],
    ("asked", "rejected"): FAILED,
    ("asked", "abort"): FAILED,
    ("asked", "unknown"): FAILED,
    ("transferring", "opened"): [],
    ("transferring", "refused"): FAILED,
    ("transferring", "accepted"): [],
    ("transferring", "rejected"): FAILED,
    ("transferring", "abort"): FAILED,
    ("transferring", "unknown"): FAILED,
    ("writing", "opened"): [],
    ("writing", "refused"): ["ReportFailed"],
    ("writing", "accepted"): [],
    ("writing", "rejected"): ["ReportFailed"],
    ("writing", "abort"): ["ReportFailed"],
    ("writing", "unknown"): ["ReportFailed"],
    ("sealed", "opened"): [],
    ("sealed", "refused"): FAILED,
    ("sealed", "accepted"): ["ReportSent", "ReportDrained"],
    ("sealed", "rejected"): FAILED,
    ("sealed", "abort"): FAILED,
    ("sealed", "unknown"): FAILED,
    ("failing", "opened"): [],
    ("failing", "refused"): [],
    ("failing", "accepted"): [],
    ("failing", "rejected"): [],
    ("failing", "abort"): [],
    ("failing", "unknown"): [],
}


@pytest.mark.parametrize(("state", "message"), EXPECTED)
def test_each_message_in_each_state(state: str, message: str) -> None:
    table = in_state(state)
    assert answers(table.handle(LINK, MESSAGES[message], 5.0)) == EXPECTED[state, message]


@pytest.mark.parametrize("state", ["asked", "transferring", "sealed"])
@pytest.mark.parametrize("message", MESSAGES)
def test_another_link_can_change_nothing(state: str, message: str) -> None:
    table = in_state(state)
    effects = table.handle(OTHER, MESSAGES[message], 5.0)
    assert all(effect == Post(OTHER, Fence("h")) for effect in effects)
    assert "h" in table


@pytest.mark.parametrize("message", [Opened("x"), Abort("x", 7, "why")])
def test_who_asks_about_a_hand_off_that_is_over_hears_that_nobody_writes(message: ReceiverMessage) -> None:
    assert in_state("transferring").handle(LINK, message, 5.0) == [Post(LINK, Fence("x"))]


@pytest.mark.parametrize("kind", [Refused, Rejected, Abort])
def test_of_what_a_peer_gives_as_its_reason_only_the_beginning_is_repeated(kind: type[ReceiverMessage]) -> None:
    reason = "no " * 100_000
    message = Abort("h", ErrorCode.CANCELLED, reason) if kind is Abort else kind("h", reason)
    failed = in_state("transferring").handle(LINK, message, 4.0)[0]
    assert isinstance(failed, ReportFailed)
    assert failed.failure.message.endswith(reason[:MAX_REASON_CHARACTERS])
    assert len(failed.failure.message) < 2 * MAX_REASON_CHARACTERS


@pytest.mark.parametrize("message", [Accepted("x"), Rejected("x", ""), Refused("x", ""), Renewed(("x",))])
def test_late_answers_to_a_hand_off_that_is_over_are_ignored(message: ReceiverMessage) -> None:
    assert in_state("transferring").handle(LINK, message, 5.0) == []


def test_the_open_repeats_the_ticket_and_waits_for_the_link() -> None:
    table = in_state("connecting")
    assert table.link_ready(LINK, "shm", 1.0) == [Post(LINK, Open("h", 1, b"life", b"secret", "shm", 1))]
    table.handle(LINK, Opened("h", 1), 2.0)
    (later,) = table.open(make_handoff("k"), 3.0)
    assert isinstance(later, Post)
    assert isinstance(later.message, Open)


def test_a_late_answer_to_the_first_open_opens_no_second_hand_off_by_the_same_ticket() -> None:
    """What it promised was fenced with the first: the blocks may be another's by now."""
    table = in_state("asked")
    table.abort("h", Failure("cancelled"))
    table.open(make_handoff(), 2.0)
    table.push("h", 0, range(2), ALL)
    assert table.handle(LINK, Opened("h", 1), 3.0) == []
    assert table.next_work(LINK, 3.0) is None
    assert answers(table.handle(LINK, Refused("h", "used"), 4.0)) == FAILED


def test_writes_are_as_large_as_the_transport_of_the_link_likes() -> None:
    table = SendTable(answer_timeout_s=ANSWER_S)
    table.link_added(LINK)
    table.open(make_handoff(num_blocks=5), 0.0)
    table.link_ready(LINK, "t", 1.0, write_bytes=2 * LAYOUT.block_bytes)
    table.handle(LINK, Opened("h", 1), 2.0)
    table.push("h", 0, range(5), ALL)
    runs = []
    while (work := table.next_work(LINK, 3.0)) is not None:
        assert work.run is not None
        runs.append(work.run)
        table.work_done(work.handoff, [work.run], 4.0)
    assert runs == [PageRun(blocks, ALL) for blocks in (range(2), range(2, 4), range(4, 5))]


def test_nothing_is_written_before_the_peer_has_opened() -> None:
    table = in_state("asked")
    assert table.push("h", 0, range(2), ALL) == []
    assert table.next_work(LINK, 1.5) is None
    assert answers(table.handle(LINK, Opened("h", 1), 2.0)) == ["Wake"]
    work = table.next_work(LINK, 2.5)
    assert work is not None
    assert work.run == PageRun(range(2), ALL)


def test_layer_by_layer_pushes_of_the_same_blocks_leave_as_one_run() -> None:
    table = in_state("asked")
    for layer in ALL:
        table.push("h", 0, range(2), range(layer, layer + 1))
    table.handle(LINK, Opened("h", 1), 2.0)
    work = table.next_work(LINK, 2.5)
    assert work is not None
    assert work.run == PageRun(range(2), ALL)


def test_the_commit_follows_the_last_page_and_says_what_was_written() -> None:
    table = in_state("transferring")
    table.push("h", 0, range(1), ALL)
    table.push("h", 1, [1], ALL)
    table.commit("h", RECORD)
    effects = [effect for effect in drive(table) if isinstance(effect, Post)]
    assert effects == [Post(LINK, Commit("h", 9, b"t", (7, 7), 2 * LAYOUT.num_layers))]
    sent, _ = table.handle(LINK, Accepted("h"), 9.0)
    assert isinstance(sent, ReportSent)
    assert (sent.stats.transport, sent.stats.num_blocks, sent.stats.digest) == ("t", 2, b"digest")
    assert sent.stats.size_bytes == 2 * LAYOUT.block_bytes
    assert (sent.stats.first_write_at, sent.stats.last_write_at, sent.stats.acknowledged_at) == (3.0, 4.0, 9.0)
    assert len(table) == 0


def test_a_page_never_pushed_fails_the_hand_off_and_is_named() -> None:
    table = in_state("transferring")
    table.push("h", 0, range(2), range(LAYOUT.num_layers - 1))
    failed = table.commit("h", RECORD)[0]
    assert isinstance(failed, ReportFailed)
    assert f"prompt block 0, layer {LAYOUT.num_layers - 1}" in failed.failure.message


def test_a_page_that_did_not_get_out_is_not_counted() -> None:
    table = in_state("writing")
    table.commit("h", RECORD)
    handoff = make_handoff()
    work = table.next_work(LINK, 3.0)
    assert work is None, "one thing at a time for each hand-off"
    handoff = table._handoffs["h"]
    table.work_done(handoff, [PageRun(range(1), ALL)], 4.0)
    (commit,) = [effect.message for effect in drive(table) if isinstance(effect, Post)]
    assert isinstance(commit, Commit)
    assert commit.num_pages == LAYOUT.num_layers


def test_blocks_before_the_first_one_wanted_are_not_written() -> None:
    table = SendTable(answer_timeout_s=ANSWER_S)
    table.link_added(LINK)
    table.link_ready(LINK, "t", 0.0)
    table.open(make_handoff(first_block=2), 0.0)
    table.handle(LINK, Opened("h", 1), 0.0)
    assert table.push("h", 0, range(2), ALL) == []
    table.push("h", 0, range(4), ALL)
    work = table.next_work(LINK, 0.0)
    assert work is not None
    assert work.run == PageRun(range(2, 4), ALL)


@pytest.mark.parametrize(
    ("first", "layers"),
    [
        (1, ALL),
        (-1, ALL),
        (0, range(LAYOUT.num_layers + 1)),
        (0, range(-1, 1)),
        (0, range(0, 2, 2)),
    ],
)
def test_a_push_out_of_range_is_refused(first: int, layers: range) -> None:
    with pytest.raises(ValueError, match="not a run"):
        in_state("transferring").push("h", first, [5, 6], layers)


def test_a_block_cannot_come_from_two_places() -> None:
    """A page that waits to be written would be read from the wrong one, and match its own fingerprint."""
    table = in_state("transferring")
    table.push("h", 0, [5, 6], range(1))
    table.push("h", 0, [5, 6], range(1, 2))
    failed = table.push("h", 0, [5, 7], range(2, 3))[0]
    assert isinstance(failed, ReportFailed)
    assert failed.failure.message == "prompt block 1 was pushed from block 6, and now from 7"


def test_pushes_and_commits_after_the_commit_are_defects_and_after_the_end_are_late() -> None:
    table = in_state("transferring")
    table.push("h", 0, range(2), ALL)
    table.commit("h", RECORD)
    with pytest.raises(ValueError, match="committed already"):
        table.push("h", 0, range(2), ALL)
    with pytest.raises(ValueError, match="committed already"):
        table.commit("h", RECORD)
    table.abort("h", Failure("cancelled"))
    assert table.push("h", 0, range(2), ALL) == table.commit("h", RECORD) == table.abort("h", Failure("")) == []


@pytest.mark.parametrize("step", ["run", "commit"])
def test_a_hand_off_given_up_while_its_writer_works_drains_when_the_writer_is_out(step: str) -> None:
    table = in_state("transferring")
    table.push("h", 0, range(2), ALL)
    table.commit("h", RECORD)
    work = table.next_work(LINK, 3.0)
    assert work is not None
    if step == "commit":
        table.work_done(work.handoff, [PageRun(range(2), ALL)], 3.5)
        work = table.next_work(LINK, 3.0)
        assert work is not None
    assert answers(table.abort("h", Failure("cancelled"))) == ["ReportFailed", "Abort"]
    assert len(table) == 1
    done = table.work_done(work.handoff, [], 4.0) if step == "run" else table.commit_built(work.handoff, (7, 7), b"")
    assert answers(done) == ["Fence", "ReportDrained"]
    assert len(table) == 0


def test_hand_offs_take_turns_on_a_link() -> None:
    table = in_state("transferring")
    table.open(make_handoff("k"), 2.0)
    table.handle(LINK, Opened("k", 2), 2.0)
    for name in ("h", "k"):
        table.push(name, 0, [0], ALL)
    first, second = table.next_work(LINK, 3.0), table.next_work(LINK, 3.0)
    assert first is not None
    assert second is not None
    assert (first.handoff.handoff_id, second.handoff.handoff_id) == ("h", "k")


def test_leases_are_renewed_thrice_a_lease_from_the_open_on() -> None:
    table = in_state("asked")
    assert table.next_due() == 1.0 + LEASE_S / 3
    assert table.expire(3.9) == []
    assert table.expire(4.0) == [Post(LINK, Renew(("h",)))]
    table.handle(LINK, Renewed(()), 4.1)
    assert table.next_due() == 4.0 + LEASE_S / 3


def test_renewals_are_bounded_messages() -> None:
    table = in_state("transferring")
    for number in range(MAX_RENEW_IDS):
        table.open(make_handoff(f"k{number}"), 2.0)
    messages = [effect.message for effect in table.expire(50.0) if isinstance(effect, Post)]
    assert [len(message.handoff_ids) for message in messages if isinstance(message, Renew)] == [MAX_RENEW_IDS, 1]


def test_a_peer_that_does_not_answer_a_renewal_loses_its_link() -> None:
    table = in_state("transferring")
    table.expire(4.0)
    table.expire(7.0)
    (effect,) = [effect for effect in table.expire(4.0 + ANSWER_S) if isinstance(effect, CloseLink)]
    assert effect.link == LINK
    assert answers(table.link_lost(LINK, Failure("silent"))) == NO_FENCE
    assert table.next_due() is None


@pytest.mark.parametrize("state", ["connecting", "asked", "transferring", "sealed"])
def test_the_deadline_fails_a_hand_off_in_any_state(state: str) -> None:
    table = in_state(state)
    failed = next(effect for effect in table.expire(100.0) if isinstance(effect, ReportFailed))
    assert failed.failure.code == ErrorCode.DEADLINE_EXCEEDED
    assert len(table) == 0
    assert table.next_due() in (None, 100.0 + ANSWER_S, math.inf)


def test_why_the_peer_gave_up_is_passed_on() -> None:
    failed = in_state("transferring").handle(LINK, Abort("h", ErrorCode.CANCELLED, "client left"), 5.0)[0]
    assert isinstance(failed, ReportFailed)
    assert failed.failure.code == ErrorCode.CANCELLED
    assert "client left" in failed.failure.message

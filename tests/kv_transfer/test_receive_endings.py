"""The decode side's table: commits, leases, lost links, and when blocks are free again."""

import pytest

from kv_transfer import fingerprint
from kv_transfer.handoff import (
    CloseLink,
    Failure,
    Post,
    ReportCommitted,
    ReportFailed,
    ReportFenced,
)
from kv_transfer.messages import Abort, Accepted, Fence, Rejected, Renew, Renewed
from kv_transfer.records import MAX_FIRST_TOKEN_BYTES
from tests.support.receive_states import (
    CHECKSUMS,
    FIRST,
    IDS,
    LINK,
    OTHER,
    PAGE_FINGERPRINTS,
    SECRET,
    answers,
    commit_message,
    do_open,
    do_write,
    in_state,
    make_table,
    write_message,
)


def test_the_fence_waits_for_the_payload_that_is_landing() -> None:
    table = in_state("transferring")
    seed, _ = table.begin_write(LINK, write_message(), 2.0)
    assert seed is not None
    assert answers(table.abort("h", Failure("cancelled"))) == ["ReportFailed", "Abort"]
    assert answers(table.end_write(write_message(), landed=True, now=3.0)) == ["ReportFenced"]
    assert len(table) == 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_tokens": 39}, "39 tokens"),
        ({"num_tokens": 0}, "0 tokens"),
        ({"checksums": (1,)}, "1 checksums"),
        ({"first_token": b"x" * (MAX_FIRST_TOKEN_BYTES + 1)}, "first token"),
        ({"num_pages": 3}, "3 pages of 4"),
    ],
)
def test_a_commit_that_cannot_be_for_this_place_is_refused(changes: dict[str, object], reason: str) -> None:
    table = in_state("transferring")
    do_write(table)
    effects = table.commit(LINK, commit_message(**changes), 3.0)
    assert answers(effects) == ["ReportFailed", "Rejected", "ReportFenced"]
    assert isinstance(effects[0], ReportFailed)
    assert reason in effects[0].failure.message


def test_a_page_never_received_is_named() -> None:
    table = in_state("transferring")
    do_write(table, block_ids=IDS[:1])
    do_write(table, block_ids=IDS[1:], block_index=FIRST + 1, num_layers=1)
    effects = table.commit(LINK, commit_message(), 3.0)
    assert isinstance(effects[0], ReportFailed)
    assert f"prompt block {FIRST + 1}, layer 1" in effects[0].failure.message


def test_a_payload_cut_short_does_not_count_as_received() -> None:
    table = in_state("transferring")
    table.begin_write(LINK, write_message(), 2.0)
    table.end_write(write_message(), landed=False, now=2.5)
    assert answers(table.commit(LINK, commit_message(), 3.0)) == ["ReportFailed", "Rejected", "ReportFenced"]


def test_without_checksums_missing_pages_pass_but_bounds_do_not() -> None:
    table = make_table(verify=False)
    do_open(table)
    assert answers(table.commit(LINK, commit_message(num_pages=0), 3.0)) == ["ReportCommitted", "Accepted"]
    table = make_table(verify=False)
    do_open(table)
    assert answers(table.commit(LINK, commit_message(num_tokens=1), 3.0)) == [
        "ReportFailed",
        "Rejected",
        "ReportFenced",
    ]


def test_a_commit_counts_when_it_is_of_what_landed() -> None:
    table = in_state("written")
    report, accepted = table.commit(LINK, commit_message(), 3.0)
    assert isinstance(report, ReportCommitted)
    assert (report.record.num_tokens, report.record.first_token) == (40, b"t")
    stats = report.stats
    assert (stats.transport, stats.num_blocks, stats.size_bytes) == ("t", 2, 4 * 256)
    assert stats.digest == fingerprint.digest(CHECKSUMS)
    assert (stats.first_write_at, stats.last_write_at) == (2.0, 2.5)
    assert (stats.commit_received_at, stats.verified_at, stats.verified) == (3.0, 3.0, True)
    assert accepted == Post(LINK, Accepted("h"))


@pytest.mark.parametrize("one_sided", [False, True])
@pytest.mark.parametrize("checksums", [CHECKSUMS[::-1], (CHECKSUMS[0], CHECKSUMS[1] ^ 1), (0, 0)])
def test_a_commit_of_other_content_is_refused_naming_the_block(checksums: tuple[int, ...], one_sided: bool) -> None:
    table = in_state("written", one_sided=one_sided)
    effects = table.commit(LINK, commit_message(checksums=checksums), 4.0)
    assert answers(effects) == ["ReportFailed", "Rejected", "ReportFenced"]
    wrong = FIRST if checksums[0] != CHECKSUMS[0] else FIRST + 1
    assert isinstance(effects[1], Post)
    assert isinstance(effects[1].message, Rejected)
    assert f"prompt block {wrong} does not hold what was sent" in effects[1].message.reason


@pytest.mark.parametrize("second", [(1, 2, 3, 4), PAGE_FINGERPRINTS])
def test_pages_written_again_count_as_the_last_write_left_them(second: tuple[int, ...]) -> None:
    table, message = in_state("written"), write_message()
    table.begin_write(LINK, message, 3.0)
    table.end_write(message, landed=True, fingerprints=second, now=3.5)
    ending = "ReportCommitted" if second == PAGE_FINGERPRINTS else "ReportFailed"
    assert answers(table.commit(LINK, commit_message(), 4.0))[0] == ending


def test_pages_whose_second_write_was_cut_short_do_not_count() -> None:
    table, message = in_state("written"), write_message(num_layers=1)
    table.begin_write(LINK, message, 3.0)
    table.end_write(message, landed=False, now=3.5)
    effects = table.commit(LINK, commit_message(), 4.0)
    assert isinstance(effects[0], ReportFailed)
    assert f"prompt block {FIRST}, layer 0 was never received" in effects[0].failure.message


def test_an_abort_after_the_commit_changes_nothing() -> None:
    table = in_state("committed")
    assert table.abort("h", Failure("cancelled")) == []
    assert table.counts().committed == 1
    table.release("h")
    assert len(table) == 0


def test_release_forgets_only_what_is_committed() -> None:
    for state in ("reserved", "transferring", "written"):
        table = in_state(state)
        table.release("h")
        assert len(table) == 1


@pytest.mark.parametrize("state", ["reserved", "transferring"])
def test_a_lease_that_runs_out_fails_and_fences(state: str) -> None:
    table = in_state(state)
    due = table.next_expiry()
    assert due is not None
    assert table.expire(due - 0.01) == []
    effects = table.expire(due)
    assert [effect for effect in answers(effects) if effect != "Abort"] == ["ReportFailed", "ReportFenced"]
    assert table.next_expiry() is None


def test_renewing_and_writing_extend_the_lease() -> None:
    table = in_state("transferring")
    table.renew(LINK, Renew(("h",)), 8.0)
    assert table.next_expiry() == 18.0
    message = write_message()
    table.begin_write(LINK, message, 12.0)
    table.end_write(message, landed=True, now=13.0)
    assert table.next_expiry() == 23.0


def test_a_renewal_names_what_is_not_held() -> None:
    table = in_state("transferring")
    assert table.renew(LINK, Renew(("h", "x")), 8.0) == [Post(LINK, Renewed(("x",)))]
    assert table.renew(OTHER, Renew(("h",)), 9.0) == [Post(OTHER, Renewed(("h",)))]
    assert table.next_expiry() == 18.0


def test_a_payload_that_stalls_for_a_lease_costs_its_link() -> None:
    table = in_state("transferring")
    table.begin_write(LINK, write_message(), 2.0)
    effects = table.expire(12.0)
    assert isinstance(effects[0], CloseLink)
    assert answers(effects[1:]) == ["ReportFailed", "Abort"]
    assert answers(table.end_write(write_message(), landed=False, now=12.1)) == ["ReportFenced"]


def test_a_one_sided_writer_that_is_silent_keeps_its_blocks_until_its_link_is_closed() -> None:
    table = in_state("transferring", one_sided=True)
    assert answers(table.expire(11.0)) == ["ReportFailed", "Abort"]
    assert answers(table.expire(21.0)) == ["Abort"], "a fence that does not come is asked for again"
    assert table.link_failed(LINK, "lost") == []
    assert table.must_outlive(LINK)
    with pytest.raises(ValueError, match="still writable"):
        table.reserve("k", secret=b"", attempt=1, first_block=0, block_ids=IDS[:1], num_tokens=8, now=0.0)
    assert answers(table.link_closed(LINK)) == ["ReportFenced"]
    table.reserve("k", secret=b"", attempt=1, first_block=0, block_ids=IDS[:1], num_tokens=8, now=0.0)


def test_a_lost_link_fails_its_own_hand_offs_only() -> None:
    table = in_state("transferring")
    table.reserve("k", secret=SECRET, attempt=2, first_block=0, block_ids=(1,), num_tokens=8, now=0.0)
    do_open(table, OTHER, handoff_id="k")
    assert [effect.handoff_id for effect in table.link_failed(LINK, "lost") if isinstance(effect, ReportFailed)] == [
        "h"
    ]
    assert not table.must_outlive(LINK)
    assert table.link_closed(LINK) == []
    assert table.counts().transferring == 1


@pytest.mark.parametrize(
    ("ids", "reason"), [((1, 1), "twice"), ((16,), "outside"), ((-1,), "outside"), ((4,), "still")]
)
def test_a_place_that_is_not_safe_to_write_is_not_held(ids: tuple[int, ...], reason: str) -> None:
    table = make_table()
    with pytest.raises(ValueError, match=reason):
        table.reserve("k", secret=b"", attempt=1, first_block=0, block_ids=ids, num_tokens=8, now=0.0)
    assert len(table) == 1


def test_blocks_are_free_for_the_next_hand_off_after_a_commit() -> None:
    table = in_state("committed")
    table.reserve("k", secret=b"", attempt=1, first_block=0, block_ids=IDS, num_tokens=16, now=0.0)


def test_a_prompt_that_is_all_cached_commits_without_a_write() -> None:
    table = make_table()
    table.reserve("k", secret=SECRET, attempt=2, first_block=5, block_ids=(), num_tokens=40, now=0.0)
    do_open(table, handoff_id="k")
    effects = table.commit(LINK, commit_message(handoff_id="k", checksums=(), num_pages=0), 3.0)
    assert answers(effects) == ["ReportCommitted", "Accepted"]


def test_what_a_fence_reports_comes_last_and_once() -> None:
    table = in_state("transferring", one_sided=True)
    effects = [
        *table.abort("h", Failure("a")),
        *table.abort("h", Failure("b")),
        *table.peer_abort(LINK, Abort("h", 7, "")),
    ]
    effects += [*table.fence(LINK, Fence("h")), *table.fence(LINK, Fence("h")), *table.link_failed(LINK, "lost")]
    effects += table.link_closed(LINK)
    assert answers(effects) == ["ReportFailed", "Abort", "ReportFenced"]
    assert isinstance(effects[-1], ReportFenced)

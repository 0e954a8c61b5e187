"""A hand-off given up before its link is there: the peer hears of it as soon as the link is."""

from kv_transfer.handoff import Failure, Post, ReportDrained, ReportFailed
from kv_transfer.messages import Abort, Fence, Open, Opened
from kv_transfer.outbound import OutboundHandoff
from kv_transfer.send_table import SendTable
from kvferry_rpc.common_pb2 import ErrorCode
from tests.support.kv_pair import LAYOUT

LINK = 1
WHY = Failure("not here any more", ErrorCode.CANCELLED)


def handoff(name: str, deadline: float = 100.0) -> OutboundHandoff:
    return OutboundHandoff(
        handoff_id=name,
        attempt=1,
        incarnation=b"life",
        secret=b"secret",
        first_block=0,
        block_ids=(10, 11),
        lease_s=9.0,
        deadline=deadline,
        link=LINK,
        layout=LAYOUT,
    )


def table_with(*handoffs: OutboundHandoff) -> SendTable:
    table = SendTable(answer_timeout_s=5.0)
    table.link_added(LINK)
    for one in handoffs:
        table.open(one, 0.0)
    return table


def told(name: str, why: Failure = WHY) -> list[Post]:
    opened = Open(name, 1, b"life", b"secret", "tcp")
    return [Post(LINK, opened), Post(LINK, Abort(name, why.code, why.message)), Post(LINK, Fence(name))]


def test_the_worker_is_free_of_it_at_once_and_the_peer_is_told_when_the_link_is_ready() -> None:
    table = table_with(handoff("gone"), handoff("stays"))
    assert table.abort("gone", WHY) == [ReportFailed("gone", WHY), ReportDrained("gone")]
    effects = table.link_ready(LINK, "tcp", 1.0)
    assert effects == [*told("gone"), Post(LINK, Open("stays", 1, b"life", b"secret", "tcp", 1))]
    assert "gone" not in table
    assert table.link_ready(LINK, "tcp", 1.0) == [], "once"


def test_what_ran_out_of_time_is_told_too() -> None:
    table = table_with(handoff("late", deadline=1.0))
    (failed, drained) = table.expire(2.0)
    assert isinstance(failed, ReportFailed)
    assert drained == ReportDrained("late")
    assert table.link_ready(LINK, "tcp", 3.0) == told("late", failed.failure)


def test_a_link_that_was_never_made_has_nobody_to_tell() -> None:
    table = table_with(handoff("gone"))
    table.abort("gone", WHY)
    assert table.link_lost(LINK, WHY) == []
    assert table.link_ready(LINK, "tcp", 1.0) == []


def test_the_answer_to_a_late_open_only_repeats_that_nobody_writes() -> None:
    table = table_with(handoff("gone"))
    table.abort("gone", WHY)
    table.link_ready(LINK, "tcp", 1.0)
    assert table.handle(LINK, Opened("gone"), 2.0) == [Post(LINK, Fence("gone"))]

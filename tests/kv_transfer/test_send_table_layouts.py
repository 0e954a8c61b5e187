"""The prefill side's table between pools of different layouts: which pages complete, and how many bytes wait."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_cache.layout import KVCacheLayout, KVDtype
from kv_transfer.handoff import Failure, ReportFailed, ReportRoom, ReportSent
from kv_transfer.messages import Accepted, Opened
from kv_transfer.outbound import OutboundHandoff
from kv_transfer.pages import PageRun
from kv_transfer.send_table import SendTable
from tests.support.kv_pair import LAYOUT
from tests.support.send_states import ALL, ANSWER_S, LEASE_S, LINK, RECORD, answers, drive, in_state, make_handoff

SIZES = (8, 16, 32, 64, 128)


def between(local: int, peer: int, num_tokens: int, first_block: int = 0) -> OutboundHandoff:
    """A hand-off from blocks of `local` tokens to blocks of `peer` tokens."""
    layout = replace(LAYOUT, block_size=peer)
    return OutboundHandoff(
        handoff_id="h",
        attempt=1,
        incarnation=b"life",
        secret=b"secret",
        first_block=first_block,
        block_ids=tuple(range(10, 10 + layout.blocks_for(num_tokens) - first_block)),
        lease_s=LEASE_S,
        deadline=100.0,
        link=LINK,
        layout=layout,
        pool=replace(LAYOUT, block_size=local),
        num_tokens=num_tokens,
    )


def ready(handoff: OutboundHandoff, wire: KVCacheLayout | None = None, max_backlog_bytes: int = 1 << 30) -> SendTable:
    """A table with this hand-off open."""
    table = SendTable(answer_timeout_s=ANSWER_S, max_backlog_bytes=max_backlog_bytes)
    table.link_added(LINK)
    table.link_ready(LINK, "t", 0.0, detail="eth9", expected="faster", wire=wire)
    table.open(handoff, 0.0)
    table.handle(LINK, Opened("h", 1), 0.0)
    return table


def written(table: SendTable) -> list[tuple[int, int]]:
    """(block, layer) of every page that there is to write now, in order; it is written."""
    pages: list[tuple[int, int]] = []
    while (work := table.next_work(LINK, 3.0)) is not None and work.run is not None:
        pages += [(block, layer) for block in work.run.blocks for layer in work.run.layers]
        table.work_done(work.handoff, [work.run], 4.0)
    return pages


def test_a_larger_block_goes_out_when_all_blocks_it_covers_are_pushed_in_that_layer() -> None:
    table = ready(between(8, 16, num_tokens=40))  # 5 local blocks, 3 of the peer's, the last one half empty
    for push, pages in (
        (([0], range(1)), []),
        (([1], range(1, 2)), []),
        (([1], range(1)), [(0, 0)]),
        (([0], range(1, 2)), [(0, 1)]),
        (([2, 3, 4], range(1)), [(1, 0), (2, 0)]),
        (([4], range(1, 3)), [(2, 1), (2, 2)]),
        (([1], range(2, 3)), []),
        (([2], range(1, 3)), []),
        (([3], range(1, 3)), [(1, 1), (1, 2)]),
        (([0], range(2, 3)), [(0, 2)]),
    ):
        table.push("h", push[0][0], push[0], push[1])
        assert written(table) == pages


def test_a_block_pushed_in_one_piece_leaves_as_one_run() -> None:
    table = ready(between(8, 32, num_tokens=8 * 13))
    table.push("h", 0, range(3), range(3))
    table.push("h", 3, range(3, 13), range(3))
    work = table.next_work(LINK, 3.0)
    assert work is not None
    assert work.run == PageRun(range(4), range(3))


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_however_pushes_are_cut_each_wanted_page_goes_out_once_and_not_too_early(data: st.DataObject) -> None:
    local, peer, num_tokens = (
        data.draw(st.sampled_from(SIZES)),
        data.draw(st.sampled_from(SIZES)),
        data.draw(st.integers(1, 300)),
    )
    num_blocks, num_local = -(-num_tokens // peer), -(-num_tokens // local)
    first = data.draw(st.integers(0, num_blocks))
    handoff = between(local, peer, num_tokens, first)
    table = ready(handoff)
    cells = {(block, layer) for block in range(num_local) for layer in range(3)}
    seen: list[tuple[int, int]] = []
    while cells:
        block, layer = data.draw(st.sampled_from(sorted(cells)))
        blocks = range(block, data.draw(st.integers(block, num_local - 1)) + 1)
        layers = range(layer, data.draw(st.integers(layer, 2)) + 1)
        push = {(b, at) for b in blocks for at in layers}
        if not push <= cells:
            blocks, layers, push = range(block, block + 1), range(layer, layer + 1), {(block, layer)}
        cells -= push
        table.push("h", blocks.start, [100 + b for b in blocks], layers)
        if data.draw(st.booleans()):
            seen += written(table)
            for block, layer in seen:
                end = min((block + 1) * peer, num_tokens)
                assert not any((at // local, layer) in cells for at in range(block * peer, end))
    seen += written(table)
    assert sorted(seen) == [(block, layer) for block in range(first, num_blocks) for layer in range(3)]
    assert handoff.pushed.count(1) == len(seen) == handoff.written.count(1)
    assert table.total_backlog_bytes == 0


def test_a_page_that_lacks_a_local_block_is_one_never_pushed() -> None:
    table = ready(between(8, 32, num_tokens=40))
    table.push("h", 0, range(3), range(3))
    table.push("h", 4, [4], range(3))
    failed = table.commit("h", RECORD)[0]
    assert isinstance(failed, ReportFailed)
    assert "prompt block 0, layer 0 was never pushed" in failed.failure.message


def test_the_receipt_counts_bytes_as_they_were_on_the_wire_and_says_how_they_went() -> None:
    handoff = between(8, 16, num_tokens=40)
    wire = replace(handoff.layout, dtype=KVDtype.INT8)
    table = ready(handoff, wire)
    table.push("h", 0, range(5), range(3))
    table.commit("h", RECORD)
    drive(table)
    sent, _ = table.handle(LINK, Accepted("h"), 9.0)
    assert isinstance(sent, ReportSent)
    assert sent.stats.size_bytes == 3 * wire.block_bytes
    assert (sent.stats.transport, sent.stats.transport_detail, sent.stats.expected_transport) == ("t", "eth9", "faster")
    assert sent.stats.conversion == "block_size 8 -> 16, dtype fp32 -> int8 on the wire"


def test_a_ticket_of_another_layout_than_the_links_fails() -> None:
    table = SendTable(answer_timeout_s=ANSWER_S)
    table.link_added(LINK)
    table.link_ready(LINK, "t", 0.0, wire=replace(LAYOUT, block_size=64))
    assert answers(table.open(make_handoff(), 0.0)) == ["ReportFailed", "ReportDrained"]


# ---- how much waits


def test_bytes_pushed_count_until_they_are_written_over_all_hand_offs_of_the_link() -> None:
    handoff = make_handoff()
    table, size = ready(handoff), LAYOUT.page_bytes
    table.open(make_handoff("k"), 0.0)
    table.push("k", 0, [4], range(1))
    table.push("h", 0, range(2), ALL)
    assert table.backlog_bytes("h") == table.backlog_bytes("k") == 7 * size
    table.handle(LINK, Opened("k", 2), 0.0)
    work = table.next_work(LINK, 1.0)
    assert work is not None
    assert work.run is not None
    assert table.backlog_bytes("h") == 7 * size, "what is being written still counts"
    table.work_done(work.handoff, [], 2.0)
    assert table.backlog_bytes("h") == size, "also if it failed"
    assert table.backlog_bytes("unknown") == 0


def test_what_waits_counts_as_the_bytes_it_will_be_on_the_wire() -> None:
    table, wire = in_state("connecting"), replace(LAYOUT, dtype=KVDtype.INT8)
    table.push("h", 0, range(2), ALL)
    assert table.backlog_bytes("h") == 2 * LAYOUT.block_bytes
    table.link_ready(LINK, "t", 1.0, wire=wire)
    assert table.backlog_bytes("h") == table.total_backlog_bytes == 2 * wire.block_bytes


def test_a_full_link_says_once_when_it_has_room_again() -> None:
    table = ready(make_handoff(), max_backlog_bytes=2 * LAYOUT.block_bytes)
    assert table.may_push("h")
    assert answers(table.push("h", 0, range(2), range(2))) == ["Wake"]
    assert table.may_push("h")
    assert answers(table.push("h", 0, range(2), range(2, 3))) == []
    assert not table.may_push("h")
    work = table.next_work(LINK, 1.0)
    assert work is not None
    assert work.run is not None
    assert table.work_done(work.handoff, [work.run], 2.0) == [ReportRoom(LINK)]
    assert table.may_push("h")
    table.commit("h", RECORD)
    assert not any(isinstance(effect, ReportRoom) for effect in drive(table))


@pytest.mark.parametrize("state", ["connecting", "asked", "transferring", "writing", "failing"])
@pytest.mark.parametrize("end", ["abort", "lost", "deadline"])
def test_a_hand_off_that_is_over_leaves_no_backlog(state: str, end: str) -> None:
    table = in_state(state)
    handoff = table._handoffs["h"]
    if state not in ("writing", "failing"):
        table.push("h", 0, range(2), ALL)
    if end == "abort":
        table.abort("h", Failure("cancelled"))
    elif end == "lost":
        table.link_lost(LINK, Failure("lost"))
    else:
        table.expire(100.0)
    if handoff.writing:
        assert table.total_backlog_bytes > 0
        table.work_done(handoff, [], 101.0)
    assert table.total_backlog_bytes == 0
    assert "h" not in table

"""A prefill side's table brought into each of its states, and driven as a link's writer would."""

from kv_transfer.handoff import Effect, Failure, Post
from kv_transfer.messages import Opened
from kv_transfer.outbound import OutboundHandoff
from kv_transfer.records import CommitRecord
from kv_transfer.send_table import SendTable
from tests.support.kv_pair import LAYOUT

LINK, OTHER = 1, 2
ANSWER_S = 5.0
LEASE_S = 9.0
ALL = range(LAYOUT.num_layers)
RECORD = CommitRecord(9, b"t")


def make_handoff(
    name: str = "h", *, first_block: int = 0, num_blocks: int = 2, deadline: float = 100.0
) -> OutboundHandoff:
    return OutboundHandoff(
        handoff_id=name,
        attempt=1,
        incarnation=b"life",
        secret=b"secret",
        first_block=first_block,
        block_ids=tuple(range(10, 10 + num_blocks)),
        lease_s=LEASE_S,
        deadline=deadline,
        link=LINK,
        layout=LAYOUT,
    )


def answers(effects: list[Effect]) -> list[str]:
    return [type(effect.message).__name__ if isinstance(effect, Post) else type(effect).__name__ for effect in effects]


def in_state(name: str) -> SendTable:
    """connecting, asked, transferring, writing, sealed (commit sent), or failing (over, but its writer is not out)."""
    table = SendTable(answer_timeout_s=ANSWER_S)
    table.link_added(LINK)
    table.open(make_handoff(), 0.0)
    if name == "connecting":
        return table
    table.link_ready(LINK, "t", 1.0)
    if name == "asked":
        return table
    table.handle(LINK, Opened("h", 1), 2.0)
    if name == "transferring":
        return table
    table.push("h", 0, range(2), ALL)
    if name == "sealed":
        table.commit("h", RECORD)
        drive(table)
        return table
    table.next_work(LINK, 3.0)
    if name == "failing":
        table.abort("h", Failure("cancelled"))
    return table


def drive(table: SendTable) -> list[Effect]:
    """Do all work there is, as a writer would; the effects."""
    effects: list[Effect] = []
    while (work := table.next_work(LINK, 3.0)) is not None:
        if work.run is None:
            effects += table.commit_built(work.handoff, (7,) * len(work.handoff.block_ids), b"digest")
        else:
            effects += table.work_done(work.handoff, [work.run], 4.0)
    return effects

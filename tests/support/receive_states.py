"""A receive table whose one hand-off, `h`, has been brought into a given state."""

from kv_transfer.handoff import (
    Effect,
    Failure,
    Post,
)
from kv_transfer.messages import Commit, Fence, Open, Write
from kv_transfer.receive_table import ReceiveTable

LINK, OTHER = 1, 2
LEASE_S = 10.0
IDS = (4, 9)
FIRST = 3
LAYERS = 2
INCARNATION = b"life"
SECRET = b"secret"


def make_table(*, verify: bool = True) -> ReceiveTable:
    table = ReceiveTable(
        num_blocks=16, num_layers=LAYERS, page_bytes=256, incarnation=INCARNATION, lease_s=LEASE_S, verify=verify
    )
    table.reserve("h", secret=SECRET, attempt=2, first_block=FIRST, block_ids=IDS, num_tokens=40, now=0.0)
    return table


def open_message(**changes: object) -> Open:
    fields = {
        "handoff_id": "h",
        "attempt": 2,
        "incarnation": INCARNATION,
        "secret": SECRET,
        "transport": "t",
        **changes,
    }
    return Open(**fields)  # type: ignore[arg-type]


def write_message(**changes: object) -> Write:
    fields = {"handoff_id": "h", "block_index": FIRST, "block_ids": IDS, "layer": 0, "num_layers": LAYERS, **changes}
    return Write(**fields)  # type: ignore[arg-type]


def commit_message(**changes: object) -> Commit:
    fields = {
        "handoff_id": "h",
        "num_tokens": 40,
        "first_token": b"t",
        "checksums": (1, 2),
        "num_pages": 4,
        **changes,
    }
    return Commit(**fields)  # type: ignore[arg-type]


def do_open(table: ReceiveTable, link: int = LINK, *, one_sided: bool = False, **changes: object) -> list[Effect]:
    return table.open(link, open_message(**changes), one_sided=one_sided, now=1.0)


def do_write(table: ReceiveTable, link: int = LINK, **changes: object) -> list[Effect]:
    message = write_message(**changes)
    allowed, effects = table.begin_write(link, message, 2.0)
    return [*effects, *(table.end_write(message, landed=True, now=2.5) if allowed else [])]


def in_state(name: str, *, one_sided: bool = False) -> ReceiveTable:
    """A table whose hand-off "h" is there. `gone`: fenced and forgotten."""
    table = make_table()
    if name == "reserved":
        return table
    do_open(table, one_sided=one_sided)
    if name == "transferring":
        return table
    if name in ("aborted", "gone"):
        table.abort("h", Failure("cancelled"))
        if name == "gone" and one_sided:
            table.fence(LINK, Fence("h"))
        return table
    if not one_sided:
        do_write(table)
    table.commit(LINK, commit_message(), 3.0)
    if name == "committed":
        table.verified("h", digest=b"d", mismatch="", now=4.0)
    return table


def answers(effects: list[Effect]) -> list[str]:
    """Names of messages posted and of other effects, in order."""
    return [type(effect.message).__name__ if isinstance(effect, Post) else type(effect).__name__ for effect in effects]

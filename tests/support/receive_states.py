"""A receive table whose one hand-off, `h`, has been brought into a given state."""

from kv_transfer import fingerprint
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


PAGE_FINGERPRINTS = (11, 12, 21, 22)
CHECKSUMS = fingerprint.fold_blocks(PAGE_FINGERPRINTS, LAYERS, fingerprint.seed("h", 2))


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
        "checksums": CHECKSUMS,
        "num_pages": 4,
        **changes,
    }
    return Commit(**fields)  # type: ignore[arg-type]


def do_open(table: ReceiveTable, link: int = LINK, *, one_sided: bool = False, **changes: object) -> list[Effect]:
    return table.open(link, open_message(**changes), transport="t", one_sided=one_sided, now=1.0)


def do_write(table: ReceiveTable, link: int = LINK, **changes: object) -> list[Effect]:
    message = write_message(**changes)
    seed, effects = table.begin_write(link, message, 2.0)
    if seed is None:
        return effects
    return [*effects, *table.end_write(message, landed=True, fingerprints=fingerprints_of(message), now=2.5)]


def fingerprints_of(message: Write) -> list[int]:
    """What the pages of this write would have, if all is right."""
    first, layers = message.block_index - FIRST, range(message.layer, message.layer + message.num_layers)
    return [
        PAGE_FINGERPRINTS[block * LAYERS + layer]
        for block in range(first, first + len(message.block_ids))
        for layer in layers
    ]


def in_state(name: str, *, one_sided: bool = False) -> ReceiveTable:
    """A table whose hand-off "h" is there. `written`: transferring, with all its pages; `gone`: fenced, forgotten."""
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
    do_write(table)
    if name == "committed":
        table.commit(LINK, commit_message(), 3.0)
    return table


def answers(effects: list[Effect]) -> list[str]:
    """Names of messages posted and of other effects, in order."""
    return [type(effect.message).__name__ if isinstance(effect, Post) else type(effect).__name__ for effect in effects]

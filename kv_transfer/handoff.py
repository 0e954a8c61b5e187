"""The states of a hand-off, and what a state change asks the outside to do. Pure: no clock, no thread, no socket.

`receive_table.py` and `send_table.py` hold the two tables that obey these states. They take messages and times as
arguments and return effects; whoever calls them carries the effects out, in order.
"""

from dataclasses import dataclass
from enum import Enum

from kv_transfer.messages import MAX_REASON_CHARACTERS, HandoffMessage
from kv_transfer.records import CommitRecord, ReceiveStats, SendStats
from kv_transfer.refusals import Refusal
from kvferry_rpc.common_pb2 import ErrorCode


class HandoffState(Enum):
    """RESERVED: a place is held (receiver) or asked for (sender). TRANSFERRING: bound to one link, bytes may move."""

    RESERVED = "reserved"
    TRANSFERRING = "transferring"
    COMMITTED = "committed"
    ABORTED = "aborted"


_NEXT: dict[HandoffState, frozenset[HandoffState]] = {
    HandoffState.RESERVED: frozenset({HandoffState.TRANSFERRING, HandoffState.ABORTED}),
    HandoffState.TRANSFERRING: frozenset({HandoffState.COMMITTED, HandoffState.ABORTED}),
    HandoffState.COMMITTED: frozenset(),
    HandoffState.ABORTED: frozenset(),
}

LIVE = frozenset({HandoffState.RESERVED, HandoffState.TRANSFERRING})


class IllegalTransition(Exception):
    """A defect: a state was left that is terminal, or jumped over."""


def advance(current: HandoffState, to: HandoffState) -> HandoffState:
    """`to`, if the one table of transitions allows it. Raises IllegalTransition."""
    if to not in _NEXT[current]:
        raise IllegalTransition(f"a hand-off cannot go from {current.value} to {to.value}")
    return to


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a hand-off failed: one sentence and its kind."""

    message: str
    code: "ErrorCode.ValueType" = ErrorCode.HANDOFF_FAILED


def peer_failure(code: int, reason: str) -> Failure:
    """What a peer gave as its reason to abort. Only CANCELLED and DEADLINE_EXCEEDED keep their kind across the wire."""
    message = f"the peer gave up: {reason[:MAX_REASON_CHARACTERS]}"
    for kind in (ErrorCode.CANCELLED, ErrorCode.DEADLINE_EXCEEDED):
        if code == kind:
            return Failure(message, kind)
    return Failure(message)


@dataclass(frozen=True, slots=True)
class Post:
    """Send a message on a link, after those posted before."""

    link: int
    message: HandoffMessage


@dataclass(frozen=True, slots=True)
class Wake:
    """The link's writer has work to fetch."""

    link: int


@dataclass(frozen=True, slots=True)
class CloseLink:
    """Break a link off: its peer does not answer or does not keep the protocol."""

    link: int
    reason: str


@dataclass(frozen=True, slots=True)
class ReportCommitted:
    """Tell the worker (receiver side)."""

    handoff_id: str
    record: CommitRecord
    stats: ReceiveStats


@dataclass(frozen=True, slots=True)
class ReportFailed:
    """Tell the worker (either side)."""

    handoff_id: str
    failure: Failure


@dataclass(frozen=True, slots=True)
class ReportFenced:
    """Tell the worker (receiver side)."""

    handoff_id: str


@dataclass(frozen=True, slots=True)
class ReportRefused:
    """Receiver side: a use of a ticket was refused, and counted. `handoff_id` is what the peer said."""

    link: int
    handoff_id: str
    kind: Refusal


@dataclass(frozen=True, slots=True)
class ReportSent:
    """Tell the worker (sender side)."""

    handoff_id: str
    stats: SendStats


@dataclass(frozen=True, slots=True)
class ReportDrained:
    """Tell the worker (sender side)."""

    handoff_id: str


@dataclass(frozen=True, slots=True)
class ReportRoom:
    """Tell the worker (sender side): fewer bytes than the bound wait for this link again."""

    link: int


Effect = (
    Post
    | Wake
    | CloseLink
    | ReportCommitted
    | ReportFailed
    | ReportFenced
    | ReportRefused
    | ReportSent
    | ReportDrained
    | ReportRoom
)

"""Versions of what processes say to each other, and how far two of them may differ while a cluster is updated.

A version is `major.minor`, of a contract and not of a release. A release raises the minor by one at most, and only by
what a process of the release before can ignore: a field with a default, a kind of message that it may overlook. What it
cannot ignore raises the major. So neighbours understand each other, and a cluster can be updated process by process.
"""

from dataclasses import dataclass

_TOLERATED_MINORS = 1


@dataclass(frozen=True, slots=True, order=True)
class ProtocolVersion:
    """Version of one contract."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"

    def refusal(self, theirs: "ProtocolVersion", what: str) -> str:
        """Why a process with this version does not go with one of `theirs`, both named; empty if it does.

        `what` the version is of, as in "the hand-off protocol".
        """
        if theirs.major == self.major and abs(theirs.minor - self.minor) <= _TOLERATED_MINORS:
            return ""
        return (
            f"{theirs} of {what} is spoken there and {self} here: "
            f"one minor version apart is tolerated, this is more ({_advice(older=min(self, theirs))})"
        )


def _advice(older: ProtocolVersion) -> str:
    return f"update the processes that speak {older} first to a release in between, or all at once"


CONTROL_VERSION = ProtocolVersion(1, 1)
"""Of `proto/kvferry_rpc/internal.proto`: what routers and workers say to each other."""

FIRST_CONTROL_VERSION = ProtocolVersion(1, 0)
"""Of processes that name none beside the major: they are older than minor versions."""


def control_version(major: int, minor: int) -> ProtocolVersion:
    """The version in two fields of a message, where a sender that sets neither is one of the first version."""
    return ProtocolVersion(major, minor) if major else FIRST_CONTROL_VERSION

"""What the failover benchmark and the processes that it starts say to each other, through a pipe for each process."""

from collections.abc import Callable
from dataclasses import dataclass

from kv_cache.layout import KVCacheLayout

PREFILL, DECODE = "prefill", "decode"
BEGUN = "Begun"


@dataclass(frozen=True, slots=True)
class Setup:
    """One end. `incarnation` must differ from life to life. `bytes_per_second`: how slow the link of a prefill process
    is, None for as fast as it goes: a writer that is stopped in the middle of its waiting goes on to write later.
    """

    role: str
    transport: str
    layout: KVCacheLayout
    num_blocks: int
    lease_s: float
    io_timeout_s: float
    seed: int
    incarnation: bytes
    bytes_per_second: float | None = None


@dataclass(frozen=True, slots=True)
class Reserve:
    """Decode: hold blocks for this hand-off. Answer: Reserved."""

    number: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Push these blocks and layers so long after `Go`."""

    after_s: float
    blocks: range
    layers: range


@dataclass(frozen=True, slots=True)
class Prepare:
    """Prefill: make the content of this hand-off and wait for `Go`. Answer: Prepared. Times are after `Go`."""

    number: int
    ticket: bytes
    open_after_s: float
    pieces: tuple[Piece, ...]
    commit_after_s: float


@dataclass(frozen=True, slots=True)
class Go:
    """Prefill: begin what was prepared."""


@dataclass(frozen=True, slots=True)
class Recheck:
    """Decode: look once more at all that was committed, then free it. Answer: Rechecked."""


@dataclass(frozen=True, slots=True)
class Audit:
    """Either: count what is held. Answer: Audited."""


@dataclass(frozen=True, slots=True)
class Leave:
    """Either: close and end."""


Command = Reserve | Prepare | Go | Recheck | Audit | Leave


@dataclass(frozen=True, slots=True)
class Ready:
    """The process is up."""


@dataclass(frozen=True, slots=True)
class Reserved:
    """`ticket` is empty, and `fault` says why, when there is none."""

    number: int
    ticket: bytes
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Prepared:
    """Its content lies in the prefill pool."""

    number: int


@dataclass(frozen=True, slots=True)
class Rechecked:
    """The hand-offs whose content is not what was committed any more."""

    changed: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Audited:
    """Blocks that are not free, blocks that were written while nobody held them, hand-offs that are not over, and what
    the block manager finds wrong with itself, if anything.
    """

    held_blocks: int
    touched_blocks: int
    open_handoffs: int
    fault: str


@dataclass(frozen=True, slots=True)
class Happened:
    """An event of a hand-off (the name of its class, or BEGUN), and when. `right`: whether what was committed is what
    was to be sent.
    """

    kind: str
    number: int
    at_s: float
    right: bool = True
    reason: str = ""


Message = Ready | Reserved | Prepared | Rechecked | Audited | Happened
Tell = Callable[[Message], None]
"""Sends one to whoever started the process. Any thread."""

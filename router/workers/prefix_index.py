"""What one worker's prefix cache holds, as far as its event stream told. A hint: wrong can only cost speed."""

from collections.abc import Iterable, Set
from enum import Enum

from kv_cache.block_hash import HASH_BYTES
from kvferry_rpc.internal_pb2 import KVEvent


class Applied(Enum):
    """What became of a run of events."""

    OK = "ok"
    NEEDS_RESYNC = "needs_resync"  # Said once a gap; until the snapshot comes, further runs are IGNORED.
    IGNORED = "ignored"


class PrefixIndex:
    """The set of block hashes cached on one worker in one incarnation, kept by sequence number.

    Event-loop thread only. After a gap it is empty until a snapshot arrives. It never holds more hashes than the
    worker has blocks: a stream that claims more is not believed until the next snapshot.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._blocks: set[bytes] = set()
        self._next_sequence: int | None = None
        self._awaiting_snapshot = False

    @property
    def blocks(self) -> Set[bytes]:
        """The hashes, live and read-only."""
        return self._blocks

    @property
    def in_sync(self) -> bool:
        """False between a gap and the snapshot that heals it, and before the first event."""
        return self._next_sequence is not None

    def apply(self, first_sequence: int, snapshot: bool, events: Iterable[KVEvent]) -> Applied:
        """Take one message. Events must continue the last ones, or be a snapshot."""
        if snapshot:
            self._blocks.clear()
            self._next_sequence = first_sequence
            self._awaiting_snapshot = False
        elif self._awaiting_snapshot:
            return Applied.IGNORED
        elif self._next_sequence is None and first_sequence <= 1:
            self._next_sequence = first_sequence  # The very first events of an incarnation need no snapshot.
        if first_sequence != self._next_sequence:
            self._forget()
            return Applied.NEEDS_RESYNC
        self._next_sequence = first_sequence
        for event in events:
            self._next_sequence += 1
            self._apply_one(event)
        if len(self._blocks) > self._max_blocks:
            self._forget()
            return Applied.IGNORED
        return Applied.OK

    def _apply_one(self, event: KVEvent) -> None:
        if event.removed:
            self._blocks.discard(event.block_hash)
        elif len(event.block_hash) == HASH_BYTES:
            self._blocks.add(event.block_hash)

    def _forget(self) -> None:
        self._blocks.clear()
        self._next_sequence = None
        self._awaiting_snapshot = True

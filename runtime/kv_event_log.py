"""What changed in a worker's prefix cache, kept for the routers that want to know.

The engine thread writes, one membership link a router reads, each at its own pace. Bounded: a reader that falls
behind (or has just come) gets the complete content instead of the changes it missed, and with no reader at all the
log still holds at most `capacity` changes.
"""

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

CacheChange = tuple[bytes, bool]
"""(block hash, removed): False = the block is now in the prefix cache, True = it is no longer."""


@dataclass(frozen=True, slots=True)
class LogRead:
    """What one reader gets: `changes` in order, or with `snapshot` the complete content as stored blocks.

    `cursor` is where its next read starts.
    """

    changes: tuple[CacheChange, ...]
    snapshot: bool
    cursor: int


class KVEventLog:
    """Thread-safe. The writer calls `publish` or `replace` after an engine step:

    changes = block_manager.take_events()
    if changes is None: log.replace(block_manager.snapshot_hashes())
    else:               log.publish((change.block_hash, change.removed) for change in changes)
    """

    def __init__(self, capacity: int = 65_536) -> None:
        """Keep at most `capacity` changes (about 100 bytes each) for readers that lag, and one copy of the content."""
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, not {capacity}")
        self._lock = threading.Lock()
        self._content: dict[bytes, None] = {}  # in order of storing, so parents come before children
        self._recent: deque[CacheChange] = deque(maxlen=capacity)
        self._end = 0  # position after the last change; positions never repeat

    def publish(self, changes: Iterable[CacheChange]) -> None:
        """Append changes in order. A change that says what is known already is dropped."""
        with self._lock:
            for block_hash, removed in changes:
                if removed == (block_hash not in self._content):
                    continue
                if removed:
                    del self._content[block_hash]
                else:
                    self._content[block_hash] = None
                self._recent.append((block_hash, removed))
                self._end += 1

    def replace(self, block_hashes: Iterable[bytes]) -> None:
        """Changes were lost: this is the complete content now. Every reader gets a snapshot next."""
        with self._lock:
            self._content = dict.fromkeys(block_hashes)
            self._recent.clear()
            self._end += 1

    def read(self, cursor: int | None, limit: int) -> LogRead:
        """The changes since `cursor`, at most `limit` of them; a snapshot (of any length) if they are not all kept.

        `cursor` None asks for a snapshot; otherwise it comes from an earlier read of this log.
        """
        with self._lock:
            start = self._end - len(self._recent)
            if cursor is None or cursor < start:
                return LogRead(tuple((block_hash, False) for block_hash in self._content), True, self._end)
            changes = tuple(islice(self._recent, cursor - start, cursor - start + limit))
            return LogRead(changes, False, cursor + len(changes))

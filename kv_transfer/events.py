"""What a hand-off tells its worker, on each side, and the delivery of it: in order, with no lock held."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from kv_transfer.records import CommitRecord, ReceiveStats, SendStats
from runtime.errors import KvferryError

__all__ = [
    "CommitRecord",
    "Committed",
    "Drained",
    "EventDelivery",
    "Failed",
    "Fenced",
    "ReceiveEvent",
    "ReceiveStats",
    "SendEvent",
    "SendStats",
    "Sent",
]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Committed:
    """Receiver, terminal: the blocks hold what the sender had and nobody can write them any more; no Fenced follows."""

    handoff_id: str
    record: CommitRecord
    stats: ReceiveStats


@dataclass(frozen=True, slots=True)
class Failed:
    """Either side, terminal: the hand-off did not happen. Fenced (receiver) or Drained (sender) follows, once."""

    handoff_id: str
    error: KvferryError


@dataclass(frozen=True, slots=True)
class Fenced:
    """Receiver, after Failed: no byte of this hand-off can land any more; its blocks may be reused."""

    handoff_id: str


@dataclass(frozen=True, slots=True)
class Sent:
    """Sender, terminal: committed, and the receiver has said so. Drained follows."""

    handoff_id: str
    stats: SendStats


@dataclass(frozen=True, slots=True)
class Drained:
    """Sender, last event of every hand-off: no thread reads the local pool for it any more."""

    handoff_id: str


ReceiveEvent = Committed | Failed | Fenced
SendEvent = Sent | Failed | Drained

Event = TypeVar("Event")


class EventDelivery(Generic[Event]):
    """Hands events to a callback in the order they were queued, one at a time, whichever threads queue them.

    `queue` is called under the owner's lock, so the order is that of the state changes; `deliver` without it, so the
    callback may call the owner back. A thread that finds another one delivering leaves its events to it.
    """

    def __init__(self, on_event: Callable[[Event], None]) -> None:
        self._on_event = on_event
        self._lock = threading.Lock()
        self._events: deque[Event] = deque()
        self._busy = False

    def queue(self, events: Iterable[Event]) -> None:
        """Append. Any thread."""
        with self._lock:
            self._events.extend(events)

    def deliver(self) -> None:
        """Call back for everything queued. Any thread that holds no lock the callback may want."""
        with self._lock:
            if self._busy:
                return
            self._busy = True
        while True:
            with self._lock:
                if not self._events:
                    self._busy = False
                    return
                event = self._events.popleft()
            try:
                self._on_event(event)
            except Exception:
                _log.exception("the receiver of hand-off events failed on %s", type(event).__name__)

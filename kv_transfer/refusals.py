"""Why a ticket, or a use of one, was refused: counted by kind, and logged without letting a stranger fill the log.

The table decides and counts; what the peer is told is less than what is counted here.
"""

import hmac
import logging
from collections import deque
from enum import Enum

_MAX_EXPIRED = 1024

_log = logging.getLogger(__name__)


class Refusal(Enum):
    """Kinds of refusals. The values are names for metrics and logs."""

    UNKNOWN = "unknown"
    """Never given out here, or its hand-off is over."""
    EXPIRED = "expired"
    """Its lease ran out before anybody came."""
    WRONG_SECRET = "wrong_secret"
    OTHER_INCARNATION = "other_incarnation"
    """Given out in another life of this worker."""
    OTHER_ATTEMPT = "other_attempt"
    OTHER_LINK = "other_link"
    """Used on a link that has not opened it, or that was not the first: replayed, or somebody else's."""
    REUSED = "reused"
    """Opened on this link before. A second hand-off by the same ticket could take the answers to the first."""
    OTHER_TRANSPORT = "other_transport"
    """Asks for another transport than the link's."""
    OUTSIDE = "outside"
    """Used to write pages that it does not give."""


class ExpiredTickets:
    """The last tickets that nobody used in time. Bounded; forgetting one only changes how its refusal is counted."""

    def __init__(self) -> None:
        self._secrets: dict[str, bytes] = {}
        self._order: deque[str] = deque()

    def add(self, handoff_id: str, secret: bytes) -> None:
        """Remember one."""
        if len(self._order) == _MAX_EXPIRED:
            del self._secrets[self._order.popleft()]
        self._order.append(handoff_id)
        self._secrets[handoff_id] = secret

    def kind(self, handoff_id: str, secret: bytes) -> Refusal:
        """Why a ticket that is not held (any more) is refused."""
        expected = self._secrets.get(handoff_id)
        if expected is None:
            return Refusal.UNKNOWN
        return Refusal.EXPIRED if hmac.compare_digest(expected, secret) else Refusal.WRONG_SECRET


class RefusalLog:
    """One warning for each link and kind. Not thread-safe."""

    def __init__(self) -> None:
        self._peers: dict[int, str] = {}
        self._said: set[tuple[int, Refusal]] = set()

    def begin(self, link: int, peer: str) -> None:
        """A link from this worker is up."""
        self._peers[link] = peer

    def note(self, link: int, handoff_id: str, kind: Refusal) -> None:
        """Log it, unless this link was named for the same before, or is over."""
        if link not in self._peers or (link, kind) in self._said:
            return
        self._said.add((link, kind))
        peer = self._peers[link]
        _log.warning("refused a ticket from %s: %s (hand-off %.80r; said once a link)", peer, kind.value, handoff_id)

    def forget(self, link: int) -> None:
        """The link is over."""
        self._peers.pop(link, None)
        self._said -= {(link, kind) for kind in Refusal}

"""What a sender keeps for one decode worker: the link, the way into its pool, and patience after failures."""

import logging
import random
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kv_cache.layout import KVCacheLayout
from kv_transfer.attachment import MAX_PROPOSALS, asking
from kv_transfer.choice import Pair, candidates, degraded, expected
from kv_transfer.handoff import Failure
from kv_transfer.link import Link
from kv_transfer.messages import Settled
from kv_transfer.region import MemoryRegion
from kv_transfer.talk import Talk
from kv_transfer.transport import LinkError, PayloadWriter, Transport, TransportUnavailable
from kvferry_rpc import internal_pb2

PeerKey = tuple[str, str, bytes]
"""Address, worker id and incarnation: one life of one decode worker."""

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
_MAX_REMEMBERED = 1024

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LinkView:
    """How payload travels on one link: all empty until that is settled.

    `detail`: what the transport's library chose. `expected`: the transport that should have worked; `why_not`: why it
    is not the one in use, empty when it is, or a better one.
    """

    transport: str = ""
    detail: str = ""
    expected: str = ""
    why_not: str = ""


class Outlet:
    """The link to one decode worker, with what it takes to write there. Its sender owns the thread that runs it."""

    def __init__(self, key: PeerKey, ticket: internal_pb2.Ticket, io_timeout_s: float) -> None:
        self.key = key
        self.address, self.worker_id, self.incarnation = key
        self.offers = {offer.name: offer.descriptor for offer in ticket.transports}
        self.link = Link(sends_payload=True, io_timeout_s=io_timeout_s)
        self.view = LinkView()
        self.thread: threading.Thread | None = None
        # The hand-off whose write met a defect, after which the link is given up. Set once, by the writer.
        self.defect: tuple[str, Failure] | None = None
        self._writer: PayloadWriter | None = None
        self._wire: KVCacheLayout | None = None

    def payload(self) -> PayloadWriter:
        """The way into the peer's pool. Only once `reach` has succeeded."""
        assert self._writer is not None
        return self._writer

    def wire(self) -> KVCacheLayout:
        """The layout of the pages that this link carries. Only once `reach` has succeeded."""
        assert self._wire is not None
        return self._wire

    def reach(
        self,
        talk: Talk,
        transports: Mapping[str, Transport],
        pair: Pair,
        memory: Sequence[MemoryRegion],
        *,
        target: KVCacheLayout,
        wire: KVCacheLayout,
    ) -> Transport:
        """Settle on the best common transport that works. Raises LinkError when none does.

        `target` is the layout of the peer's pool; `wire` the one that pages should have on the way, which one-sided
        transports cannot: theirs have the target's.
        """
        failed: dict[str, str] = {}
        for name in candidates(list(self.offers), list(transports), pair)[:MAX_PROPOSALS]:
            transport = transports[name]
            self._wire = target if transport.one_sided else wire
            proposed = b"" if self._wire == target else self._wire.to_proto().SerializeToString()
            try:
                self._writer = transport.connect(
                    self.offers[name], talk.channel, target, memory, asking(talk, name, proposed)
                )
            except TransportUnavailable as error:
                failed[name] = str(error)
                continue
            try:
                talk.say(Settled())
            except LinkError:
                self._writer.close()
                raise
            self._note(name, expected(list(self.offers), list(transports), pair), failed)
            if self._wire != wire:
                kept, asked = target.dtype.value, wire.dtype.value
                _log.warning(
                    "KV goes to %s over %s in %s, not in %s: it is one-sided", self.worker_id, name, kept, asked
                )
            return transport
        reasons = "; ".join(f"{name}: {reason}" for name, reason in failed.items())
        raise LinkError(
            f"no transport in common works: the decode worker offers {', '.join(self.offers) or 'none'}, "
            f"this one uses {', '.join(transports)}{'; ' if reasons else ''}{reasons}"
        )

    def _note(self, name: str, best: str, failed: Mapping[str, str]) -> None:
        """Keep and log what came of it: a warning if it is less than what was to be expected."""
        why_not = ""
        if degraded(name, best):
            why_not = failed.get(best, "it was not tried")
            _log.warning("KV goes to %s over %s, not over %s as expected: %s", self.worker_id, name, best, why_not)
        self.view = LinkView(name, self.payload().detail, best, why_not)
        _log.info("KV goes to %s over %s %s", self.worker_id, name, self.view.detail)
        for other, reason in failed.items():
            _log.info("%s does not reach %s: %s", other, self.worker_id, reason)


class Backoff:
    """Which peers could not be reached lately, and until when not to try again. Each failure doubles the pause."""

    def __init__(self) -> None:
        self._failed: dict[PeerKey, tuple[int, float, Failure]] = {}

    def failed(self, key: PeerKey, failure: Failure, now: float) -> None:
        """A link could not be made. The pause is jittered, so that many senders do not come back together."""
        count = self._failed.get(key, (0, 0.0, failure))[0] + 1
        pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(count - 1, 10)) * random.uniform(0.5, 1.0)
        if len(self._failed) >= _MAX_REMEMBERED:
            self._failed.clear()
        self._failed[key] = (count, now + pause_s, failure)

    def succeeded(self, key: PeerKey) -> None:
        """A link was made."""
        self._failed.pop(key, None)

    def refusal(self, key: PeerKey, now: float) -> Failure | None:
        """Why not to try now; None when it is time."""
        _, until, failure = self._failed.get(key, (0, now, None))
        return failure if until > now else None

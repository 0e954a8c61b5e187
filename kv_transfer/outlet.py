"""What a sender keeps for one decode worker: the link, the way into its pool, and patience after failures."""

import logging
import random
import threading
from collections.abc import Mapping

from kv_cache.layout import KVCacheLayout
from kv_transfer.handoff import Failure
from kv_transfer.link import Link
from kv_transfer.transport import Channel, LinkError, PayloadWriter, Transport, TransportUnavailable
from kvferry_rpc import internal_pb2

PeerKey = tuple[str, str, bytes]
"""Address, worker id and incarnation: one life of one decode worker."""

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
_MAX_REMEMBERED = 1024

_log = logging.getLogger(__name__)


class Outlet:
    """The link to one decode worker, with what it takes to write there. Its sender owns the thread that runs it."""

    def __init__(self, key: PeerKey, ticket: internal_pb2.Ticket, io_timeout_s: float) -> None:
        self.key = key
        self.address, self.worker_id, self.incarnation = key
        self.offers = [(offer.name, offer.descriptor) for offer in ticket.transports]
        self.link = Link(sends_payload=True, io_timeout_s=io_timeout_s)
        self.transport = ""
        self.thread: threading.Thread | None = None
        self._writer: PayloadWriter | None = None

    def payload(self) -> PayloadWriter:
        """The way into the peer's pool. Only once `reach` has succeeded."""
        assert self._writer is not None
        return self._writer

    def reach(self, transports: Mapping[str, Transport], channel: Channel, layout: KVCacheLayout) -> Transport:
        """Take the first transport of the ticket that this side has too and that works. Raises LinkError."""
        for name, descriptor in self.offers:
            transport = transports.get(name)
            if transport is None:
                continue
            try:
                self._writer = transport.connect(descriptor, channel, layout)
            except TransportUnavailable as error:
                _log.warning("%s does not reach %s: %s", name, self.worker_id, error)
                continue
            _log.info("KV goes to %s over %s", self.worker_id, name)
            return transport
        offered, known = ", ".join(name for name, _ in self.offers) or "none", ", ".join(transports)
        raise LinkError(f"no transport in common works: the decode worker offers {offered}, this one uses {known}")


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

"""The decode side of every hand-off, as one pure table: who may write where, until when, and when blocks are free.

Life of an inbound hand-off: `reserve`, `open`, (`begin_write`, `end_write`)*, `commit`, `release`.
Everything else (abort, Abort, Fence, lost link, lease) ends in ABORTED and then, once no write can land, in a fence.

Two kinds of transport differ only in who knows that no write can land:
* two-sided (tcp, ucx): the receiver asks for the bytes itself, so it knows: when its current receive has ended;
* one-sided (shm, nixl): the peer writes alone, so only the peer's Fence, its Commit, or the end of its link can tell.
Either way a Write says which pages it is about, and their fingerprints are taken when they have landed.
"""

import hmac
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kv_transfer.fingerprint import Fingerprints
from kv_transfer.handoff import (
    LIVE,
    CloseLink,
    Effect,
    Failure,
    HandoffState,
    Post,
    ReportCommitted,
    ReportFailed,
    ReportFenced,
    ReportRefused,
    advance,
    peer_failure,
)
from kv_transfer.inbound import InboundHandoff
from kv_transfer.messages import Abort, Accepted, Commit, Fence, Open, Opened, Refused, Rejected, Renew, Renewed, Write
from kv_transfer.refusals import ExpiredTickets, Refusal
from kvferry_rpc.common_pb2 import ErrorCode

_NO_TICKET = "no such ticket: unknown, over, or its secret is wrong"
_NOT_OPEN = "the hand-off is over or was never opened here"


@dataclass(frozen=True, slots=True)
class ReceiveCounts:
    """Inbound hand-offs by what they hold: quarantined = failed and not yet fenced. All zero when idle."""

    reserved: int
    transferring: int
    quarantined: int
    committed: int


@dataclass(frozen=True, slots=True)
class ReceiverSnapshot:
    """How many hand-offs hold something, and how many links are up: all zero when idle and alone.

    `refused`: tickets, and uses of tickets, refused since the start, by `Refusal.value`.
    """

    handoffs: ReceiveCounts
    links: int
    refused: Mapping[str, int] = field(default_factory=dict)


class ReceiveTable:
    """All inbound hand-offs of one worker life. Not thread-safe; times are seconds of one monotonic clock."""

    def __init__(
        self, *, num_blocks: int, num_layers: int, page_bytes: int, incarnation: bytes, lease_s: float, verify: bool
    ) -> None:
        self._num_blocks = num_blocks
        self._num_layers = num_layers
        self._page_bytes = page_bytes
        self._incarnation = incarnation
        self._lease_s = lease_s
        self._verify = verify
        self._handoffs: dict[str, InboundHandoff] = {}
        self._owner: dict[int, str] = {}  # Block -> the one hand-off that may write it.
        self._expired = ExpiredTickets()
        self._refused: Counter[Refusal] = Counter()

    def __len__(self) -> int:
        return len(self._handoffs)

    # ---- the worker's side

    def reserve(
        self,
        handoff_id: str,
        *,
        secret: bytes,
        attempt: int,
        first_block: int,
        block_ids: Sequence[int],
        num_tokens: int,
        now: float,
    ) -> None:
        """Hold a place. Raises ValueError, and holds nothing, when the blocks cannot be written to safely."""
        if handoff_id in self._handoffs:
            raise ValueError(f"hand-off {handoff_id} is already held")
        if len(set(block_ids)) != len(block_ids):
            raise ValueError("a destination block is named twice")
        for block_id in block_ids:
            if not 0 <= block_id < self._num_blocks:
                raise ValueError(f"block {block_id} is outside the pool of {self._num_blocks} blocks")
            if block_id in self._owner:
                raise ValueError(f"block {block_id} is still writable by hand-off {self._owner[block_id]}")
        self._owner.update(dict.fromkeys(block_ids, handoff_id))
        self._handoffs[handoff_id] = InboundHandoff(
            handoff_id=handoff_id,
            attempt=attempt,
            secret=secret,
            first_block=first_block,
            block_ids=tuple(block_ids),
            num_tokens=num_tokens,
            num_layers=self._num_layers,
            lease_expires_at=now + self._lease_s,
        )

    def abort(self, handoff_id: str, failure: Failure) -> list[Effect]:
        """The worker gives up. Nothing when the hand-off is over or unknown."""
        handoff = self._handoffs.get(handoff_id)
        if handoff is None or handoff.state not in LIVE:
            return []
        return self._fail(handoff, failure, Abort(handoff_id, failure.code, failure.message))

    def abort_all(self, failure: Failure) -> list[Effect]:
        """The worker gives up everything that is not over."""
        return [effect for handoff_id in list(self._handoffs) for effect in self.abort(handoff_id, failure)]

    def release(self, handoff_id: str) -> None:
        """Forget a committed hand-off. Nothing when it is in another state or unknown."""
        handoff = self._handoffs.get(handoff_id)
        if handoff is not None and handoff.state is HandoffState.COMMITTED:
            del self._handoffs[handoff_id]

    def counts(self) -> ReceiveCounts:
        """How many hand-offs hold something."""
        states = [handoff.state for handoff in self._handoffs.values()]
        return ReceiveCounts(
            reserved=states.count(HandoffState.RESERVED),
            transferring=states.count(HandoffState.TRANSFERRING),
            quarantined=states.count(HandoffState.ABORTED),
            committed=states.count(HandoffState.COMMITTED),
        )

    @property
    def refused(self) -> Mapping[Refusal, int]:
        """Tickets, and uses of them, refused since the start, by kind."""
        return dict(self._refused)

    # ---- the peer's side

    def open(self, link: int, message: Open, *, transport: str, one_sided: bool, now: float) -> list[Effect]:
        """Bind a hand-off to the link, once; the same Open again is answered again, any other is refused and counted.

        `transport`: how the link's payload travels.
        """
        handoff = self._handoffs.get(message.handoff_id)
        fault = self._fault_of_ticket(link, message, transport)
        if fault is not None or handoff is None:
            kind, reason = fault or (Refusal.UNKNOWN, _NO_TICKET)
            return [*self._refuse(link, message.handoff_id, kind), Post(link, Refused(message.handoff_id, reason))]
        if handoff.state is HandoffState.RESERVED:
            handoff.state = advance(handoff.state, HandoffState.TRANSFERRING)
            handoff.link, handoff.number = link, message.number
            handoff.transport, handoff.one_sided = transport, one_sided
            handoff.lease_expires_at = now + self._lease_s
        return [Post(link, Opened(handoff.handoff_id, handoff.number))]

    def begin_write(self, link: int, message: Write, now: float) -> tuple[int | None, list[Effect]]:
        """The seed for its fingerprints if the payload may land; `end_write` must follow. None: throw it away.

        Late, foreign and unknown writes change nothing; a write outside its own ticket fails the hand-off, and its link
        too where the bytes cannot be kept out.
        """
        handoff = self._bound(link, message.handoff_id)
        if handoff is None or not handoff.open_to_writes:
            foreign = self._foreign(link, message.handoff_id)
            return None, [*foreign, Post(link, Abort(message.handoff_id, ErrorCode.HANDOFF_FAILED, _NOT_OPEN))]
        reason = handoff.fault_of_write(message)
        if reason:
            stop = Abort(handoff.handoff_id, ErrorCode.HANDOFF_FAILED, reason)
            effects = self._refuse(link, handoff.handoff_id, Refusal.OUTSIDE)
            effects += self._fail(handoff, Failure(f"a write was refused: {reason}"), stop)
            return None, [*effects, CloseLink(link, reason)] if handoff.one_sided else effects
        handoff.begin_write(message)
        handoff.receiving = True
        handoff.lease_expires_at = now + self._lease_s
        if handoff.first_write_at is None:
            handoff.first_write_at = now
        return handoff.seed, []

    def end_write(self, message: Write, *, landed: bool, fingerprints: Fingerprints = (), now: float) -> list[Effect]:
        """The receive begun last for this hand-off is over; `landed` if every byte came, with fingerprints to verify.

        These are of its pages as they lie there, block by block.
        """
        handoff = self._handoffs[message.handoff_id]
        handoff.receiving = False
        if handoff.state is HandoffState.ABORTED:
            return self._fence_if_quiet(handoff)
        if landed:
            handoff.end_write(message, fingerprints)
            handoff.last_write_at = now
            handoff.lease_expires_at = now + self._lease_s
        return []

    def commit(self, link: int, message: Commit, now: float) -> list[Effect]:
        """The peer has written everything: accept it, if what landed is all of it and what the peer says it sent."""
        handoff = self._bound(link, message.handoff_id)
        if handoff is None or handoff.state is HandoffState.ABORTED:
            return [*self._foreign(link, message.handoff_id), Post(link, Rejected(message.handoff_id, _NOT_OPEN))]
        if handoff.state is HandoffState.COMMITTED:
            return [Post(link, Accepted(handoff.handoff_id))]
        handoff.sealed, handoff.commit_received_at = message, now
        reason = handoff.fault_of_commit(message)
        if self._verify:
            reason = reason or handoff.missing_page(message) or handoff.mismatch(message)
        return self._reject(handoff, reason) if reason else self._accept(handoff, now)

    def peer_abort(self, link: int, message: Abort) -> list[Effect]:
        """The sender gives up; its Fence follows when it has stopped writing."""
        handoff = self._bound(link, message.handoff_id)
        if handoff is None or handoff.state is not HandoffState.TRANSFERRING:
            return []
        return self._fail(handoff, peer_failure(message.code, message.reason), None)

    def fence(self, link: int, message: Fence) -> list[Effect]:
        """The sender writes no more. Without a commit that also means failure."""
        handoff = self._bound(link, message.handoff_id)
        if handoff is None or handoff.state is HandoffState.COMMITTED:
            return []
        effects: list[Effect] = []
        if handoff.state is HandoffState.TRANSFERRING:
            handoff.state = advance(handoff.state, HandoffState.ABORTED)
            effects.append(ReportFailed(handoff.handoff_id, Failure("the sender stopped without a commit")))
        return effects if handoff.receiving else [*effects, *self._fenced(handoff)]

    def renew(self, link: int, message: Renew, now: float) -> list[Effect]:
        """Extend leases; ids not held for this link are named in the answer."""
        unknown = []
        for handoff_id in message.handoff_ids:
            handoff = self._bound(link, handoff_id)
            if handoff is None or handoff.state is HandoffState.ABORTED:
                unknown.append(handoff_id)
            elif handoff.state is HandoffState.TRANSFERRING:
                handoff.lease_expires_at = now + self._lease_s
        return [Post(link, Renewed(tuple(unknown)))]

    def link_failed(self, link: int, reason: str) -> list[Effect]:
        """Nothing more comes from the link; its one-sided writers may still be writing until `link_closed`."""
        effects: list[Effect] = []
        for handoff in self._of_link(link):
            if handoff.state is HandoffState.TRANSFERRING:
                effects += self._fail(handoff, Failure(f"the link to the sender was lost: {reason}"), None)
        return effects

    def must_outlive(self, link: int) -> bool:
        """Whether the link must be kept until its peer closes it: only that can fence the rest."""
        return any(handoff.state is HandoffState.ABORTED and handoff.one_sided for handoff in self._of_link(link))

    def link_closed(self, link: int) -> list[Effect]:
        """The peer's end is closed, so its writers have ended. Call after `link_failed`."""
        quarantined = [handoff for handoff in self._of_link(link) if handoff.state is HandoffState.ABORTED]
        return [effect for handoff in quarantined for effect in self._fenced(handoff)]

    # ---- time

    def expire(self, now: float) -> list[Effect]:
        """Fail every hand-off whose lease has run out, break off links that hold a fence up, ask again for fences."""
        effects: list[Effect] = []
        for handoff in list(self._handoffs.values()):
            if handoff.lease_expires_at > now or handoff.state is HandoffState.COMMITTED:
                continue
            handoff.lease_expires_at = math.inf
            if handoff.receiving and handoff.link is not None:
                effects.append(CloseLink(handoff.link, "a payload stalled for longer than its lease"))
            if handoff.state is HandoffState.RESERVED:
                self._expired.add(handoff.handoff_id, handoff.secret)
            if handoff.state in LIVE:
                failure = Failure(f"the lease of {self._lease_s:g} s ran out without a sign of life from the sender")
                effects += self._fail(handoff, failure, Abort(handoff.handoff_id, failure.code, failure.message))
            elif handoff.state is HandoffState.ABORTED and handoff.one_sided and handoff.link is not None:
                reminder = Abort(handoff.handoff_id, ErrorCode.HANDOFF_FAILED, "its place waits for a fence")
                effects.append(Post(handoff.link, reminder))
            if handoff.state is HandoffState.ABORTED and handoff.one_sided:
                handoff.lease_expires_at = now + self._lease_s
        return effects

    def next_expiry(self) -> float | None:
        """When `expire` has something to do next; None when it has not."""
        times = [h.lease_expires_at for h in self._handoffs.values() if h.state is not HandoffState.COMMITTED]
        earliest = min(times, default=math.inf)
        return None if earliest == math.inf else earliest

    # ---- inside

    def _fault_of_ticket(self, link: int, message: Open, transport: str) -> tuple[Refusal, str] | None:
        """Why this Open is refused: what is counted, and the little that the peer is told. None when it is good."""
        handoff = self._handoffs.get(message.handoff_id)
        if message.incarnation != self._incarnation:
            return Refusal.OTHER_INCARNATION, "the ticket is of another life of this worker"
        if handoff is None:
            return self._expired.kind(message.handoff_id, message.secret), _NO_TICKET
        if not hmac.compare_digest(handoff.secret, message.secret):
            return Refusal.WRONG_SECRET, _NO_TICKET
        if handoff.attempt != message.attempt:
            return Refusal.OTHER_ATTEMPT, f"the ticket is for attempt {handoff.attempt}, not {message.attempt}"
        if handoff.link not in (None, link):
            return Refusal.OTHER_LINK, "the ticket was used already"
        over = handoff.state not in LIVE or handoff.sealed is not None
        if over or (handoff.link == link and handoff.number != message.number):
            return Refusal.REUSED, "the ticket was used already"
        if message.transport != transport:
            return Refusal.OTHER_TRANSPORT, f"this link carries payload by {transport}, not by {message.transport}"
        return None

    def _refuse(self, link: int, handoff_id: str, kind: Refusal) -> list[Effect]:
        self._refused[kind] += 1
        return [ReportRefused(link, handoff_id, kind)]

    def _foreign(self, link: int, handoff_id: str) -> list[Effect]:
        """What is counted when a link uses a hand-off that it has not opened. One that is over may just be late."""
        handoff = self._handoffs.get(handoff_id)
        if handoff is None or handoff.link == link:
            return []
        return self._refuse(link, handoff_id, Refusal.OTHER_LINK)

    def _bound(self, link: int, handoff_id: str) -> InboundHandoff | None:
        handoff = self._handoffs.get(handoff_id)
        return handoff if handoff is not None and handoff.link == link else None

    def _of_link(self, link: int) -> list[InboundHandoff]:
        return [handoff for handoff in self._handoffs.values() if handoff.link == link]

    def _accept(self, handoff: InboundHandoff, now: float) -> list[Effect]:
        handoff.state = advance(handoff.state, HandoffState.COMMITTED)
        self._disown(handoff)
        stats = handoff.stats(page_bytes=self._page_bytes, verified_at=now, verified=self._verify)
        effects: list[Effect] = [ReportCommitted(handoff.handoff_id, handoff.record(), stats)]
        return effects if handoff.link is None else [*effects, Post(handoff.link, Accepted(handoff.handoff_id))]

    def _reject(self, handoff: InboundHandoff, reason: str) -> list[Effect]:
        return self._fail(handoff, Failure(f"the commit was refused: {reason}"), Rejected(handoff.handoff_id, reason))

    def _fail(self, handoff: InboundHandoff, failure: Failure, tell: Abort | Rejected | None) -> list[Effect]:
        handoff.state = advance(handoff.state, HandoffState.ABORTED)
        effects: list[Effect] = [ReportFailed(handoff.handoff_id, failure)]
        if tell is not None and handoff.link is not None:
            effects.append(Post(handoff.link, tell))
        return [*effects, *self._fence_if_quiet(handoff)]

    def _fence_if_quiet(self, handoff: InboundHandoff) -> list[Effect]:
        return [] if handoff.writable else self._fenced(handoff)

    def _fenced(self, handoff: InboundHandoff) -> list[Effect]:
        self._disown(handoff)
        del self._handoffs[handoff.handoff_id]
        return [ReportFenced(handoff.handoff_id)]

    def _disown(self, handoff: InboundHandoff) -> None:
        for block_id in handoff.block_ids:
            del self._owner[block_id]

"""The prefill side of every hand-off, as one pure table: what to write next, what to answer, and when reading is over.

Life of an outbound hand-off: `open` -> Opened -> `push`* and `commit`, written by the link's writer through `next_work`
-> Accepted. Everything else ends in ABORTED; then, once the writer has left the local pool, in Fence and Drained.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kv_cache.layout import KVCacheLayout
from kv_transfer.backlog import DEFAULT_MAX_BACKLOG_BYTES, Backlog
from kv_transfer.convert import check_wire
from kv_transfer.handoff import (
    LIVE,
    CloseLink,
    Effect,
    Failure,
    HandoffState,
    Post,
    ReportDrained,
    ReportFailed,
    ReportRoom,
    ReportSent,
    Wake,
    advance,
    peer_failure,
)
from kv_transfer.messages import (
    MAX_REASON_CHARACTERS,
    MAX_RENEW_IDS,
    Abort,
    Accepted,
    Commit,
    Fence,
    Open,
    Opened,
    ReceiverMessage,
    Refused,
    Rejected,
    Renew,
    Renewed,
)
from kv_transfer.outbound import OutboundHandoff
from kv_transfer.pages import USUAL_WRITE_BYTES, PageRun
from kv_transfer.records import CommitRecord
from kvferry_rpc.common_pb2 import ErrorCode


@dataclass(frozen=True, slots=True)
class Work:
    """What the link's writer does next for a hand-off: write this run, or (None) build the commit."""

    handoff: OutboundHandoff
    run: PageRun | None


@dataclass(slots=True)
class _LinkState:
    """`transport` is empty until the link is ready, and what belongs to it unknown; `wire` None: the receiver's layout.
    `unanswered_since`: when the oldest unanswered Renew was posted. `untold`: given up before the peer knew of them.
    """

    transport: str = ""
    detail: str = ""
    expected: str = ""
    wire: KVCacheLayout | None = None
    write_bytes: int = USUAL_WRITE_BYTES
    unanswered_since: float = math.inf
    queue: deque[OutboundHandoff] = field(default_factory=deque)
    untold: list[tuple[OutboundHandoff, Failure]] = field(default_factory=list)


class SendTable:
    """All outbound hand-offs of one worker life. Not thread-safe; times are seconds of one monotonic clock."""

    def __init__(self, *, answer_timeout_s: float, max_backlog_bytes: int = DEFAULT_MAX_BACKLOG_BYTES) -> None:
        self._backlog = Backlog(max_backlog_bytes)
        self._answer_timeout_s = answer_timeout_s
        self._handoffs: dict[str, OutboundHandoff] = {}
        self._links: dict[int, _LinkState] = {}
        self._num_opens = 0

    def __len__(self) -> int:
        return len(self._handoffs)

    def __contains__(self, handoff_id: str) -> bool:
        return handoff_id in self._handoffs

    # ---- the worker's side

    def open(self, handoff: OutboundHandoff, now: float) -> list[Effect]:
        """Ask for the hand-off to be bound to its link, now or when the link is ready."""
        self._handoffs[handoff.handoff_id] = handoff
        return self._ask(handoff, now) if self._links[handoff.link].transport else []

    def push(self, handoff_id: str, first: int, local_ids: Sequence[int], layers: range) -> list[Effect]:
        """Take local pages to write. Raises ValueError out of range or after the commit. Nothing when it is over.

        A block that comes from elsewhere than before fails the hand-off.
        """
        handoff = self._handoffs.get(handoff_id)
        if handoff is None or handoff.state not in LIVE:
            return []
        if handoff.record is not None:
            raise ValueError(f"hand-off {handoff_id} was committed already")
        reason = handoff.moved(first, local_ids)
        if reason:
            return self._fail(handoff, Failure(reason, ErrorCode.INTERNAL), tell=True)
        room = self._count(handoff, handoff.push(first, local_ids, layers))
        return [*room, *self._enqueue(handoff)]

    def commit(self, handoff_id: str, record: CommitRecord) -> list[Effect]:
        """Take the commit record, to go out after the last page. A page never pushed fails the hand-off."""
        handoff = self._handoffs.get(handoff_id)
        if handoff is None or handoff.state not in LIVE:
            return []
        if handoff.record is not None:
            raise ValueError(f"hand-off {handoff_id} was committed already")
        handoff.record = record
        missing = handoff.pushed.find(0)
        if missing >= 0:
            block, layer = divmod(missing, handoff.layout.num_layers)
            reason = f"committed although prompt block {handoff.first_block + block}, layer {layer} was never pushed"
            return self._fail(handoff, Failure(reason, ErrorCode.INTERNAL), tell=True)
        return self._enqueue(handoff)

    def abort(self, handoff_id: str, failure: Failure) -> list[Effect]:
        """Give up. Nothing when it is over or unknown."""
        handoff = self._handoffs.get(handoff_id)
        return [] if handoff is None or handoff.state not in LIVE else self._fail(handoff, failure, tell=True)

    def abort_all(self, failure: Failure) -> list[Effect]:
        """Give up everything that is not over."""
        return [effect for handoff_id in list(self._handoffs) for effect in self.abort(handoff_id, failure)]

    # ---- how much waits

    def backlog_bytes(self, handoff_id: str) -> int:
        """Bytes pushed and not yet written on the link of this hand-off, all hand-offs together; 0 when it is over."""
        handoff = self._handoffs.get(handoff_id)
        return 0 if handoff is None else self._backlog.of(handoff.link)

    def may_push(self, handoff_id: str) -> bool:
        """Whether the link of this hand-off is below its bound; True for one that is over."""
        handoff = self._handoffs.get(handoff_id)
        return handoff is None or not self._backlog.is_full(handoff.link)

    @property
    def total_backlog_bytes(self) -> int:
        """Bytes pushed and not yet written, over all links."""
        return self._backlog.total_bytes

    # ---- the link's writer

    def next_work(self, link: int, now: float) -> Work | None:
        """The next thing to do, hand-off after hand-off; `work_done` or `commit_built` must follow."""
        state = self._links.get(link)
        while state is not None and state.queue:
            handoff = state.queue.popleft()
            handoff.queued = False
            if not handoff.has_work:
                continue
            handoff.writing = True
            run = handoff.next_piece()
            if run is None:
                handoff.commit_taken = True
            else:
                handoff.num_taken = run.num_pages
                if handoff.first_write_at is None:
                    handoff.first_write_at = now
            return Work(handoff, run)
        return None

    def work_done(self, handoff: OutboundHandoff, written: list[PageRun], now: float) -> list[Effect]:
        """The writer has left the local pool; `written` is what it really wrote."""
        handoff.writing = False
        for run in written:
            handoff.mark_written(run, now)
        room = self._count(handoff, -handoff.num_taken)
        handoff.num_taken = 0
        over = handoff.state is HandoffState.ABORTED
        return [*room, *(self._drained(handoff) if over else self._enqueue(handoff))]

    def commit_built(self, handoff: OutboundHandoff, checksums: tuple[int, ...], digest: bytes) -> list[Effect]:
        """The writer has folded the fingerprints: send the commit."""
        handoff.writing = False
        if handoff.state is HandoffState.ABORTED:
            return self._drained(handoff)
        assert handoff.record is not None
        handoff.commit_sent, handoff.digest = True, digest
        record = handoff.record
        pages = handoff.written.count(1)
        return [
            Post(
                handoff.link,
                Commit(handoff.handoff_id, record.num_tokens, record.first_token, checksums, pages),
            )
        ]

    # ---- the peer's side

    def link_added(self, link: int) -> None:
        """A link to a peer is being set up."""
        self._links[link] = _LinkState()

    def link_ready(
        self,
        link: int,
        transport: str,
        now: float,
        *,
        detail: str = "",
        expected: str = "",
        wire: KVCacheLayout | None = None,
        write_bytes: int = USUAL_WRITE_BYTES,
    ) -> list[Effect]:
        """The peer is greeted and its transport chosen: ask for everything that waited.

        `detail` and `expected` are for the receipts. `wire`: the layout of pages on this link, if not the receiver's.
        `write_bytes`: how large its writes should be.
        """
        state = self._links.get(link)
        if state is None:
            return []
        state.transport, state.detail, state.expected, state.wire = transport, detail, expected, wire
        state.write_bytes = write_bytes
        untold, state.untold = state.untold, []
        effects: list[Effect] = [Post(link, m) for handoff, why in untold for m in _late_abort(handoff, why, transport)]
        return effects + [effect for handoff in self._of_link(link) for effect in self._ask(handoff, now)]

    def link_lost(self, link: int, failure: Failure) -> list[Effect]:
        """The link is gone for good: everything on it fails. A hand-off being written drains with `work_done`."""
        self._links.pop(link, None)
        live = [handoff for handoff in self._of_link(link) if handoff.state in LIVE]
        return [effect for handoff in live for effect in self._fail(handoff, failure, tell=False)]

    def handle(self, link: int, message: ReceiverMessage, now: float) -> list[Effect]:
        """What a message from the peer changes. Late, foreign and unexpected ones change nothing."""
        if isinstance(message, Renewed):
            return self._renewed(link, message)
        handoff = self._handoffs.get(message.handoff_id)
        if handoff is None or handoff.link != link:
            # Nothing here writes for it, and the peer may be waiting to hear just that.
            return [Post(link, Fence(message.handoff_id))] if isinstance(message, Opened | Abort) else []
        if handoff.state not in LIVE:
            return []
        if isinstance(message, Opened):
            return self._opened(handoff, message)
        if isinstance(message, Accepted):
            return self._accepted(handoff, now)
        if isinstance(message, Refused):
            return self._refused(handoff, "ticket", message.reason)
        if isinstance(message, Rejected):
            return self._refused(handoff, "commit", message.reason)
        return self._fail(handoff, peer_failure(message.code, message.reason), tell=False)

    # ---- time

    def expire(self, now: float) -> list[Effect]:
        """Renew leases that are due, fail what is past its deadline, break off links that do not answer."""
        effects: list[Effect] = []
        for link, state in self._links.items():
            if state.unanswered_since + self._answer_timeout_s <= now:
                state.unanswered_since = math.inf
                effects.append(CloseLink(link, f"the decode worker has not answered for {self._answer_timeout_s:g} s"))
        due: dict[int, list[str]] = {}
        for handoff in list(self._handoffs.values()):
            if handoff.state not in LIVE:
                continue
            if handoff.deadline <= now:
                failure = Failure("the deadline passed before the hand-off was done", ErrorCode.DEADLINE_EXCEEDED)
                effects += self._fail(handoff, failure, tell=True)
            elif handoff.asked and handoff.renew_at <= now:
                handoff.renew_at = now + self._renew_interval(handoff)
                due.setdefault(handoff.link, []).append(handoff.handoff_id)
        for link, ids in due.items():
            self._links[link].unanswered_since = min(self._links[link].unanswered_since, now)
            for start in range(0, len(ids), MAX_RENEW_IDS):
                effects.append(Post(link, Renew(tuple(ids[start : start + MAX_RENEW_IDS]))))
        return effects

    def next_due(self) -> float | None:
        """When `expire` has something to do next; None when it has not."""
        times = [state.unanswered_since + self._answer_timeout_s for state in self._links.values()]
        live = [handoff for handoff in self._handoffs.values() if handoff.state in LIVE]
        times += [min(handoff.deadline, handoff.renew_at if handoff.asked else math.inf) for handoff in live]
        earliest = min(times, default=math.inf)
        return None if earliest == math.inf else earliest

    # ---- inside

    def _of_link(self, link: int) -> list[OutboundHandoff]:
        return [handoff for handoff in self._handoffs.values() if handoff.link == link]

    def _renew_interval(self, handoff: OutboundHandoff) -> float:
        return min(handoff.lease_s / 3, self._answer_timeout_s)

    def _ask(self, handoff: OutboundHandoff, now: float) -> list[Effect]:
        if handoff.state is not HandoffState.RESERVED or handoff.asked:
            return []
        link = self._links[handoff.link]
        refusal = check_wire(link.wire, handoff.layout) if link.wire is not None else ""
        if refusal:
            return self._fail(
                handoff, Failure(f"the ticket is not for the decode worker's pool: {refusal}"), tell=False
            )
        self._num_opens += 1
        handoff.asked, handoff.number, handoff.write_bytes = True, self._num_opens, link.write_bytes
        handoff.renew_at = now + self._renew_interval(handoff)
        room = self._set_wire(handoff, link.wire or handoff.layout)
        return [*room, Post(handoff.link, _open(handoff, link.transport))]

    def _enqueue(self, handoff: OutboundHandoff) -> list[Effect]:
        if handoff.queued or not handoff.has_work:
            return []
        handoff.queued = True
        self._links[handoff.link].queue.append(handoff)
        return [Wake(handoff.link)]

    def _opened(self, handoff: OutboundHandoff, message: Opened) -> list[Effect]:
        """The answer to another Open is late: that hand-off, by the same ticket, was given up and fenced."""
        if handoff.state is not HandoffState.RESERVED or not handoff.asked or message.number != handoff.number:
            return []
        handoff.state = advance(handoff.state, HandoffState.TRANSFERRING)
        return self._enqueue(handoff)

    def _accepted(self, handoff: OutboundHandoff, now: float) -> list[Effect]:
        if not handoff.commit_sent:
            return []
        handoff.state = advance(handoff.state, HandoffState.COMMITTED)
        link = self._links[handoff.link]
        stats = handoff.stats(link.transport, now, detail=link.detail, expected=link.expected)
        del self._handoffs[handoff.handoff_id]
        return [ReportSent(handoff.handoff_id, stats), ReportDrained(handoff.handoff_id)]

    def _refused(self, handoff: OutboundHandoff, what: str, reason: str) -> list[Effect]:
        why = Failure(f"the decode worker refused the {what}: {reason[:MAX_REASON_CHARACTERS]}")
        return self._fail(handoff, why, tell=False)

    def _renewed(self, link: int, message: Renewed) -> list[Effect]:
        if link in self._links:
            self._links[link].unanswered_since = math.inf
        effects: list[Effect] = []
        for handoff_id in message.unknown:
            handoff = self._handoffs.get(handoff_id)
            if handoff is not None and handoff.link == link and handoff.state in LIVE:
                effects += self._fail(handoff, Failure("the decode worker no longer holds the place"), tell=False)
        return effects

    def _fail(self, handoff: OutboundHandoff, failure: Failure, *, tell: bool) -> list[Effect]:
        handoff.state = advance(handoff.state, HandoffState.ABORTED)
        effects: list[Effect] = [ReportFailed(handoff.handoff_id, failure)]
        effects += self._count(handoff, handoff.num_taken - handoff.num_waiting)
        if tell and handoff.link in self._links:
            if handoff.asked:
                effects.append(Post(handoff.link, Abort(handoff.handoff_id, failure.code, failure.message)))
            elif not self._links[handoff.link].transport:
                self._links[handoff.link].untold.append((handoff, failure))
        return effects if handoff.writing else [*effects, *self._drained(handoff)]

    def _drained(self, handoff: OutboundHandoff) -> list[Effect]:
        del self._handoffs[handoff.handoff_id]
        effects: list[Effect] = []
        if handoff.asked and handoff.link in self._links:
            effects.append(Post(handoff.link, Fence(handoff.handoff_id)))
        return [*effects, ReportDrained(handoff.handoff_id)]

    def _count(self, handoff: OutboundHandoff, num_pages: int) -> list[Effect]:
        """More pages to write, or fewer."""
        handoff.num_waiting += num_pages
        if num_pages and self._backlog.change(handoff.link, num_pages * handoff.wire.page_bytes):
            return [ReportRoom(handoff.link)]
        return []

    def _set_wire(self, handoff: OutboundHandoff, wire: KVCacheLayout) -> list[Effect]:
        """What waited already counts as much as it will be on the wire."""
        change = handoff.num_waiting * (wire.page_bytes - handoff.wire.page_bytes)
        handoff.wire = wire
        return [ReportRoom(handoff.link)] if self._backlog.change(handoff.link, change) else []


def _late_abort(handoff: OutboundHandoff, failure: Failure, transport: str) -> tuple[Open, Abort, Fence]:
    """Tells a peer that holds a place for a hand-off that was given up before it was opened: it need not wait."""
    gives_up = Abort(handoff.handoff_id, failure.code, failure.message)
    return _open(handoff, transport), gives_up, Fence(handoff.handoff_id)


def _open(handoff: OutboundHandoff, transport: str) -> Open:
    ticket = handoff.handoff_id, handoff.attempt, handoff.incarnation, handoff.secret
    return Open(*ticket, transport, handoff.number)

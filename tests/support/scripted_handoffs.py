"""The two ends of a hand-off without any peer: a test decides what happens next, within what the real ones promise.

Both put their events into an inbox that the test hands on, in order, when it likes. Both watch over memory: what a
remote writer may still write nobody else may touch, and what a sender still reads must not change.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from engine.paged_cache import PagedCache
from kv_transfer.events import CommitRecord, Committed, Drained, Failed, Fenced, ReceiveStats, SendStats, Sent
from kvferry_rpc.internal_pb2 import Ticket
from runtime.errors import ErrorCode, KvferryError

_MARK = 12345.0
DIGEST = b"digest"


def _pages(cache: PagedCache, block_id: int) -> Tensor:
    """A copy of K and V of one block in all layers, as bits: what is not a number equals itself."""
    layers = range(cache.layout.num_layers)
    pages = [torch.stack([cache.k(layer)[block_id], cache.v(layer)[block_id]]) for layer in layers]
    return torch.stack(pages).view(torch.int32)


def _fill(cache: PagedCache, block_ids: Sequence[int], value: float) -> None:
    for layer in range(cache.layout.num_layers):
        cache.k(layer)[list(block_ids)] = value
        cache.v(layer)[list(block_ids)] = value


class ScriptedReceiver:
    """Stands for `HandoffReceiver`: a hand-off is live, then committed, or failed and after that fenced."""

    def __init__(self, cache: PagedCache, inbox: "deque[Any]", wrap: Callable[[Any], Any] = lambda e: e) -> None:
        """`wrap` dresses an event for the inbox."""
        self.live: dict[str, Ticket] = {}
        self.failed: dict[str, Ticket] = {}  # not fenced yet: the writer may still write
        self.committed: set[str] = set()
        self.refuse_next: KvferryError | None = None
        self._cache = cache
        self._put = lambda event: inbox.append(wrap(event))
        self._count = 0

    def reserve(
        self, request_id: str, attempt: int, first_block: int, block_ids: Sequence[int], num_tokens: int
    ) -> Ticket:
        refusal, self.refuse_next = self.refuse_next, None
        if refusal is not None:
            raise refusal
        self._count += 1
        ticket = Ticket(
            handoff_id=f"{request_id}/{attempt}/{self._count}",
            attempt=attempt,
            first_block=first_block,
            block_ids=block_ids,
            lease_ms=num_tokens,  # a place to keep it
            layout=self._cache.layout.to_proto(),
        )
        self.live[ticket.handoff_id] = ticket
        _fill(self._cache, block_ids, _MARK)
        return ticket

    def abort(self, handoff_id: str, reason: str) -> bool:
        if handoff_id not in self.live:
            return False
        self.fail(handoff_id, KvferryError(ErrorCode.CANCELLED, reason))
        return True

    def release(self, handoff_id: str) -> None:
        self.committed.discard(handoff_id)

    def check(self) -> None:
        """Nobody but the writer has touched the blocks of a hand-off that is not over."""
        for ticket in (*self.live.values(), *self.failed.values()):
            for block_id in ticket.block_ids:
                assert torch.all(_pages(self._cache, block_id).view(torch.float32) == _MARK), (
                    f"block {block_id} was touched"
                )

    # ---- what the peer does

    def commit(self, handoff_id: str, first_token: bytes, *, num_tokens: int | None = None) -> None:
        self.check()
        ticket = self.live.pop(handoff_id)
        _fill(self._cache, ticket.block_ids, 0.5)
        self.committed.add(handoff_id)
        record = CommitRecord(num_tokens or ticket.lease_ms, first_token)
        stats = ReceiveStats("test", len(ticket.block_ids), 64, None, None, 0.0, 0.0, DIGEST, True)
        self._put(Committed(handoff_id, record, stats))

    def fail(self, handoff_id: str, error: KvferryError) -> None:
        self.failed[handoff_id] = self.live.pop(handoff_id)
        self._put(Failed(handoff_id, error))

    def fence(self, handoff_id: str) -> None:
        self.check()
        del self.failed[handoff_id]
        self._put(Fenced(handoff_id))


@dataclass
class Outgoing:
    """One hand-off of a `ScriptedSender`."""

    ticket: Ticket
    committed: bool = False
    over: bool = False
    pushed: dict[int, Tensor] = field(default_factory=dict)  # local block -> its content once it was pushed whole
    layers: dict[int, set[int]] = field(default_factory=dict)


class ScriptedSender:
    """Stands for `HandoffSender`: Sent or Failed, then Drained. `on_sent` is called as a sender's thread would."""

    def __init__(self, cache: PagedCache, inbox: "deque[Any]", wrap: Callable[[Any], Any] = lambda e: e) -> None:
        """`wrap` dresses an event for the inbox."""
        self.open_handoffs: dict[str, Outgoing] = {}
        self.refuse_next: Exception | None = None
        self.behind: set[str] = set()  # hand-offs whose link has too much to send already
        self.records: dict[str, CommitRecord] = {}
        self.on_sent: Callable[[Sent], None] = lambda event: None
        self.sent_at_once = False
        self._cache = cache
        self._put = lambda event: inbox.append(wrap(event))

    def open(self, ticket: Ticket, num_tokens: int, deadline: float) -> None:
        refusal, self.refuse_next = self.refuse_next, None
        if refusal is not None:
            raise refusal
        if ticket.handoff_id in self.open_handoffs:
            raise ValueError("open already")
        self.open_handoffs[ticket.handoff_id] = Outgoing(ticket)

    def push(self, handoff_id: str, first_block: int, block_ids: Sequence[int], layers: range) -> None:
        outgoing = self.open_handoffs.get(handoff_id)
        if outgoing is None or outgoing.over:
            return
        if outgoing.committed:
            raise ValueError("committed already")
        for block_id in block_ids:
            seen = outgoing.layers.setdefault(block_id, set())
            seen.update(layers)
            if len(seen) == self._cache.layout.num_layers:
                outgoing.pushed[block_id] = _pages(self._cache, block_id)

    def may_push(self, handoff_id: str) -> bool:
        return handoff_id not in self.behind

    def commit(self, handoff_id: str, record: CommitRecord) -> None:
        outgoing = self.open_handoffs.get(handoff_id)
        if outgoing is None or outgoing.over:
            return
        if outgoing.committed:
            raise ValueError("committed already")
        assert len(outgoing.pushed) >= len(outgoing.ticket.block_ids), "committed, but not every block was pushed"
        outgoing.committed = True
        self.records[handoff_id] = record
        if self.sent_at_once:
            self.sent(handoff_id)

    def abort(self, handoff_id: str, reason: str) -> None:
        outgoing = self.open_handoffs.get(handoff_id)
        if outgoing is not None and not outgoing.over:
            self.fail(handoff_id, KvferryError(ErrorCode.CANCELLED, reason))

    def check(self) -> None:
        """What is still read has not changed since it was pushed."""
        for outgoing in self.open_handoffs.values():
            for block_id, content in outgoing.pushed.items():
                assert torch.equal(_pages(self._cache, block_id), content), f"block {block_id} changed under a reader"

    # ---- what the peer and the threads do

    def sent(self, handoff_id: str) -> None:
        """The decode worker has accepted."""
        self.check()
        del self.open_handoffs[handoff_id]
        event = Sent(handoff_id, SendStats("test", 1, 64, 0.0, 0.0, 0.0, DIGEST))
        self.on_sent(event)
        self._put(event)
        self._put(Drained(handoff_id))

    def fail(self, handoff_id: str, error: KvferryError) -> None:
        self.open_handoffs[handoff_id].over = True
        self._put(Failed(handoff_id, error))

    def drain(self, handoff_id: str) -> None:
        """The last reader of a failed hand-off has left the pool."""
        self.check()
        del self.open_handoffs[handoff_id]
        self._put(Drained(handoff_id))

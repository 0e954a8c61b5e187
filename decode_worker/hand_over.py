"""Giving a running answer to another decode worker, with its KV, so that this worker can leave.

1. `PauseRequest`: the sequence stands still after the step at hand. It keeps its blocks, and what it has said is told.
2. The router reserves a place on the other worker and brings the ticket: `HandOverRequest`. The sequence ends here; its
   blocks stay as they are, are pushed, and committed with its last token, whose KV nobody has yet.
3. `Sent`: the other worker has verified the blocks and goes on. The router gets the sender's half of the receipt.
4. `Drained`: nobody reads the blocks any more.
Failure exits: nothing to hand over (ended, preempted, no token yet), a ticket that does not fit: it goes on here.
`ResumeRequest`: no other worker had room, so likewise. The hand-off fails after 2: the router hears `failed` and
continues the answer as after the loss of a worker.
"""

from dataclasses import dataclass

from engine.engine import Engine
from engine.sequence import Sequence
from engine.wire import token_output
from kv_cache.layout import KVCacheLayout
from kv_transfer.events import CommitRecord, Drained, Failed, SendEvent, Sent
from kv_transfer.receipt import sent_half
from kv_transfer.sender import HandoffSender
from kvferry_rpc import internal_pb2
from runtime.errors import ErrorCode, KvferryError


@dataclass(frozen=True, slots=True)
class PauseRequest:
    """A router wants to move this sequence."""

    seq_id: str


@dataclass(frozen=True, slots=True)
class ResumeRequest:
    """It could not: the sequence is to go on here."""

    seq_id: str


@dataclass(frozen=True, slots=True)
class HandOverRequest:
    """The place on the other worker."""

    seq_id: str
    ticket: internal_pb2.Ticket


class HandOvers:
    """The sequences that stand still or leave. Every method belongs to the engine's owner thread."""

    def __init__(self, engine: Engine, sender: HandoffSender, layout: KVCacheLayout) -> None:
        self.paused: set[str] = set()  # Names of sequences that no step may touch.
        self._engine = engine
        self._sender = sender
        self._layers = range(layout.num_layers)
        self._quarantines: dict[str, int] = {}  # by hand-off, until Drained

    def __len__(self) -> int:
        """Hand-offs whose blocks are still read."""
        return len(self._quarantines)

    def __contains__(self, handoff_id: str) -> bool:
        """Whether this hand-off is one of these."""
        return handoff_id in self._quarantines

    def pause(self, seq: Sequence) -> KvferryError | None:
        """Let it stand still; or say why that would lead to nothing."""
        if not self._engine.can_hand_over(seq):
            return KvferryError(ErrorCode.HANDOFF_FAILED, "the sequence has no token yet, or no blocks")
        self.paused.add(seq.seq_id)
        return None

    def resume(self, seq_id: str) -> None:
        """It may be computed again, or is over. Idempotent."""
        self.paused.discard(seq_id)

    def begin(self, seq: Sequence, ticket: internal_pb2.Ticket, deadline: float) -> KvferryError | None:
        """Send it away: it is not of this engine any more. Or the reason why it goes on here instead."""
        is_paused = seq.seq_id in self.paused
        self.resume(seq.seq_id)
        if not is_paused or not self._engine.can_hand_over(seq):
            return KvferryError(ErrorCode.HANDOFF_FAILED, "the sequence does not stand still with all its blocks")
        handoff_id = ticket.handoff_id
        try:
            self._sender.open(ticket, seq.num_computed_tokens, deadline)
        except (KvferryError, ValueError) as error:
            return KvferryError(ErrorCode.HANDOFF_FAILED, f"its ticket is of no use: {error}")
        last = token_output(seq.num_output_tokens - 1, seq.samples[-1])
        left = self._engine.hand_over(seq)
        self._quarantines[handoff_id] = left.quarantine_id
        first = ticket.first_block
        self._sender.push(handoff_id, first, left.block_table[first:], self._layers)
        self._sender.commit(handoff_id, CommitRecord(seq.num_computed_tokens, last.SerializeToString()))
        return None

    def handle(self, event: SendEvent) -> internal_pb2.PrefillDone | KvferryError | None:
        """News of the sender: how one of these hand-offs ended, or None when it only left the pool."""
        match event:
            case Sent():
                return sent_half(event.stats)
            case Failed():
                return event.error
            case Drained():
                self._engine.release_quarantine(self._quarantines.pop(event.handoff_id))
        return None

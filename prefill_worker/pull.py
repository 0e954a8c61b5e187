"""Taking KV from a decode worker instead of computing it: the beginning of a prompt that only its cache still holds.

1. `begin`: room for the missing blocks, a place at the receiver, and a ticket that the router carries to the source.
2. The source writes the blocks and commits. `Committed`: they are verified and named, and join the prefix cache, where
   the request finds them as it finds any cached prefix.
Failure exits: no room, the source is silent, has evicted a block or died, a block does not verify, the request was
cancelled. The request is then computed as if nobody had tried; the blocks stay held until `Fenced`.
"""

import itertools
import logging
from dataclasses import dataclass
from enum import Enum

from engine.engine import Engine
from engine.prefix_holds import HeldPrefix
from engine.sequence import Sequence
from kv_transfer.events import Committed, Failed, Fenced, ReceiveEvent
from kv_transfer.receiver import HandoffReceiver
from kvferry_rpc import internal_pb2
from runtime.clock import Clock
from runtime.errors import KvferryError

# A request waits for its pull for so long, and for its bytes as long as a slow network takes; never beyond half of the
# time it has left.
PATIENCE_S = 2.0
_SLOWEST_BYTES_PER_S = 200e6
# A source that kept one request waiting in vain is not asked again for so long.
_SHUNNED_S = 30.0

_log = logging.getLogger(__name__)


class PullState(Enum):
    """OPEN: the request waits. KEPT: the blocks are in the prefix cache. GIVEN_UP: nothing came of it."""

    OPEN = "open"
    KEPT = "kept"
    GIVEN_UP = "given up"


@dataclass(slots=True)
class Pull:
    """One attempt to get the beginning of one prompt. Changed by its `Puller` alone."""

    ticket: internal_pb2.Ticket
    hold: str
    held: HeldPrefix
    source: str
    started_at: float
    expires_at: float
    request_id: str = ""
    state: PullState = PullState.OPEN
    ended_at: float | None = None

    @property
    def log_extra(self) -> dict[str, str]:
        """For log lines about it."""
        return {"request_id": self.request_id}

    @property
    def is_open(self) -> bool:
        """Whether the request should wait for it."""
        return self.state is PullState.OPEN

    @property
    def took_ms(self) -> float:
        """From asking to the end; 0 before it."""
        return 0.0 if self.ended_at is None else (self.ended_at - self.started_at) * 1e3

    def tokens_found(self, num_cached_tokens: int) -> int:
        """How many of the tokens that a sequence found cached had come by this pull."""
        if self.state is not PullState.KEPT:
            return 0
        size = len(self.held.token_ids) // len(self.held.block_table)
        return max(0, min(num_cached_tokens, len(self.held.token_ids)) - self.held.cached_blocks * size)


class Puller:
    """The pulls of one prefill worker. Every method belongs to the engine's owner thread."""

    def __init__(
        self,
        engine: Engine,
        receiver: HandoffReceiver,
        block_bytes: int,
        clock: Clock,
        *,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._engine = engine
        self._receiver = receiver
        self._block_size = engine.block_manager.block_size
        self._block_bytes = block_bytes
        self._clock = clock
        self._patience_s = patience_s
        self._pulls: dict[str, Pull] = {}  # by hand-off, for as long as it holds blocks
        self._shunned_until: dict[str, float] = {}
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        """Pulls that hold blocks: open, or given up and not fenced yet."""
        return len(self._pulls)

    def begin(self, seq: Sequence, source: internal_pb2.KVSource, deadline: float, request_id: str = "") -> Pull | None:
        """Ask for what `source` has of the prompt of a WAITING sequence beyond what is cached here.

        The pull's ticket is for the source; `request_id` is for log lines. None = nothing to get, no room, or it
        was silent lately.
        """
        now = self._clock.now()
        end = min(source.num_tokens, seq.num_tokens - 1) // self._block_size * self._block_size
        if end == 0 or self._shunned_until.get(source.decode_worker, now) > now or not self._engine.has_room_for_queue:
            return None
        hold = f"pull/{next(self._numbers)}/{seq.seq_id}"  # the same ticket may come again before the last fence
        held = self._engine.prefix_holds.reserve(hold, seq.token_ids[:end], seq.cache_salt)
        if held is None:
            return None
        first = held.cached_blocks
        missing = held.block_table[first:]
        try:
            ticket = self._receiver.reserve(hold, 1, first, missing, end)
        except KvferryError as error:
            extra = {"request_id": request_id}
            _log.info("nothing is pulled from %s: %s", source.decode_worker, error.message, extra=extra)
            self._engine.prefix_holds.release(hold)
            return None
        patience_s = self._patience_s + len(missing) * self._block_bytes / _SLOWEST_BYTES_PER_S
        expires_at = now + min(patience_s, (deadline - now) / 2)
        pull = Pull(ticket, hold, held, source.decode_worker, now, expires_at, request_id)
        self._pulls[ticket.handoff_id] = pull
        return pull

    def handle(self, event: ReceiveEvent) -> None:
        """News of the receiver."""
        pull = self._pulls[event.handoff_id]
        match event:
            case Committed():
                self._on_committed(pull, event)
            case Failed():
                self._end(pull, PullState.GIVEN_UP)
                _log.info("the pull from %s failed: %s", pull.source, event.error.message, extra=pull.log_extra)
            case Fenced():
                del self._pulls[event.handoff_id]
                self._engine.prefix_holds.release(pull.hold)

    def give_up(self, pull: Pull) -> None:
        """Nobody waits for it any more. Idempotent; blocks that are verified already are kept all the same."""
        if pull.is_open:
            self._receiver.abort(pull.ticket.handoff_id, "nobody waits for these blocks any more")

    def tick(self, now: float) -> None:
        """Give up what takes too long."""
        for pull in list(self._pulls.values()):
            if pull.is_open and now >= pull.expires_at:
                _log.warning("%s has not sent its KV blocks in time: computing them", pull.source, extra=pull.log_extra)
                self._shun(pull.source, now)
                self.give_up(pull)

    def _on_committed(self, pull: Pull, event: Committed) -> None:
        self._receiver.release(event.handoff_id)
        del self._pulls[event.handoff_id]
        # The bytes are what the source had in its pool; the name says for which tokens, and for whose.
        if event.record.first_token == pull.held.content_name:
            self._engine.prefix_holds.keep(pull.hold)
            self._end(pull, PullState.KEPT)
        else:
            _log.error("%s sent the KV blocks of another text: not used", pull.source, extra=pull.log_extra)
            self._engine.prefix_holds.release(pull.hold)
            self._end(pull, PullState.GIVEN_UP)

    def _end(self, pull: Pull, state: PullState) -> None:
        pull.state, pull.ended_at = state, self._clock.now()

    def _shun(self, source: str, now: float) -> None:
        self._shunned_until = {worker: until for worker, until in self._shunned_until.items() if until > now}
        self._shunned_until[source] = now + _SHUNNED_S

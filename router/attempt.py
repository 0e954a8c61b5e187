"""One attempt of one request on one pair of workers.

1. Admit on the decode worker; it answers with a ticket (remote prefill) or with tokens (local prefill).
2. With the ticket, Prefill on the prefill worker. From here both workers speak at once, through one inbox. If the plan
   names a source, the prefill worker may answer with a ticket of its own: it is carried to that decode worker, and
   the rest is between the two.
3. The decode worker says that it has verified the KV, and goes on alone.
4. Tokens are given out in order of their index, whichever worker brought them first. With strict hand-off not before
   both halves of the receipt are there and prove it, so that what they refute never begins an answer.
5. Decode is done, or the reader has enough: wait a moment for what is missing of the receipt.

Failure exits, all through `__aexit__`, which never leaves a worker computing for nobody:
* either worker refuses or fails, or is lost: AttemptFailed says which; the dispatcher decides what comes next.
  Once the decode worker has the KV it needs the prefill worker no more, so only its own failure counts.
* strict hand-off is not proven: StrictRefusal, which nobody tries again.
* the deadline passes: KvferryError (DEADLINE_EXCEEDED).
* the caller goes away, at any point, also before the ticket came: Cancel to the decode worker, the prefill call cut.
"""

import asyncio
import logging
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

import grpc

from kvferry_rpc.common_pb2 import ErrorCode, TokenOutput
from kvferry_rpc.internal_pb2 import Admit, Export, KVSource, PrefillRequest, Ticket
from router.decode_session import DecodeSession
from router.generation import GenerationRequest
from router.inbox import Inbox
from router.placement import Placement, Side
from router.proof import HandoffRules, check_so_far, lacks_decode_half, lacks_prefill_half
from router.receipts import AttemptRecord
from runtime.clock import Clock
from runtime.errors import KvferryError

if TYPE_CHECKING:  # The asyncio face of the stub exists for type checkers alone.
    from kvferry_rpc.internal_pb2_grpc import PrefillWorkerAsyncStub

# How long a finished answer, or the first token of a strict one, waits for what is missing of its receipt.
RECEIPT_WAIT_S = 1.0
# The workers end a request at its deadline themselves; the call's own limit is only for workers that do not.
_CALL_GRACE_S = 5.0
_MAX_MS = 2**32 - 1

_log = logging.getLogger(__name__)


class AttemptFailed(Exception):
    """The attempt cannot go on. Tokens given out before stay valid."""

    def __init__(self, error: KvferryError, side: Side) -> None:
        super().__init__(error.message)
        self.error = error
        self.side = side


@dataclass(frozen=True, slots=True)
class Work:
    """What this attempt is to do: a request, continued after `output` tokens that earlier attempts brought."""

    request: GenerationRequest
    attempt: int
    output: tuple[int, ...]
    arrived_at: float


class Attempt:
    """Use as `async with attempt:`, call `next_batch` until it is None, then `finish`. Event-loop task only."""

    def __init__(
        self,
        work: Work,
        placement: Placement,
        session: DecodeSession | None,
        prefill_stub: "PrefillWorkerAsyncStub | None",
        source: DecodeSession | None,
        clock: Clock,
        on_taken: Callable[[], None],
        rules: HandoffRules,
    ) -> None:
        """`session` or `prefill_stub` None: that worker went away; the attempt fails when it comes to it. `source` is
        the session with the worker that the plan has as its source, if any; without it nothing is pulled.

        `on_taken` is called once, when the decode worker has taken the request.
        """
        self._work = work
        self._placement = placement
        self._session = session
        self._prefill_stub = prefill_stub
        self._source = source
        self._clock = clock
        self._on_taken = on_taken
        self._rules = rules
        self._inbox = Inbox(len(work.output), clock)
        self._proven = not rules.strict
        self._prefill_task: asyncio.Task[None] | None = None
        self._admitted = False
        self._was_taken = False
        self._closing = False
        self._placed_at: float | None = None
        self._first_token_at: float | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Telling the workers waits for nothing, so no second cancellation can come between.
        self._closing = True
        if self._session is not None and self._admitted:
            self._session.cancel(self._work.request.request_id, self._work.attempt)
        try:
            if self._prefill_task is not None:
                self._prefill_task.cancel()
                await asyncio.gather(self._prefill_task, return_exceptions=True)
        finally:
            failure = self._inbox.decode_failure
            if failure is not None and failure.code == ErrorCode.OVERLOADED:
                self._placement.refused_by(Side.DECODE)
            self._placement.release()

    @property
    def was_taken(self) -> bool:
        """Whether the decode worker took the request, so that something may have been computed for it."""
        return self._was_taken

    async def next_batch(self) -> tuple[TokenOutput, ...] | None:
        """The next tokens, at least one, merged when the caller is slow. None when decode is done.

        Raises AttemptFailed; KvferryError for the deadline and for what strict hand-off refuses (StrictRefusal).
        """
        if not self._admitted:
            await self._admit()
        inbox = self._inbox
        while True:
            if not self._was_taken and (inbox.ticket is not None or inbox.decode_started):
                self._was_taken = True
                self._on_taken()
            if inbox.ticket is not None and self._prefill_task is None:
                self._start_prefill(inbox.ticket)
            proven = self._is_proven()
            if proven and (batch := inbox.take_tokens()):
                if self._first_token_at is None:
                    self._first_token_at = self._clock.now()
                    self._placement.prompt_computed()
                return batch
            if inbox.decode_failure is not None:
                raise AttemptFailed(inbox.decode_failure, Side.DECODE)
            if proven and inbox.decode_done is not None:
                if inbox.has_gap:
                    raise AttemptFailed(KvferryError(ErrorCode.INTERNAL, "a token is missing"), Side.DECODE)
                return None
            if inbox.prefill_failure is not None and not inbox.decode_started:
                raise AttemptFailed(inbox.prefill_failure, Side.PREFILL)
            await self._wait()

    async def finish(self) -> AttemptRecord:
        """When enough tokens are out: the record of the attempt, with what is missing if it comes within a second."""
        wait_s = min(RECEIPT_WAIT_S, self._work.request.deadline - self._clock.now())
        if self._prefill_task is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, wait_s)):
                    while self._inbox.lacks_a_half:
                        await self._inbox.wait()
        if self._inbox.prefill_failure is not None:
            _log.warning("no prefill half of the receipt: %s", self._inbox.prefill_failure.message)
        return self.record()

    def record(self) -> AttemptRecord:
        """What is known of the attempt now."""
        return AttemptRecord(
            attempt=self._work.attempt,
            plan=self._placement.plan,
            handoff_id=self._inbox.ticket.handoff_id if self._inbox.ticket else "",
            prefill_done=self._inbox.prefill_done,
            decode_done=self._inbox.decode_done,
            placed_ms=self._since_arrival_ms(self._placed_at),
            first_token_ms=self._since_arrival_ms(self._first_token_at),
            verified=self._inbox.verified,
            verified_ms=self._since_arrival_ms(self._inbox.verified_at),
            ended_ms=self._since_arrival_ms(self._clock.now()),
        )

    # ---- inside ----

    async def _admit(self) -> None:
        if self._session is None:
            message = f"decode worker {self._placement.plan.decode_worker} is gone"
            raise AttemptFailed(KvferryError(ErrorCode.UNAVAILABLE, message), Side.DECODE)
        work = self._work
        admit = Admit(
            request_id=work.request.request_id,
            attempt=work.attempt,
            prompt_token_ids=(*work.request.prompt_token_ids, *work.output),
            num_output_tokens=len(work.output),
            sampling=work.request.sampling,
            cache_salt=work.request.cache_salt,
            local_prefill=self._placement.plan.prefill_worker is None,
            deadline_ms=self._remaining_ms(),
        )
        try:
            async with asyncio.timeout(self._remaining_s()):
                await self._session.admit(admit, self._inbox)
        except TimeoutError:
            raise _deadline_exceeded() from None
        except KvferryError as error:
            self._inbox.put_decode_failure(error)
            raise AttemptFailed(error, Side.DECODE) from error
        self._admitted = True
        if admit.local_prefill:
            self._placed_at = self._clock.now()

    def _start_prefill(self, ticket: Ticket) -> None:
        self._placed_at = self._clock.now()
        self._prefill_task = asyncio.create_task(self._prefill(ticket), name=f"prefill {ticket.handoff_id}")

    async def _prefill(self, ticket: Ticket) -> None:
        """Run the prefill call into the inbox. Ends without an exception but for its own cancellation."""
        worker_id = self._placement.plan.prefill_worker
        if self._prefill_stub is None:
            self._prefill_failed(f"prefill worker {worker_id} is gone")
            return
        work = self._work
        request = PrefillRequest(
            request_id=work.request.request_id,
            attempt=work.attempt,
            prompt_token_ids=(*work.request.prompt_token_ids, *work.output),
            num_output_tokens=len(work.output),
            sampling=work.request.sampling,
            cache_salt=work.request.cache_salt,
            ticket=ticket,
            deadline_ms=self._remaining_ms(),
        )
        source = self._placement.plan.source
        if source is not None and self._source is not None:
            request.source.CopyFrom(KVSource(decode_worker=source.worker_id, num_tokens=source.num_tokens))
        call = self._prefill_stub.Prefill(request, timeout=self._remaining_s() + _CALL_GRACE_S)
        try:
            async for event in call:
                if event.WhichOneof("kind") == "pull":
                    self._export(event.pull)
                else:
                    self._inbox.put_prefill(event)
            self._prefill_failed(f"prefill worker {worker_id} ended its stream without a result")
        except grpc.RpcError as error:
            self._inbox.put_prefill_failure(_lost(error, f"prefill worker {worker_id}"))
        except asyncio.CancelledError:
            # Either this attempt is being closed, or the channel was closed below us because the worker detached.
            if self._closing:
                raise
            self._prefill_failed(f"prefill worker {worker_id} is gone")
        finally:
            call.cancel()
            failure = self._inbox.prefill_failure
            if failure is not None and failure.code == ErrorCode.OVERLOADED:
                self._placement.refused_by(Side.PREFILL)
            self._placement.release_prefill()

    def _export(self, ticket: Ticket) -> None:
        """Ask the source, once, for the blocks that the prefill worker wants. What becomes of it they settle alone."""
        source, self._source = self._source, None
        work = self._work
        tokens = (*work.request.prompt_token_ids, *work.output)
        num_tokens = (ticket.first_block + len(ticket.block_ids)) * ticket.layout.block_size
        if source is None or num_tokens > len(tokens):
            return
        export = Export(
            request_id=work.request.request_id,
            attempt=work.attempt,
            prompt_token_ids=tokens[:num_tokens],
            cache_salt=work.request.cache_salt,
            ticket=ticket,
            deadline_ms=self._remaining_ms(),
        )
        source.export(export)

    def _prefill_failed(self, message: str) -> None:
        self._inbox.put_prefill_failure(KvferryError(ErrorCode.UNAVAILABLE, message))

    def _is_proven(self) -> bool:
        """Whether tokens may be given out. Raises StrictRefusal."""
        if self._proven:
            return True
        inbox, record = self._inbox, self.record()
        check_so_far(self._rules, record)
        if inbox.verified is None:
            if inbox.decode_started:
                raise lacks_decode_half(record, "it went on without a word about what it received")
            return False
        if inbox.prefill_done is None:
            if inbox.prefill_failure is not None:
                raise lacks_prefill_half(record, inbox.prefill_failure.message)
            if self._patience_s() <= 0:
                raise lacks_prefill_half(record, f"it did not report within {RECEIPT_WAIT_S:g} s")
            return False
        self._proven = True
        return True

    def _patience_s(self) -> float:
        """How much longer the prefill half may take, once the decode worker has verified what came."""
        if self._proven or self._inbox.verified_at is None:
            return math.inf
        return self._inbox.verified_at + RECEIPT_WAIT_S - self._clock.now()

    async def _wait(self) -> None:
        """Until something comes, or patience ends. Raises KvferryError for the deadline."""
        remaining_s, patience_s = self._remaining_s(), self._patience_s()
        try:
            async with asyncio.timeout(min(remaining_s, patience_s)):
                await self._inbox.wait()
        except TimeoutError:
            if remaining_s <= patience_s:
                raise _deadline_exceeded() from None

    def _remaining_s(self) -> float:
        """What is left of the request's time. Raises KvferryError (DEADLINE_EXCEEDED) when nothing is."""
        remaining_s = self._work.request.deadline - self._clock.now()
        if remaining_s <= 0:
            raise _deadline_exceeded()
        return remaining_s

    def _remaining_ms(self) -> int:
        return min(_MAX_MS, max(1, int(self._remaining_s() * 1000)))

    def _since_arrival_ms(self, moment: float | None) -> float | None:
        return None if moment is None else (moment - self._work.arrived_at) * 1000


def _deadline_exceeded() -> KvferryError:
    return KvferryError(ErrorCode.DEADLINE_EXCEEDED, "the request's deadline passed")


def _lost(error: grpc.RpcError, peer: str) -> KvferryError:
    """What a broken prefill call means. Refusals that a worker makes come as events; a call that ends with a status
    is a worker that is down, shutting down or not ours, and another may do better."""
    known = KvferryError.from_rpc(error, peer)
    if known.code in (ErrorCode.OVERLOADED, ErrorCode.INVALID_REQUEST, ErrorCode.DEADLINE_EXCEEDED):
        return known
    return KvferryError(ErrorCode.UNAVAILABLE, known.message)

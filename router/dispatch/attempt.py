"""One attempt of one request on one pair of workers.

1. Admit on the decode worker; it answers with a ticket (remote prefill) or with tokens (local prefill).
2. The ticket goes to who has the KV sent: a prefill worker (`prefill_call.py`), or the decode worker that the answer
   leaves (`course.py`). From here both workers speak at once, through one inbox.
3. The decode worker says that it has verified the KV, and goes on alone. It may be paused, to hand the answer over.
4. Tokens are given out in order of their index, whichever worker brought them first; with strict hand-off, once it is
   proven (`strict_gate.py`).
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
from enum import Enum
from types import TracebackType
from typing import Self

from kvferry_rpc.common_pb2 import ErrorCode, PromptTokenLogprob, TokenOutput
from kvferry_rpc.internal_pb2 import Admit, HandOver, PrefillEvent, Ticket
from router.dispatch import strict_gate
from router.dispatch.decode_session import DecodeSession
from router.dispatch.inbox import Inbox
from router.dispatch.placement import Placement, Side
from router.dispatch.prefill_call import KVSender
from router.dispatch.proof import HandoffRules
from router.dispatch.receipts import AttemptRecord
from router.dispatch.strict_gate import StrictGate
from router.dispatch.work import Work, deadline_exceeded
from router.observation.live_requests import Progress
from router.policy import Plan
from runtime.clock import Clock
from runtime.errors import KvferryError
from runtime.telemetry import describe_defect

_log = logging.getLogger(__name__)


Give = Callable[[tuple[TokenOutput, ...]], bool]
"""Takes the next tokens of an answer, at least one. False: it has no room for more. Waits for nothing, never raises."""


class Halt(Enum):
    """Why tokens flow no more."""

    FULL = "full"  # There is no room for them.
    STANDS_STILL = "stands still"  # All are out that there are before the worker is told to `resume`.
    DONE = "done"


class AttemptFailed(Exception):
    """The attempt cannot go on. Tokens given out before stay valid."""

    def __init__(self, error: KvferryError, side: Side) -> None:
        super().__init__(error.message)
        self.error = error
        self.side = side


class Attempt:
    """Use as `async with attempt:`, call `flow` until it is DONE, then `finish`. Event-loop task only."""

    def __init__(
        self,
        work: Work,
        placement: Placement,
        session: DecodeSession | None,
        send: KVSender | None,
        clock: Clock,
        on_taken: Callable[[], None],
        rules: HandoffRules,
    ) -> None:
        """`session` None: that worker went away; the attempt fails when it comes to it. `send` None: the plan is to
        compute the prompt on the decode worker.

        `on_taken` is called once, when the decode worker has taken the request.
        """
        self._work = work
        self._placement = placement
        self._session = session
        self._send = send
        self._clock = clock
        self._on_taken: Callable[[], None] | None = on_taken
        self._inbox = Inbox(work.num_output_tokens, clock, work.first_token_id, work.num_prompt_logprobs)
        self._gate = StrictGate(rules, self._inbox, clock)
        self._send_task: asyncio.Task[None] | None = None
        self._admitted = False
        self._was_taken = False
        self._give: Give | None = None  # While tokens flow.
        self._is_full = False  # It said so behind the back of the task that awaits `flow`.
        self._planned_at = clock.now()
        self._placed_at: float | None = None
        self._first_token_at: float | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._is_late = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        # It leads to whoever runs this, and that one here: together they would wait for the collector.
        self._on_taken = None
        # Telling the workers waits for nothing, so no second cancellation can come between.
        if self._session is not None and self._admitted:
            self._session.cancel(self._work.request.request_id, self._work.attempt)
        try:
            if self._send_task is not None:
                self._send_task.cancel()
                await asyncio.gather(self._send_task, return_exceptions=True)
        finally:
            failure = self._inbox.decode_failure
            if failure is not None and failure.code == ErrorCode.OVERLOADED:
                self._placement.refused_by(Side.DECODE)
            self._placement.release()

    @property
    def was_taken(self) -> bool:
        """Whether the decode worker took the request, so that something may have been computed for it."""
        return self._was_taken

    @property
    def plan(self) -> Plan:
        """Where it runs."""
        return self._placement.plan

    async def flow(self, give: Give) -> Halt:
        """Give out tokens through `give` as they come, merged where it had no room for a while, and return why they
        stop.

        Up to the first ones this task does it; what comes behind them goes through in the call that brought it.

        Raises AttemptFailed; KvferryError for the deadline and for what strict hand-off refuses (StrictRefusal).
        """
        if not self._admitted:
            await self._admit()
        inbox, self._give = self._inbox, give
        try:
            while (halt := self._advance()) is None:
                if self._gate.is_open and self._first_token_at is not None:
                    inbox.on_tokens = self._on_tokens
                await self._wait()
        finally:
            inbox.on_tokens = self._give = None
        return halt

    def _advance(self) -> Halt | None:
        """Act on what was heard. None: more has to be heard first. Raises as `flow`."""
        inbox = self._inbox
        if self._on_taken is not None and (inbox.ticket is not None or inbox.decode_started):
            on_taken, self._on_taken, self._was_taken = self._on_taken, None, True
            on_taken()
        if inbox.ticket is not None and self._send_task is None:
            self._start_sending(inbox.ticket)
        is_open = self._gate.is_open or self._gate.try_to_open(self.record())
        if self._is_full or (is_open and not self._give_out()):
            self._is_full = False
            return Halt.FULL
        if inbox.decode_failure is not None:
            raise AttemptFailed(inbox.decode_failure, Side.DECODE)
        if inbox.handed_over is not None:
            message = f"decode worker {self.plan.decode_worker} has handed the answer over to one that was lost"
            raise AttemptFailed(KvferryError(ErrorCode.UNAVAILABLE, message), Side.DECODE)
        if inbox.lacks_prompt_logprobs:
            self._check_prompt_logprobs()
        elif is_open and inbox.decode_done is not None:
            if inbox.has_gap:
                raise AttemptFailed(KvferryError(ErrorCode.INTERNAL, "a token is missing"), Side.DECODE)
            return Halt.DONE
        if inbox.prefill_failure is not None and not inbox.decode_started:
            raise AttemptFailed(inbox.prefill_failure, Side.PREFILL)
        return Halt.STANDS_STILL if inbox.is_paused else None

    def _give_out(self) -> bool:
        """Give out what is there. False: there is no room for more."""
        give = self._give
        if give is None or not (batch := self._inbox.take_tokens()):
            return True
        if self._first_token_at is None:
            self._first_token_at = self._clock.now()
            self._placement.prompt_computed()
        return give(batch)

    def _on_tokens(self) -> None:
        """The decode worker has sent tokens: this is the session's task."""
        if not self._give_out():
            self._is_full = True
            self._inbox.on_tokens = None
            self._inbox.wake()

    def take_prompt_logprobs(self) -> tuple[PromptTokenLogprob, ...]:
        """Those of the whole prompt, if the request wants them; once, with the first batch."""
        return self._inbox.take_prompt_logprobs()

    def _check_prompt_logprobs(self) -> None:
        """Only the worker that computes the prompt has them: without it the attempt fails, whoever has the KV."""
        inbox = self._inbox
        if inbox.prefill_failure is not None:
            raise AttemptFailed(inbox.prefill_failure, Side.PREFILL)
        if inbox.lost_prompt_logprobs:
            side = Side.DECODE if inbox.prefill_done is None else Side.PREFILL
            raise AttemptFailed(KvferryError(ErrorCode.INTERNAL, "log probabilities of the prompt are missing"), side)

    # ---- the answer leaves for another decode worker ----

    @property
    def may_pause(self) -> bool:
        """Whether `pause` can lead to anything now: the decode worker runs alone, and there is a token."""
        inbox = self._inbox
        is_alone = self._send_task is None or self._send_task.done()
        is_over = inbox.decode_done is not None or inbox.decode_failure is not None
        return self._first_token_at is not None and inbox.decode_started and is_alone and not is_over

    def pause(self) -> None:
        """Ask the decode worker to let the sequence stand still. It may refuse, or be done before it hears of it."""
        assert self._session is not None, "it runs there"
        self._inbox.refusal_to_pause = None
        self._session.pause(self._work.request.request_id, self._work.attempt)

    @property
    def refused_to_pause(self) -> bool:
        """Whether the worker has answered the last `pause` with no."""
        return self._inbox.refusal_to_pause is not None

    def resume(self) -> None:
        """Let the sequence go on where it is; if it has left already, `flow` says so."""
        assert self._session is not None, "it runs there"
        self._inbox.is_paused = False
        self._session.resume(self._work.request.request_id, self._work.attempt)

    async def hand_over(self, ticket: Ticket, taker: Inbox) -> None:
        """A KVSender: the answer, which stands still, leaves this decode worker for the place that the ticket names."""
        assert self._session is not None, "it runs there"
        request_id, attempt, inbox = self._work.request.request_id, self._work.attempt, self._inbox
        self._session.hand_over(HandOver(request_id=request_id, attempt=attempt, ticket=ticket))
        while inbox.is_paused and inbox.handed_over is None and inbox.decode_failure is None:
            await inbox.wait()
        if inbox.handed_over is not None:
            self._placement.release()
            taker.put_prefill(PrefillEvent(done=inbox.handed_over))
        else:
            failure = inbox.decode_failure or inbox.refusal_to_pause
            taker.put_prefill_failure(failure or KvferryError(ErrorCode.UNAVAILABLE, "the answer was not handed over"))

    async def finish(self) -> AttemptRecord:
        """When enough tokens are out: the record of the attempt, with what is missing if it comes within a second."""
        wait_s = min(strict_gate.RECEIPT_WAIT_S, self._work.request.deadline - self._clock.now())
        if self._send_task is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, wait_s)):
                    while self._inbox.lacks_a_half:
                        await self._inbox.wait()
        if self._inbox.prefill_failure is not None:
            _log.warning("no prefill half of the receipt: %s", self._inbox.prefill_failure.log_text)
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

    def progress(self) -> Progress:
        """How far it has come, for those who look on."""
        inbox = self._inbox
        return Progress(
            attempt=self._work.attempt,
            plan=self._placement.plan,
            planned_at=self._planned_at,
            moves=self._work.moves,
            was_taken=self._was_taken,
            placed_at=self._placed_at,
            sampled_at=inbox.sampled_at,
            decoding_at=inbox.decode_started_at,
            is_paused=inbox.is_paused,
            has_unread_tokens=inbox.has_tokens and self._gate.is_open,
            is_over=inbox.decode_done is not None,
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
            prompt_token_ids=work.token_ids,
            num_output_tokens=work.num_output_tokens,
            sampling=work.request.sampling,
            cache_salt=work.request.cache_salt,
            local_prefill=self._send is None,
            deadline_ms=work.remaining_ms(self._clock.now()),
            traceparent=work.traceparent,
        )
        # A timer only where there is a wait.
        time_s = None if self._session.is_settled else self._remaining_s()
        try:
            async with asyncio.timeout(time_s):
                await self._session.admit(admit, self._inbox)
        except TimeoutError:
            raise deadline_exceeded() from None
        except KvferryError as error:
            self._inbox.put_decode_failure(error)
            raise AttemptFailed(error, Side.DECODE) from error
        self._admitted = True
        if admit.local_prefill:
            self._placed_at = self._clock.now()

    def _start_sending(self, ticket: Ticket) -> None:
        assert self._send is not None, "a ticket was asked for"
        self._placed_at = self._clock.now()
        sending = self._send(ticket, self._inbox)
        self._send_task = asyncio.create_task(sending, name=f"send into {ticket.handoff_id}")
        self._send_task.add_done_callback(self._sending_ended)

    def _sending_ended(self, task: asyncio.Task[None]) -> None:
        """A defect there must not leave the attempt waiting for news that nobody sends."""
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("the call for the KV ended in an unexpected %s", describe_defect(error))
            kind = type(error).__name__
            self._inbox.put_prefill_failure(KvferryError(ErrorCode.UNAVAILABLE, f"the call for the KV failed: {kind}"))

    async def _wait(self) -> None:
        """Until something comes, or patience ends. Raises KvferryError for the deadline."""
        remaining_s, patience_s = self._remaining_s(), self._gate.patience_s()
        if self._alarm is None:
            # One for the whole attempt: it waits for each token, and a timer for each wait costs more than the wait.
            self._alarm = asyncio.get_running_loop().call_later(remaining_s, self._on_deadline)
        if patience_s == math.inf:
            await self._inbox.wait()
        else:
            with suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await self._inbox.wait()
        if self._is_late:
            raise deadline_exceeded()

    def _on_deadline(self) -> None:
        self._is_late = True
        self._inbox.wake()

    def _remaining_s(self) -> float:
        return self._work.remaining_s(self._clock.now())

    def _since_arrival_ms(self, moment: float | None) -> float | None:
        return None if moment is None else (moment - self._work.arrived_at) * 1000

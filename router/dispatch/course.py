"""The way of an answer over decode workers that leave: an attempt, and those that it moves to without a break.

1. The decode worker drains, and the prompt's hand-off is over: it is asked to let the sequence stand still.
2. It does, and every token that it had is given out. Another decode worker with the same kind of blocks is chosen; it
   admits the answer as a new attempt, and its ticket goes to the worker that drains, which sends the KV as a prefill
   worker would: the same fences, comparisons and strict proofs.
3. The new worker has verified the KV: the answer goes on there. Nothing was computed again.
Failure exits: no other worker has room, or it fails or is silent before the KV is on its way: the answer goes on where
it is, and another move is tried a moment later. The KV is lost on its way, or the worker that drains: the attempt has
failed, and the dispatcher makes another from the tokens. More moves than `MAX_MOVES` at once: wait for a place.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Protocol, Self

from kvferry_rpc.common_pb2 import PromptTokenLogprob, TokenOutput
from kvferry_rpc.internal_pb2 import DecodeDone
from router.dispatch.attempt import Attempt, AttemptFailed, Give, Halt
from router.dispatch.receipts import AttemptRecord, Move
from router.observation.live_requests import Progress
from router.policy import Plan
from runtime.clock import Clock

MAX_MOVES = 8
"""Answers of one router that stand still at the same time, so that none waits for the bytes of all the others."""

PATIENCE_S = 10.0
"""An answer stands still for so long at most, beyond what its last tokens take to arrive."""

_TRY_AGAIN_AFTER_S = 0.5


class Moves:
    """How many answers move now, and what became of the others. Event-loop thread only."""

    def __init__(self, clock: Clock, is_leaving: Callable[[str], bool], count: Callable[[str], None]) -> None:
        """`is_leaving`: whether a worker drains. `count` is told each outcome: `moved`, `stayed` or `failed`."""
        self.now = clock.now
        self.is_leaving = is_leaving
        self.count = count
        self.under_way = 0


class Successor(Protocol):
    """Where to go on; called when the attempt stands still and all its tokens were given out."""

    def __call__(self, leaving: Attempt) -> Attempt | None:
        """An attempt on another worker that `leaving` hands the answer over to; None = there is no room."""
        ...


class Course:
    """Used as its attempt would be: `async with`, `flow` until DONE, `finish`. Event-loop task only."""

    def __init__(self, attempt: Attempt, moves: Moves, successor: Successor) -> None:
        self._current = attempt
        self._moves = moves
        self._successor = successor
        self._give: Give | None = None
        self._left: list[tuple[Attempt, Move]] = []
        self._is_moving = False
        self._try_at = 0.0
        self._num_tokens = 0

    async def __aenter__(self) -> Self:
        await self._current.__aenter__()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop_moving()
        # They lead to whoever runs this, and that one here: together they would wait for the collector.
        self._give, self._successor = None, _nowhere
        try:
            await self._current.__aexit__(exc_type, exc, traceback)
        finally:
            for attempt, _ in self._left:
                await attempt.__aexit__(exc_type, exc, traceback)

    @property
    def plan(self) -> Plan:
        """Where it is now."""
        return self._current.plan

    @property
    def was_taken(self) -> bool:
        """Whether something may have been computed for it."""
        return bool(self._left) or self._current.was_taken

    @property
    def brought_tokens(self) -> bool:
        """Whether any token was given out on this course."""
        return self._num_tokens > 0

    async def flow(self, give: Give) -> Halt:
        """Give out tokens as `Attempt.flow` does, whichever worker has the answer: FULL, or DONE. Raises as that."""
        self._give = give
        halt: Halt | None = None
        while halt is None:
            self._look_for_a_move()
            halt = await self._current.flow(self._hand_on)
            if halt is Halt.STANDS_STILL:
                halt = await self._move()
        return halt

    def take_prompt_logprobs(self) -> tuple[PromptTokenLogprob, ...]:
        """As `Attempt.take_prompt_logprobs`: an answer moves only after its first batch."""
        return self._current.take_prompt_logprobs()

    async def finish(self) -> AttemptRecord:
        """As `Attempt.finish`: one record of the whole course."""
        return self._whole(await self._current.finish())

    def record(self) -> AttemptRecord:
        """What is known now."""
        return self._whole(self._current.record())

    def progress(self) -> list[Progress]:
        """See `live_requests.Attempting`."""
        return [*(attempt.progress() for attempt, _ in self._left), self._current.progress()]

    # ---- inside ----

    def _hand_on(self, batch: tuple[TokenOutput, ...]) -> bool:
        self._num_tokens += len(batch)
        assert self._give is not None, "tokens flow"
        has_room = self._give(batch)
        if has_room:
            # Not for a reader that is slow: an answer would stand still for it, in the place of others.
            self._look_for_a_move()
        return has_room

    def _look_for_a_move(self) -> None:
        """Ask the worker to pause, if the answer should leave it and may."""
        moves, current = self._moves, self._current
        if self._is_moving:
            if current.refused_to_pause:
                self._stay()
            return
        if not moves.is_leaving(current.plan.decode_worker) or not current.may_pause:
            return
        if moves.under_way < MAX_MOVES and moves.now() >= self._try_at:
            self._is_moving = True
            moves.under_way += 1
            current.pause()

    async def _move(self) -> Halt | None:
        """Go on elsewhere, or here: the first tokens from there are handed on. None: `flow` again. Raises as `flow`."""
        leaving, paused_at = self._current, self._moves.now()
        successor = self._successor(leaving)
        if successor is None:
            leaving.resume()
            self._stay()
            return None
        first: list[tuple[TokenOutput, ...]] = []

        def keep(batch: tuple[TokenOutput, ...]) -> bool:
            first.append(batch)
            return False

        try:
            async with asyncio.timeout(PATIENCE_S):
                halt = await successor.flow(keep)
        except (AttemptFailed, TimeoutError):
            await successor.__aexit__(None, None, None)
            # Without effect on one that has left, whose end `flow` finds out then.
            leaving.resume()
            self._stay("failed")
            return None
        except BaseException as error:
            await successor.__aexit__(type(error), error, error.__traceback__)
            raise
        pause_ms = (self._moves.now() - paused_at) * 1000
        self._left.append((leaving, Move(successor.record(), self._num_tokens, pause_ms)))
        self._current = successor
        self._stop_moving()
        self._moves.count("moved")
        if halt is Halt.FULL:  # Of the first batch.
            return None if self._hand_on(first[0]) else Halt.FULL
        return halt if halt is Halt.DONE else None

    def _stay(self, outcome: str = "stayed") -> None:
        self._stop_moving()
        self._try_at = self._moves.now() + _TRY_AGAIN_AFTER_S
        self._moves.count(outcome)

    def _stop_moving(self) -> None:
        if self._is_moving:
            self._is_moving = False
            self._moves.under_way -= 1

    def _whole(self, last: AttemptRecord) -> AttemptRecord:
        """The hand-off of the prompt from the first record, the end from the last one, and the moves between them."""
        if not self._left:
            return last
        first = self._left[0][0].record()
        attempts = [*(attempt for attempt, _ in self._left[1:]), self._current]
        moves = [
            replace(move, record=attempt.record()) for (_, move), attempt in zip(self._left, attempts, strict=True)
        ]
        return replace(
            first,
            attempt=last.attempt,
            decode_done=_joined(first, last),
            ended_ms=last.ended_ms,
            moves=tuple(moves),
        )


def _nowhere(leaving: Attempt) -> Attempt | None:
    return None


def _joined(first: AttemptRecord, last: AttemptRecord) -> DecodeDone | None:
    """The end of the last worker, with what the first one had received; None when there is no end."""
    if last.decode_done is None:
        return None
    done = DecodeDone(
        reason=last.decode_done.reason,
        tokens_recomputed=last.decode_done.tokens_recomputed,
        preempted_tokens=last.decode_done.preempted_tokens,
    )
    if first.verified is not None:
        done.cached_tokens = first.verified.cached_tokens
        done.checksum_verified = first.verified.checksum_verified
        done.checksum = first.verified.checksum
        done.commit_ms = first.verified.commit_ms
    begun_ms = first.verified_ms if first.verified_ms is not None else first.first_token_ms
    if begun_ms is not None and last.ended_ms is not None:
        done.decode_ms = max(0.0, last.ended_ms - begun_ms)
    return done

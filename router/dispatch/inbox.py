"""What one attempt of one request has heard from its two workers, and not yet acted on.

Writers never wait: tokens pile up at most to the request's max_tokens, and a slow reader finds them merged. Both sides
may speak in any order; the first failure of each side stays.
"""

import asyncio
from collections.abc import Callable, Iterable

from kvferry_rpc.common_pb2 import Error, ErrorCode, PromptTokenLogprob, TokenOutput
from kvferry_rpc.internal_pb2 import (
    DecodeDone,
    DecodeEvent,
    HandoffVerified,
    PrefillDone,
    PrefillEvent,
    PromptLogprobs,
    Ticket,
)
from runtime.clock import Clock
from runtime.errors import KvferryError


class Inbox:
    """Single reader, any number of writers, all on the event-loop thread.

    `base_index` is the index of the first token this attempt may bring. Tokens come out of `take_tokens` once each and
    in order, whoever sent them first: token `base_index` normally comes from both workers.
    """

    def __init__(
        self, base_index: int, clock: Clock, first_token_id: int | None = None, num_prompt_logprobs: int = 0
    ) -> None:
        """`first_token_id`: the token at `base_index`, where it was given out before; it is only compared then.
        `num_prompt_logprobs`: so many positions of the prompt must have come before a token comes out."""
        self.ticket: Ticket | None = None
        self.prefill_done: PrefillDone | None = None
        self.prefill_failure: KvferryError | None = None
        self.decode_done: DecodeDone | None = None
        self.decode_failure: KvferryError | None = None
        self.verified: HandoffVerified | None = None
        self.verified_at: float | None = None  # On `clock`, in seconds.
        self.sampled_at: float | None = None  # When the worker that sends the KV told the first token.
        self.decode_started_at: float | None = None
        self.is_paused = False  # The sequence stands still: no token comes.
        self.refusal_to_pause: KvferryError | None = None  # It goes on instead, for this reason.
        self.handed_over: PrefillDone | None = None  # The sequence is another decode worker's.
        self.decode_started = False  # The decode worker has the prompt's KV, or sent a token: it needs nobody else.
        self._clock = clock
        self._base_index = base_index
        self._next_index = base_index if first_token_id is None else base_index + 1
        self._first_token_id = first_token_id
        self._pending: dict[int, TokenOutput] = {}
        self._prompt_logprobs: list[PromptTokenLogprob] = []
        self._num_prompt_logprobs = num_prompt_logprobs
        self._has_news = False
        self._reader: asyncio.Future[None] | None = None
        # Called for tokens of the decode worker, in place of waking the reader: who sets it takes them in that call.
        self.on_tokens: Callable[[], None] | None = None

    # ---- writers ----

    def put_decode(self, event: DecodeEvent) -> None:
        """Take one event of the decode session."""
        kind = event.WhichOneof("kind")
        if kind == "tokens":
            self._decode_has_begun()
            self._add(event.tokens.tokens)
            if self.on_tokens is not None:
                self.on_tokens()
                return
        elif kind == "prompt_logprobs":
            self._add_prompt_logprobs(event.prompt_logprobs)
        elif kind == "ticket":
            self.ticket = event.ticket
        elif kind == "verified":
            self._decode_has_begun()
            self.verified, self.verified_at = event.verified, self._clock.now()
        elif kind == "done":
            self.decode_done = event.done
        elif kind == "failed":
            self.put_decode_failure(_worker_failure(event.failed))
        elif kind == "paused":
            self.is_paused = True
        elif kind == "resumed":
            self.is_paused, self.refusal_to_pause = False, _worker_failure(event.resumed)
        elif kind == "handed_over":
            self.handed_over = event.handed_over
        self.wake()

    def put_decode_failure(self, error: KvferryError) -> None:
        """The decode side refused, failed or was lost. The first failure stays."""
        self.decode_failure = self.decode_failure or error
        self.wake()

    def put_prefill(self, event: PrefillEvent) -> None:
        """Take one event of the prefill call."""
        kind = event.WhichOneof("kind")
        if kind == "first_token":
            self.sampled_at = self._clock.now()
            self._add((event.first_token,))
        elif kind == "prompt_logprobs":
            self._add_prompt_logprobs(event.prompt_logprobs)
        elif kind == "done":
            self.prefill_done = event.done
        elif kind == "error":
            self.put_prefill_failure(_worker_failure(event.error))
        self.wake()

    def put_prefill_failure(self, error: KvferryError) -> None:
        """The prefill side refused, failed or was lost. The first failure stays; after `done` it means nothing."""
        if self.prefill_done is None:
            self.prefill_failure = self.prefill_failure or error
            self.wake()

    # ---- the reader ----

    def take_tokens(self) -> tuple[TokenOutput, ...]:
        """The tokens that continue what was taken before; empty when the next one has not arrived, or the prompt's log
        probabilities, which come before it, have not."""
        batch: list[TokenOutput] = []
        if self.lacks_prompt_logprobs:
            return ()
        while (token := self._pending.pop(self._next_index, None)) is not None:
            batch.append(token)
            self._next_index += 1
        return tuple(batch)

    def take_prompt_logprobs(self) -> tuple[PromptTokenLogprob, ...]:
        """Those of the whole prompt, once, as soon as tokens come out."""
        taken = tuple(self._prompt_logprobs)
        self._prompt_logprobs.clear()
        self._num_prompt_logprobs = 0
        return taken

    @property
    def has_tokens(self) -> bool:
        """Whether tokens lie here."""
        return bool(self._pending)

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether log probabilities of the prompt are still to come."""
        return len(self._prompt_logprobs) < self._num_prompt_logprobs

    @property
    def lost_prompt_logprobs(self) -> bool:
        """Whether some are missing although the worker that had to send them is done."""
        sender_is_done = self.prefill_done is not None or (self.ticket is None and self.decode_done is not None)
        return self.lacks_prompt_logprobs and sender_is_done

    @property
    def has_gap(self) -> bool:
        """Whether tokens are held back because an earlier one is missing."""
        return bool(self._pending) and self._next_index not in self._pending

    @property
    def lacks_a_half(self) -> bool:
        """Whether a worker may still say what belongs on the receipt of a hand-off."""
        prefill_may = self.prefill_done is None and self.prefill_failure is None
        decode_may = self.verified is None and self.decode_done is None and self.decode_failure is None
        return prefill_may or decode_may

    async def wait(self) -> None:
        """Return when something was put, or `wake` called, since the last `wait` returned. The caller sees to its
        deadline."""
        if not self._has_news:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        self._has_news = False

    def _decode_has_begun(self) -> None:
        if not self.decode_started:
            self.decode_started, self.decode_started_at = True, self._clock.now()

    def wake(self) -> None:
        """Let `wait` return."""
        self._has_news = True
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _add(self, tokens: Iterable[TokenOutput]) -> None:
        for token in tokens:
            if token.index == self._base_index:
                self._check_same_first(token)
            if token.index >= self._next_index:
                self._pending.setdefault(token.index, token)

    def _add_prompt_logprobs(self, message: PromptLogprobs) -> None:
        """They come in order, from one worker; more than were asked for would have no end."""
        room = self._num_prompt_logprobs - len(self._prompt_logprobs)
        self._prompt_logprobs.extend(message.tokens[:room])

    def _check_same_first(self, token: TokenOutput) -> None:
        """Both workers name the first token. If they differ, the rest of the answer hangs on another text."""
        self._first_token_id = token.token_id if self._first_token_id is None else self._first_token_id
        if token.token_id != self._first_token_id:
            message = f"the workers disagree on the first token: {self._first_token_id} and {token.token_id}"
            self.put_decode_failure(KvferryError(ErrorCode.INTERNAL, message))


def _worker_failure(error: Error) -> KvferryError:
    """What a worker's error means to the request. It was not cancelled by its caller, nor is the caller's secret at
    fault, if a worker says so while the request is alive: that worker cannot serve it, another might."""
    failure = KvferryError.from_proto(error)
    if failure.code in (ErrorCode.CANCELLED, ErrorCode.UNAUTHENTICATED):
        return KvferryError(ErrorCode.UNAVAILABLE, failure.message)
    return failure

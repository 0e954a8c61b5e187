"""What one attempt of one request has heard from its two workers, and not yet acted on.

Writers never wait: tokens pile up at most to the request's max_tokens, and a slow reader finds them merged. Both sides
may speak in any order; the first failure of each side stays.
"""

import asyncio
from collections.abc import Iterable

from kvferry_rpc.common_pb2 import Error, ErrorCode, TokenOutput
from kvferry_rpc.internal_pb2 import DecodeDone, DecodeEvent, HandoffVerified, PrefillDone, PrefillEvent, Ticket
from runtime.clock import Clock
from runtime.errors import KvferryError


class Inbox:
    """Single reader, any number of writers, all on the event-loop thread.

    `base_index` is the index of the first token this attempt may bring. Tokens come out of `take_tokens` once each and
    in order, whoever sent them first: token `base_index` normally comes from both workers.
    """

    def __init__(self, base_index: int, clock: Clock) -> None:
        self.ticket: Ticket | None = None
        self.prefill_done: PrefillDone | None = None
        self.prefill_failure: KvferryError | None = None
        self.decode_done: DecodeDone | None = None
        self.decode_failure: KvferryError | None = None
        self.verified: HandoffVerified | None = None
        self.verified_at: float | None = None  # On `clock`, in seconds.
        self.decode_started = False  # The decode worker has the prompt's KV, or sent a token: it needs nobody else.
        self._clock = clock
        self._base_index = base_index
        self._next_index = base_index
        self._first_token_id: int | None = None
        self._pending: dict[int, TokenOutput] = {}
        self._changed = asyncio.Event()

    # ---- writers ----

    def put_decode(self, event: DecodeEvent) -> None:
        """Take one event of the decode session."""
        kind = event.WhichOneof("kind")
        if kind == "tokens":
            self.decode_started = True
            self._add(event.tokens.tokens)
        elif kind == "ticket":
            self.ticket = event.ticket
        elif kind == "verified":
            self.decode_started = True
            self.verified, self.verified_at = event.verified, self._clock.now()
        elif kind == "done":
            self.decode_done = event.done
        elif kind == "failed":
            self.put_decode_failure(_worker_failure(event.failed))
        self._changed.set()

    def put_decode_failure(self, error: KvferryError) -> None:
        """The decode side refused, failed or was lost. The first failure stays."""
        self.decode_failure = self.decode_failure or error
        self._changed.set()

    def put_prefill(self, event: PrefillEvent) -> None:
        """Take one event of the prefill call."""
        kind = event.WhichOneof("kind")
        if kind == "first_token":
            self._add((event.first_token,))
        elif kind == "done":
            self.prefill_done = event.done
        elif kind == "error":
            self.put_prefill_failure(_worker_failure(event.error))
        self._changed.set()

    def put_prefill_failure(self, error: KvferryError) -> None:
        """The prefill side refused, failed or was lost. The first failure stays; after `done` it means nothing."""
        if self.prefill_done is None:
            self.prefill_failure = self.prefill_failure or error
            self._changed.set()

    # ---- the reader ----

    def take_tokens(self) -> tuple[TokenOutput, ...]:
        """The tokens that continue what was taken before; empty when the next one has not arrived."""
        batch = []
        while (token := self._pending.pop(self._next_index, None)) is not None:
            batch.append(token)
            self._next_index += 1
        return tuple(batch)

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
        """Return when something was put since the last `wait` returned. The caller sets the deadline."""
        await self._changed.wait()
        self._changed.clear()

    def _add(self, tokens: Iterable[TokenOutput]) -> None:
        for token in tokens:
            if token.index == self._base_index:
                self._check_same_first(token)
            if token.index >= self._next_index:
                self._pending.setdefault(token.index, token)

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

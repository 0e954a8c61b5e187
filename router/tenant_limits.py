"""What each tenant may have under way and spend, and the token source that holds to it.

A sequence is charged for its prompt and all it may generate before it begins, and gets back what it did not use when it
ends. A bucket may go below zero: a sequence larger than a minute's tokens begins when the bucket is full, and whoever
comes after it waits for so much longer.
"""

import math
from collections.abc import Callable

from kvferry_rpc.common_pb2 import ErrorCode
from router.generation import GenerationRequest, Sink, TokenBatch, TokenEnd, TokenSource
from router.tenants import Tenant, TenantDirectory
from runtime.clock import Clock
from runtime.errors import KvferryError

RETRY_AFTER_MS = 1000
_MINUTE_S = 60.0
# The client's own doing, and by then the prompt may have been computed.
_CHARGED = (ErrorCode.DEADLINE_EXCEEDED, ErrorCode.CANCELLED)


class TokenBucket:
    """Tokens that may be spent: `per_minute` of them come in a minute, and at most so many lie there. Pure.

    The rate is passed in each time, since it may change. Times are in seconds on a monotonic clock.
    """

    def __init__(self, per_minute: int, now: float) -> None:
        """It starts full."""
        self._level = float(per_minute)
        self._filled_at = now

    def wait_s(self, tokens: int, per_minute: int, now: float) -> float:
        """How long until `tokens` may be taken; 0 = now. More than a full bucket has may be taken from a full one."""
        self._fill(per_minute, now)
        missing = min(tokens, per_minute) - self._level
        return max(0.0, missing * _MINUTE_S / per_minute)

    def take(self, tokens: int) -> None:
        """Take them, below zero if need be."""
        self._level -= tokens

    def give_back(self, tokens: int, per_minute: int, now: float) -> None:
        """Put back what was taken and not used."""
        self._fill(per_minute, now)
        self._level = min(self._level + tokens, float(per_minute))

    def is_full(self, per_minute: int, now: float) -> bool:
        """Whether it is as good as a new one."""
        return self.wait_s(per_minute, per_minute, now) <= 0.0

    def _fill(self, per_minute: int, now: float) -> None:
        gained = max(0.0, now - self._filled_at) * per_minute / _MINUTE_S
        self._level = min(self._level + gained, float(per_minute))
        self._filled_at = now


class TenantLimiter:
    """What each tenant has under way. Pure: time is passed in. One thread."""

    def __init__(self) -> None:
        self._uses: dict[str, _Use] = {}

    def begin(self, tenant: Tenant, prompt_tokens: int, max_tokens: int, now: float) -> "Hold":
        """Charge a sequence and count it in, until the hold ends. Raises KvferryError (OVERLOADED) with the time after
        which another try is worth it."""
        use = self._uses.get(tenant.name) or _Use()
        _check_counts(tenant, use, prompt_tokens)
        cost, rate = prompt_tokens + max_tokens, tenant.max_tokens_per_minute
        if rate is not None:
            use.bucket = use.bucket or TokenBucket(rate, now)
            wait_s = use.bucket.wait_s(cost, rate, now)
            if wait_s > 0:
                message = f"The limit of {rate} tokens a minute is reached; {cost} more may be had in {wait_s:.0f} s."
                raise KvferryError(ErrorCode.OVERLOADED, message, retry_after_ms=math.ceil(wait_s * 1000))
            use.bucket.take(cost)
        self._uses[tenant.name] = use
        use.in_flight += 1
        use.queued_tokens += prompt_tokens
        return Hold(self, tenant, prompt_tokens, cost)

    def in_flight(self, name: str) -> int:
        """Sequences of a tenant that have begun and not ended; only limited tenants are counted."""
        return self._uses[name].in_flight if name in self._uses else 0

    def queued_tokens(self, name: str) -> int:
        """Prompt tokens of those that have not begun to answer."""
        return self._uses[name].queued_tokens if name in self._uses else 0

    def _answers(self, hold: "Hold") -> None:
        self._uses[hold.tenant.name].queued_tokens -= hold.prompt_tokens

    def _ended(self, hold: "Hold", used_tokens: int, now: float) -> None:
        name, rate = hold.tenant.name, hold.tenant.max_tokens_per_minute
        use = self._uses[name]
        use.in_flight -= 1
        if rate is not None and use.bucket is not None:
            use.bucket.give_back(max(0, hold.cost - used_tokens), rate, now)
        # A tenant that is at rest is as good as unknown, so names that have left the file are forgotten.
        if not use.in_flight and (rate is None or use.bucket is None or use.bucket.is_full(rate, now)):
            del self._uses[name]


class Hold:
    """One sequence that is counted in. Its owner ends it, exactly once."""

    def __init__(self, limiter: TenantLimiter, tenant: Tenant, prompt_tokens: int, cost: int) -> None:
        self.tenant = tenant
        self.prompt_tokens = prompt_tokens
        self.cost = cost
        self._limiter = limiter
        self._waits = True
        self._open = True

    def answers(self) -> None:
        """It has begun to answer, and waits no more. Idempotent."""
        if self._waits:
            self._waits = False
            self._limiter._answers(self)

    def end(self, used_tokens: int, now: float) -> None:
        """Count it out; what it did not use goes back. Idempotent."""
        if self._open:
            self.answers()
            self._open = False
            self._limiter._ended(self, used_tokens, now)


class MeteredSource:
    """A token source in which every tenant keeps to its limits. Event-loop thread only."""

    def __init__(
        self,
        source: TokenSource,
        tenants: TenantDirectory,
        clock: Clock,
        refused: Callable[[KvferryError], None],
    ) -> None:
        """`refused` hears of each request that `source` has not seen, since nobody else counts it."""
        self._source = source
        self._tenants = tenants
        self._clock = clock
        self._refused = refused
        self.limiter = TenantLimiter()

    async def run(self, request: GenerationRequest, sink: Sink[TokenBatch]) -> TokenEnd:
        """See `TokenSource.run`. Raises KvferryError (OVERLOADED) for a tenant at its limit as well."""
        tenant = self._tenants.find(request.tenant)
        if tenant is None or not tenant.is_limited:
            # A tenant that left the file a moment ago was let in by then.
            return await self._source.run(request, sink)
        prompt_tokens = len(request.prompt_token_ids)
        try:
            hold = self.limiter.begin(tenant, prompt_tokens, request.sampling.max_tokens, self._clock.now())
        except KvferryError as error:
            self._refused(error)
            raise
        counted = _Counted(sink, hold)
        try:
            return await self._source.run(request, counted)
        except KvferryError as error:
            # What failed before it gave anything costs nothing; a client that leaves pays for its prompt.
            if not counted.num_tokens and error.code not in _CHARGED:
                prompt_tokens = 0
            raise
        finally:
            hold.end(prompt_tokens + counted.num_tokens, self._clock.now())


class _Counted:
    """A sink that counts what goes through it to another one."""

    def __init__(self, sink: Sink[TokenBatch], hold: Hold) -> None:
        self.num_tokens = 0
        self._hold = hold
        self._sink = sink

    def push(self, batch: TokenBatch) -> bool:
        self._hold.answers()
        self.num_tokens += len(batch.tokens)
        return self._sink.push(batch)

    async def wants_more(self) -> bool:
        return await self._sink.wants_more()


class _Use:
    """What one tenant has under way."""

    __slots__ = ("bucket", "in_flight", "queued_tokens")

    def __init__(self) -> None:
        self.in_flight = 0
        self.queued_tokens = 0
        self.bucket: TokenBucket | None = None


def _check_counts(tenant: Tenant, use: _Use, prompt_tokens: int) -> None:
    if tenant.max_in_flight is not None and use.in_flight >= tenant.max_in_flight:
        message = f"The limit of {tenant.max_in_flight} requests at a time is reached."
        raise KvferryError(ErrorCode.OVERLOADED, message, retry_after_ms=RETRY_AFTER_MS)
    limit = tenant.max_queued_tokens
    # What is larger than the limit by itself is let through when nothing else waits: it must not fail for ever.
    if limit is not None and use.queued_tokens and use.queued_tokens + prompt_tokens > limit:
        message = f"The limit of {limit} prompt tokens that wait is reached."
        raise KvferryError(ErrorCode.OVERLOADED, message, retry_after_ms=RETRY_AFTER_MS)

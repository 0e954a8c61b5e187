"""Whose turn it is: requests of several tenants that wait, shared out fairly. Pure: no clock, no I/O, no randomness.

**Between tenants**: deficit round-robin on tokens (Shreedhar and Varghese, 1995). A tenant in the ring gets a quantum,
times its weight, each round, and its next request goes when the tenant has saved up what the request costs. While two
tenants have requests waiting, what they were served, each by its weight, differs by at most a quantum and a largest
request of each. A tenant that has as many requests out as it may is passed over and saves nothing.

**Within a tenant**: by priority, higher first, then by arrival. Tokens served to anybody make up for priority
(`AGING_TOKENS` a level), so a request is passed only by those that come before
`AGING_TOKENS x (their priority - its own)` more tokens were served: nobody starves, whatever comes.

**A request that does not fit** anywhere now keeps its turn, and so that a large one does not block the small ones of
other tenants, those may pass it, for as many tokens in all as it has itself. What they take they owe: it comes off
their deficit.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

# What a tenant of weight 1 may take each round: a few short requests.
QUANTUM_TOKENS = 2048
# Tokens served that make up for one level of priority.
AGING_TOKENS = 2048
_SMALLEST_HEAP_TO_SWEEP = 64


@dataclass(frozen=True, slots=True)
class TenantShare:
    """What one tenant may have. `weight`: its share beside others that wait too, above 0. None: only the bounds over
    all tenants hold."""

    weight: float = 1.0
    max_queued_tokens: int | None = None
    max_in_flight: int | None = None


TenantShares = Callable[[str], TenantShare]


def equal_shares(tenant: str) -> TenantShare:
    """The same for everybody."""
    return TenantShare()


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """Most requests and most tokens that wait, of all tenants together."""

    max_requests: int
    max_tokens: int


class Excess(Enum):
    """Which bound one more request would break."""

    REQUESTS = "queue_full"
    TOKENS = "queue_tokens"
    TENANT_TOKENS = "tenant_tokens"


@dataclass(slots=True, eq=False)
class Waiting:
    """One request of the queue, made by `FairQueue.push`. `cost`: tokens of its prompt and of the answer expected."""

    tenant: str
    priority: int
    cost: int
    key: tuple[int, int]
    queued: bool = True


@dataclass(slots=True, eq=False)
class _Tenant:
    name: str
    share: TenantShare
    quantum: int
    heap: list[tuple[tuple[int, int], Waiting]] = field(default_factory=list)  # Some of them have left already.
    num_waiting: int = 0
    tokens_waiting: int = 0
    running: int = 0
    deficit: int = 0
    credited: bool = False  # In this visit of the round.

    @property
    def may_run(self) -> bool:
        return self.share.max_in_flight is None or self.running < self.share.max_in_flight

    def head(self) -> Waiting:
        """The request that is next within this tenant, which has one."""
        while not self.heap[0][1].queued:
            heapq.heappop(self.heap)
        return self.heap[0][1]


class FairQueue:
    """Waiting requests, and how many of each tenant are out. Single-threaded."""

    def __init__(self, bounds: QueueBounds, share_of: TenantShares = equal_shares) -> None:
        self._bounds = bounds
        self._share_of = share_of
        self._tenants: dict[str, _Tenant] = {}
        self._ring: OrderedDict[str, _Tenant] = OrderedDict()  # Those with requests waiting; the first one's visit.
        self._numbers = 0
        self._num_waiting = 0
        self._tokens = 0
        self._served = 0  # Tokens ever let out, also in vain.
        self._held: Waiting | None = None
        self._passed = 0  # Tokens that have passed the held one.

    def __len__(self) -> int:
        return self._num_waiting

    @property
    def tokens(self) -> int:
        """Cost of all that wait, in tokens."""
        return self._tokens

    def push(self, tenant: str, priority: int, cost: int) -> Waiting:
        """Let a request wait. The bounds are the caller's to ask for: `excess`."""
        self._numbers += 1
        key = (self._served - priority * AGING_TOKENS, self._numbers)
        waiting = Waiting(tenant, priority, max(1, cost), key)
        self._insert(self._tenant(tenant), waiting)
        return waiting

    def excess(self, waiting: Waiting) -> Excess | None:
        """Which bound is broken with this request in the queue; None while all hold."""
        tenant = self._tenants[waiting.tenant]
        if self._num_waiting > self._bounds.max_requests:
            return Excess.REQUESTS
        if self._tokens > self._bounds.max_tokens:
            return Excess.TOKENS
        limit = tenant.share.max_queued_tokens
        if limit is not None and tenant.tokens_waiting > limit:
            return Excess.TENANT_TOKENS
        return None

    def pop(self, fits: Callable[[Waiting], bool]) -> Waiting | None:
        """Let out the request whose turn it is, if `fits` says that there is room for it; else one that may pass it.

        None: nobody may go now. The request counts among those of its tenant that are out until `finished` or
        `put_back`.
        """
        held = self._held
        if held is None:
            tenant = self._next_tenant()
            if tenant is None:
                return None
            held = tenant.head()
            if fits(held):
                return self._let_out(tenant, held)
            self._held, self._passed = held, 0
        elif (tenant := self._tenants[held.tenant]).may_run and fits(held):
            return self._let_out(tenant, held)
        return self._pass(held, fits)

    def remove(self, waiting: Waiting) -> None:
        """The request waits no more. Idempotent; O(1), and now and then a sweep of what has left."""
        if not waiting.queued:
            return
        waiting.queued = False
        tenant = self._tenants[waiting.tenant]
        tenant.num_waiting -= 1
        tenant.tokens_waiting -= waiting.cost
        self._num_waiting -= 1
        self._tokens -= waiting.cost
        if self._held is waiting:
            self._held = None
        if not tenant.num_waiting:
            tenant.heap.clear()
            tenant.deficit, tenant.credited = min(0, tenant.deficit), False
            del self._ring[tenant.name]
            self._forget(tenant)
        elif len(tenant.heap) > max(_SMALLEST_HEAP_TO_SWEEP, 2 * tenant.num_waiting):
            tenant.heap = [entry for entry in tenant.heap if entry[1].queued]
            heapq.heapify(tenant.heap)

    def put_back(self, waiting: Waiting) -> None:
        """A request that was let out in vain waits again, in its old place, and its tenant gets its tokens back."""
        tenant = self._tenants[waiting.tenant]
        tenant.running -= 1
        tenant.deficit += waiting.cost
        waiting.queued = True
        self._insert(tenant, waiting)

    def finished(self, waiting: Waiting) -> None:
        """A request that was let out is over: its tenant has one less out."""
        tenant = self._tenants[waiting.tenant]
        tenant.running -= 1
        self._forget(tenant)

    def tokens_ahead(self, waiting: Waiting) -> int:
        """About how many tokens will be let out before this request: those before it within its tenant, and what the
        other tenants are due meanwhile. Linear in the tenant's requests; later arrivals are not foreseen."""
        own = self._tenants[waiting.tenant]
        before = sum(w.cost for key, w in own.heap if w.queued and key < waiting.key)
        due = (before + waiting.cost) / own.share.weight
        rivals = [tenant for tenant in self._ring.values() if tenant is not own]
        return before + sum(min(rival.tokens_waiting, int(due * rival.share.weight)) for rival in rivals)

    # ---- inside ----

    def _tenant(self, name: str) -> _Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            share = self._share_of(name)
            tenant = _Tenant(name, share, max(1, round(QUANTUM_TOKENS * share.weight)))
            self._tenants[name] = tenant
        return tenant

    def _forget(self, tenant: _Tenant) -> None:
        if not tenant.num_waiting and not tenant.running:
            del self._tenants[tenant.name]

    def _insert(self, tenant: _Tenant, waiting: Waiting) -> None:
        heapq.heappush(tenant.heap, (waiting.key, waiting))
        tenant.num_waiting += 1
        tenant.tokens_waiting += waiting.cost
        self._num_waiting += 1
        self._tokens += waiting.cost
        self._ring.setdefault(tenant.name, tenant)

    def _next_tenant(self) -> _Tenant | None:
        """The tenant whose next request can be paid for. None when none waits, or all that wait have too many out."""
        able = [tenant for tenant in self._ring.values() if tenant.may_run]
        missed = 0
        while able:
            tenant = next(iter(self._ring.values()))
            if tenant.may_run:
                if not tenant.credited:
                    tenant.deficit += tenant.quantum
                    tenant.credited = True
                if tenant.deficit >= tenant.head().cost:
                    return tenant
                missed += 1
            tenant.credited = False
            self._ring.move_to_end(tenant.name)
            if missed == len(able):
                _skip_vain_rounds(able)
                missed = 0
        return None

    def _pass(self, held: Waiting, fits: Callable[[Waiting], bool]) -> Waiting | None:
        for tenant in self._ring.values():
            head = tenant.head()
            if head is held or not tenant.may_run or self._passed + head.cost > held.cost:
                continue
            if fits(head):
                self._passed += head.cost
                return self._let_out(tenant, head)
        return None

    def _let_out(self, tenant: _Tenant, waiting: Waiting) -> Waiting:
        tenant.running += 1
        tenant.deficit -= waiting.cost
        self._served += waiting.cost
        self.remove(waiting)
        return waiting


def _skip_vain_rounds(able: list[_Tenant]) -> None:
    """Give everybody, at once, all the rounds in which nobody could pay: a large request costs no more time."""
    rounds = min(-(-(tenant.head().cost - tenant.deficit) // tenant.quantum) for tenant in able) - 1
    for tenant in able:
        tenant.deficit += max(0, rounds) * tenant.quantum

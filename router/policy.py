"""Where a request runs: which decode worker, and which prefill worker or none. Pure: no clock, no I/O, no randomness.

A decision weighs two things in one unit, tokens of compute. What a prefix cache already holds need not be computed;
what is queued in front must be computed first. So a popular prefix draws requests to the worker that has it only
until the queue there costs more than computing the prefix elsewhere. Cache sizes are never a sign of load.

What a decode worker holds of a prompt and the prefill worker lacks (the last answer of a chat, first of all) can be
pulled instead of computed, which costs a transfer.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum

from kv_cache.layout import KVCacheLayout

# What one more sequence costs the others on a decode worker, in tokens of compute.
SEQUENCE_COST_TOKENS = 64.0
# Moving the KV of a token that a worker lacks, against computing one.
TRANSFER_COST = 0.25
# Below this a pull's fixed cost is more than what it spares.
MIN_PULL_BLOCKS = 2


class Health(Enum):
    """READY takes work; STALLED and FAILING (it reports well, but its requests fail) only when nothing better is there;
    DRAINING never."""

    READY = "ready"
    STALLED = "stalled"
    FAILING = "failing"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """One worker as the policy sees it.

    `cached_blocks` is a hint of the block hashes in its prefix cache. `requests` counts sequences there,
    `pending_tokens` prompt tokens not yet computed; both include what this router sent a moment ago.
    `layout` is that of its pool: only between equal ones do blocks of the same text have the same names and bytes.
    `full` means that it refused a request for want of room and nothing has changed since.
    """

    worker_id: str
    health: Health
    cached_blocks: Set[bytes]
    requests: int
    pending_tokens: int
    blocks_available: int
    layout: KVCacheLayout
    full: bool = False


@dataclass(frozen=True, slots=True)
class ClusterLoad:
    """All attached workers by role."""

    prefill: tuple[WorkerLoad, ...]
    decode: tuple[WorkerLoad, ...]


@dataclass(frozen=True, slots=True)
class RequestShape:
    """What the policy needs to know of a request.

    `block_hashes` names the full blocks of the prompt in order, for each layout that a worker has. `avoid` holds
    workers that failed this request already: they are taken only when no other is left. Without `allow_local` a
    prefill worker is always used, without `allow_pull` nothing is pulled from a decode worker. `crowded` names decode
    workers that probably could not hold it to its end without preempting others (`forecast.py`): the others come first.
    """

    num_tokens: int
    block_hashes: Mapping[KVCacheLayout, Sequence[bytes]]
    avoid: frozenset[str] = frozenset()
    allow_local: bool = True
    allow_pull: bool = True
    crowded: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Source:
    """A decode worker, and how many leading tokens of the prompt it probably holds, in whole blocks."""

    worker_id: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Worker ids and why. `prefill_worker` None: the decode worker computes the prompt itself. `source`: whom the
    prefill worker is to pull from what its own cache lacks."""

    decode_worker: str
    prefill_worker: str | None
    reason: str
    source: Source | None = None


@dataclass(frozen=True, slots=True)
class NoPlan:
    """Cannot be placed now, for want of a worker of `role`. `may_wait`: those that suit are full, so room may come."""

    role: str
    may_wait: bool
    reason: str


def choose(cluster: ClusterLoad, request: RequestShape, turn: int) -> Plan | NoPlan:
    """Place one request. Equal workers are taken in rotation by `turn`, a number that the caller counts up."""
    decodes = _best_tier(cluster.decode, request.avoid, last_resort=True)
    if not decodes:
        return NoPlan("decode", False, _why_none("decode", cluster.decode))
    prefills = _best_tier(cluster.prefill, request.avoid, last_resort=not request.allow_local)
    if not prefills and not request.allow_local:
        return NoPlan("prefill", False, _why_none("prefill", cluster.prefill))

    decode = _cheapest(decodes, request, turn, _decode_cost if prefills else _local_cost)
    if decode is None:
        return NoPlan("decode", True, "every decode worker is full")
    if not prefills:
        reason = f"local prefill: {_why_no_prefill(cluster.prefill, request.avoid)}; {_explain(decode, request)}"
        return Plan(decode.worker_id, None, reason)
    holders = _holders(cluster.decode, decode, request)
    prefill = _cheapest(prefills, request, turn, lambda worker, shape: _prefill_cost(worker, shape, holders))
    if prefill is None:
        return NoPlan("prefill", True, "every prefill worker is full")
    reason = f"remote prefill: {_explain(prefill, request)}; {_explain(decode, request)}"
    source = _source_for(prefill, request, holders)
    if source is not None:
        reason += f"; pulls up to token {source.num_tokens} from {source.worker_id}"
    return Plan(decode.worker_id, prefill.worker_id, reason, source)


def choose_successor(cluster: ClusterLoad, leaving: str, request: RequestShape, turn: int) -> Plan | None:
    """Where an answer goes on that is to leave a decode worker, with its KV: the cheapest worker that is ready and has
    the same kind of blocks, and room. None = there is none. The plan has the one it leaves as its prefill worker."""
    layout = next((worker.layout for worker in cluster.decode if worker.worker_id == leaving), None)
    suitable = [
        worker
        for worker in cluster.decode
        if worker.health is Health.READY
        and worker.worker_id not in (request.avoid | {leaving})
        and worker.layout == layout
        and _fits(worker, request)
    ]
    chosen = _cheapest(suitable, request, turn, _decode_cost) if suitable else None
    if chosen is None:
        return None
    return Plan(chosen.worker_id, leaving, f"moved: {leaving} drains; {_explain(chosen, request)}")


def cached_prefix_tokens(worker: WorkerLoad, request: RequestShape) -> int:
    """Prompt tokens that the worker probably need not compute: whole blocks, and always fewer than the prompt has."""
    block_size, hashes = worker.layout.block_size, request.block_hashes[worker.layout]
    usable = min(len(hashes), (request.num_tokens - 1) // block_size)
    for index in range(usable):
        if hashes[index] not in worker.cached_blocks:
            return index * block_size
    return usable * block_size


def _holders(
    workers: Sequence[WorkerLoad], chosen: WorkerLoad, request: RequestShape
) -> list[tuple[WorkerLoad, Source]]:
    """Decode workers that can be pulled from, those that hold most first; of equal ones the one chosen to decode."""
    if not request.allow_pull:
        return []
    ready = [w for w in workers if w.health is Health.READY and w.worker_id not in request.avoid]
    holders = [(worker, Source(worker.worker_id, cached_prefix_tokens(worker, request))) for worker in ready]
    return sorted(holders, key=lambda holder: (-holder[1].num_tokens, holder[0] is not chosen))


def _source_for(
    prefill: WorkerLoad, request: RequestShape, holders: Sequence[tuple[WorkerLoad, Source]]
) -> Source | None:
    """Whom this prefill worker should pull from; None when computing is cheaper."""
    own = cached_prefix_tokens(prefill, request)
    source = next((source for worker, source in holders if worker.layout == prefill.layout), None)
    if source is None or source.num_tokens - own < MIN_PULL_BLOCKS * prefill.layout.block_size:
        return None
    return source


def _best_tier(workers: Sequence[WorkerLoad], avoid: frozenset[str], *, last_resort: bool) -> list[WorkerLoad]:
    """The workers of the best kind there is. Without `last_resort` only ready ones that did not fail the request."""
    order = (Health.READY, Health.FAILING, Health.STALLED)
    tiers = [(health, avoided) for health in order for avoided in (False, True)]
    for health, avoided in tiers if last_resort else tiers[:1]:
        tier = [w for w in workers if w.health is health and (w.worker_id in avoid) is avoided]
        if tier:
            return tier
    return []


def _cheapest(
    workers: list[WorkerLoad], request: RequestShape, turn: int, cost: Callable[[WorkerLoad, RequestShape], float]
) -> WorkerLoad | None:
    """The cheapest worker that is not full, those with room to the end and then for now first. None: all are full."""
    start = turn % len(workers)
    rotated = workers[start:] + workers[:start]
    open_workers = [worker for worker in rotated if not worker.full]
    key = lambda w: (w.worker_id in request.crowded, not _fits(w, request), cost(w, request))  # noqa: E731
    return min(open_workers, key=key, default=None)


def _fits(worker: WorkerLoad, request: RequestShape) -> bool:
    missing = request.num_tokens - cached_prefix_tokens(worker, request)
    return worker.blocks_available > missing // worker.layout.block_size


def _prefill_cost(worker: WorkerLoad, request: RequestShape, holders: Sequence[tuple[WorkerLoad, Source]]) -> float:
    own = cached_prefix_tokens(worker, request)
    source = _source_for(worker, request, holders)
    pulled = source.num_tokens - own if source is not None else 0
    return worker.pending_tokens + request.num_tokens - own - pulled + pulled * TRANSFER_COST


def _decode_cost(worker: WorkerLoad, request: RequestShape) -> float:
    missing = request.num_tokens - cached_prefix_tokens(worker, request)
    return worker.requests * SEQUENCE_COST_TOKENS + worker.pending_tokens + missing * TRANSFER_COST


def _local_cost(worker: WorkerLoad, request: RequestShape) -> float:
    missing = request.num_tokens - cached_prefix_tokens(worker, request)
    return worker.requests * SEQUENCE_COST_TOKENS + worker.pending_tokens + missing


def _explain(worker: WorkerLoad, request: RequestShape) -> str:
    cached = cached_prefix_tokens(worker, request)
    return (
        f"{worker.worker_id} has {cached} of {request.num_tokens} tokens cached, "
        f"{worker.pending_tokens} pending, {worker.requests} requests"
    )


def _why_none(role: str, workers: Sequence[WorkerLoad]) -> str:
    return f"every {role} worker is draining" if workers else f"no {role} worker is attached"


def _why_no_prefill(workers: Sequence[WorkerLoad], avoid: frozenset[str]) -> str:
    if not workers:
        return "no prefill worker is attached"
    if any(w.health is Health.READY and w.worker_id in avoid for w in workers):
        return "the prefill workers that are ready failed this request"
    return "no prefill worker is ready"

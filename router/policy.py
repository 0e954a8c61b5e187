"""Where a request runs: which decode worker, and which prefill worker or none. Pure: no clock, no I/O, no randomness.

A decision weighs two things in one unit, tokens of compute. What a prefix cache already holds need not be computed;
what is queued in front must be computed first. So a popular prefix draws requests to the worker that has it only
until the queue there costs more than computing the prefix elsewhere. Cache sizes are never a sign of load.
"""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from enum import Enum

# What one more sequence costs the others on a decode worker, in tokens of compute.
SEQUENCE_COST_TOKENS = 64.0
# Moving the KV of a token that the decode worker lacks, against computing one.
TRANSFER_COST = 0.25


class Health(Enum):
    """READY takes work; STALLED only when nothing better is there; DRAINING never."""

    READY = "ready"
    STALLED = "stalled"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """One worker as the policy sees it.

    `cached_blocks` is a hint of the block hashes in its prefix cache. `requests` counts sequences there,
    `pending_tokens` prompt tokens not yet computed; both include what this router sent a moment ago.
    `full` means that it refused a request for want of room and nothing has changed since.
    """

    worker_id: str
    health: Health
    cached_blocks: Set[bytes]
    requests: int
    pending_tokens: int
    blocks_available: int
    full: bool = False


@dataclass(frozen=True, slots=True)
class ClusterLoad:
    """All attached workers by role."""

    prefill: tuple[WorkerLoad, ...]
    decode: tuple[WorkerLoad, ...]


@dataclass(frozen=True, slots=True)
class RequestShape:
    """What the policy needs to know of a request.

    `block_hashes` names the full blocks of the prompt in order. `avoid` holds workers that failed this request
    already: they are taken only when no other is left. Without `allow_local` a prefill worker is always used.
    """

    num_tokens: int
    block_size: int
    block_hashes: Sequence[bytes]
    avoid: frozenset[str] = frozenset()
    allow_local: bool = True


@dataclass(frozen=True, slots=True)
class Plan:
    """Worker ids and why. `prefill_worker` None: the decode worker computes the prompt itself."""

    decode_worker: str
    prefill_worker: str | None
    reason: str


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
    prefill = _cheapest(prefills, request, turn, _prefill_cost)
    if prefill is None:
        return NoPlan("prefill", True, "every prefill worker is full")
    reason = f"remote prefill: {_explain(prefill, request)}; {_explain(decode, request)}"
    return Plan(decode.worker_id, prefill.worker_id, reason)


def cached_prefix_tokens(worker: WorkerLoad, request: RequestShape) -> int:
    """Prompt tokens that the worker probably need not compute: whole blocks, and always fewer than the prompt has."""
    usable = min(len(request.block_hashes), (request.num_tokens - 1) // request.block_size)
    for index in range(usable):
        if request.block_hashes[index] not in worker.cached_blocks:
            return index * request.block_size
    return usable * request.block_size


def _best_tier(workers: Sequence[WorkerLoad], avoid: frozenset[str], *, last_resort: bool) -> list[WorkerLoad]:
    """The workers of the best kind there is. Without `last_resort` only ready ones that did not fail the request."""
    tiers = [(Health.READY, False), (Health.READY, True), (Health.STALLED, False), (Health.STALLED, True)]
    for health, avoided in tiers if last_resort else tiers[:1]:
        tier = [w for w in workers if w.health is health and (w.worker_id in avoid) is avoided]
        if tier:
            return tier
    return []


def _cheapest(
    workers: list[WorkerLoad], request: RequestShape, turn: int, cost: Callable[[WorkerLoad, RequestShape], float]
) -> WorkerLoad | None:
    """The cheapest worker that is not full, those with enough free blocks first. None when all are full."""
    start = turn % len(workers)
    rotated = workers[start:] + workers[:start]
    open_workers = [worker for worker in rotated if not worker.full]
    return min(open_workers, key=lambda w: (not _fits(w, request), cost(w, request)), default=None)


def _fits(worker: WorkerLoad, request: RequestShape) -> bool:
    missing = request.num_tokens - cached_prefix_tokens(worker, request)
    return worker.blocks_available > missing // request.block_size


def _prefill_cost(worker: WorkerLoad, request: RequestShape) -> float:
    return worker.pending_tokens + request.num_tokens - cached_prefix_tokens(worker, request)


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

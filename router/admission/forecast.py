"""Whether a decode worker will hold a request's KV to its end without preempting others. Pure.

Asked before a prefill worker spends anything. What is known: the worker's last report, what this router has sent there
and taken from there since, and of this router's own sequences how long they are and how long they probably become.
Sequences of other routers are known by the blocks they hold now, and do not grow here.

Time is counted in tokens: each running sequence gets one a step. Between the ends of sequences need only grows, so the
moments just before an end, and the last one looked at, are all that must be checked.

The worker decides at admission by the same sums for the first moment (`Scheduler.reserve`: blocks for the prompt and
one token, a block for each sequence that grows, a share of the pool), so the two agree but for what a report is late.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple, Protocol

# As the workers' scheduler keeps it (`SchedulerConfig.headroom`).
_HEADROOM = 0.01


class Growing(Protocol):
    """A sequence of this router on a worker, as it is now."""

    @property
    def num_tokens(self) -> int:
        """Prompt and answer so far."""

    @property
    def remaining(self) -> int:
        """Tokens that it will probably still get, 0 or more."""

    @property
    def shared_blocks(self) -> int:
        """Blocks of it that were cached there when it came: others may hold them too, so its end frees them not."""


class PoolState(NamedTuple):
    """One decode worker's pool now. `available`: blocks that are free or evictable. `most_growth`: blocks that all of
    `sequences` can still take, at most. `growing`: sequences there of all routers; `slots_free`: how many more it
    takes. Valid until the next await: `sequences` is live."""

    worker_id: str
    block_size: int
    num_blocks: int
    available: int
    slots_free: int
    growing: int
    most_growth: int
    sequences: Collection[Growing]

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request will need: tokens it has now (prompt, and answer so far), those it will probably get, and those
    it may get at most."""

    num_tokens: int
    expected: int
    most: int


def can_ever_hold(pool: PoolState, demand: Demand) -> bool:
    """Whether the pool, otherwise empty, holds the request to its last possible token: what workers insist on."""
    return pool.blocks_for(demand.num_tokens + demand.most) <= pool.num_blocks


def fits(pool: PoolState, demand: Demand, shared_blocks: int, horizon_tokens: int) -> bool:
    """Whether the request can begin there now, and for `horizon_tokens` steps (or to its end, if that is sooner) will
    probably leave everybody the blocks they grow into. `shared_blocks` of it are cached there."""
    if pool.slots_free < 1 or not can_ever_hold(pool, demand):
        return False
    first = pool.blocks_for(demand.num_tokens + 1) - shared_blocks
    headroom = max(pool.growing, math.ceil(_HEADROOM * pool.num_blocks)) if pool.growing else 0
    if first + headroom > pool.available:
        return False
    last = pool.blocks_for(demand.num_tokens + demand.expected) - shared_blocks
    if last + pool.most_growth <= pool.available:
        return True
    return _holds_through(pool, demand, shared_blocks, min(horizon_tokens, demand.expected))


def _holds_through(pool: PoolState, demand: Demand, shared_blocks: int, steps: int) -> bool:
    """The sweep over the ends of sequences, soonest first, up to `steps` from now."""
    slack = [0] * pool.block_size  # Growing sequences by how many tokens their last block still takes.
    for seq in pool.sequences:
        slack[-seq.num_tokens % pool.block_size] += 1
    available = pool.available
    ends = sorted((seq.remaining, seq.num_tokens, seq.shared_blocks) for seq in pool.sequences)
    for remaining, num_tokens, shared in ends:
        if remaining >= steps:
            break
        if _need(pool, demand, shared_blocks, slack, remaining) > available:
            return False
        # From here on it neither grows nor holds anything.
        slack[-num_tokens % pool.block_size] -= 1
        available += max(0, pool.blocks_for(num_tokens) - shared)
    return _need(pool, demand, shared_blocks, slack, steps) <= available


def _need(pool: PoolState, demand: Demand, shared_blocks: int, slack: list[int], step: int) -> int:
    """Blocks that the request has, and that those still growing have taken, after `step` tokens each."""
    growth = sum(
        count * pool.blocks_for(step - room) for room, count in enumerate(slack) if count and step > room
    )  # fmt: skip
    return pool.blocks_for(demand.num_tokens + step) - shared_blocks + growth

"""Seeded faults, for tests of anything that moves KV: what a bad network, disk of memory, or defect would do.

A plan changes messages on the `memory` network, and payload on any transport (after it was fingerprinted, so that a
receiver has a chance to notice). The same seed gives the same faults for the same sequence of messages.
"""

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from kv_transfer.pages import PageRun
from kv_transfer.transport import TransportError


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Which faults happen. The default is none.

    Messages, each a probability: `drop`, `duplicate`, `delay` (holds this and everything behind it back), `reorder`
    (may be overtaken); times are at most `max_delay_s`. The first `spare_messages` of each direction (the greeting)
    are spared. Payload: `fail_at_post` / `corrupt_at_post` count writes from 1; `skip_block` and `swap_blocks` are
    indices in the prompt; `bytes_per_second` throttles.
    """

    seed: int = 0
    drop: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0
    reorder: float = 0.0
    max_delay_s: float = 0.01
    spare_messages: int = 2
    fail_at_post: int | None = None
    corrupt_at_post: int | None = None
    skip_block: int | None = None
    swap_blocks: tuple[int, int] | None = None
    bytes_per_second: float | None = None


class MessageFaults:
    """What happens to the messages of one direction of one channel. Used by one thread at a time."""

    def __init__(self, plan: FaultPlan, stream: str) -> None:
        self._plan = plan
        self._random = random.Random(f"{plan.seed}/{stream}")
        self._seen = 0

    def deliveries(self) -> list[tuple[float, bool]]:
        """For the next message: (delay in seconds, whether later ones wait behind it) of each copy that arrives."""
        self._seen += 1
        if self._seen <= self._plan.spare_messages:
            return [(0.0, True)]
        draw, plan = self._random.random, self._plan
        if draw() < plan.drop:
            return []
        copies = 2 if draw() < plan.duplicate else 1
        return [self._delivery() for _ in range(copies)]

    def _delivery(self) -> tuple[float, bool]:
        plan, pause_s = self._plan, self._random.random() * self._plan.max_delay_s
        if self._random.random() < plan.reorder:
            return pause_s, False
        return (pause_s if self._random.random() < plan.delay else 0.0), True


class PayloadFaults:
    """What happens to the payload that one sender writes. Any thread."""

    def __init__(self, plan: FaultPlan) -> None:
        self._plan = plan
        self._lock = threading.Lock()
        self._posts = 0

    @property
    def change_content(self) -> bool:
        """Whether any write will carry something else than what was to be sent, or less."""
        plan = self._plan
        return any(fault is not None for fault in (plan.corrupt_at_post, plan.skip_block, plan.swap_blocks))

    def post(self, size_bytes: int) -> int:
        """Count a write of this size; wait if the link is throttled. Raises TransportError if it is the one to fail."""
        with self._lock:
            self._posts += 1
            number = self._posts
        if number == self._plan.fail_at_post:
            raise TransportError(f"fault: write {number} fails")
        if self._plan.bytes_per_second is not None:
            time.sleep(size_bytes / self._plan.bytes_per_second)
        return number

    def parts(self, run: PageRun) -> list[PageRun]:
        """The run without the block to skip."""
        skip = self._plan.skip_block
        if skip is None or skip not in run.blocks:
            return [run]
        pieces = (range(run.blocks.start, skip), range(skip + 1, run.blocks.stop))
        return [PageRun(blocks, run.layers) for blocks in pieces if len(blocks)]

    def source_of(self, block_index: int) -> int:
        """The prompt block whose content goes where that of `block_index` belongs."""
        swap = self._plan.swap_blocks
        if swap is None or block_index not in swap:
            return block_index
        return swap[1] if block_index == swap[0] else swap[0]

    def payload(self, number: int, source: Sequence[memoryview]) -> Sequence[memoryview]:
        """The bytes of write `number`, with one of them changed if so planned."""
        if number != self._plan.corrupt_at_post or not source:
            return source
        changed = bytearray(source[0])
        # The last byte of a little-endian float holds its exponent: a change there is one that a model can notice.
        changed[len(changed) // 2 | 3] ^= 2
        return [memoryview(changed), *source[1:]]

"""A plan with a place taken on each of its workers."""

from contextlib import ExitStack
from enum import Enum

from router.policy import Plan
from router.workers.attached_worker import WorkerLease
from router.workers.worker_registry import WorkerRegistry
from runtime.errors import KvferryError


class Side(Enum):
    """Which worker said that the attempt failed."""

    PREFILL = "prefill"
    DECODE = "decode"


class Placement:
    """A plan with a place taken on each of its workers, and the connections to them.

    Taken in the same event-loop call as the decision, so that the next decision sees it. `release` gives back what
    is still held; the prefill worker's place is given back earlier, when its call ends.
    """

    def __init__(self, registry: WorkerRegistry, plan: Plan, num_tokens: int, *, moves: bool = False) -> None:
        """`moves`: nothing is computed; in the prefill worker's place is one that has the KV, and no place is taken on
        it. Raises KvferryError (UNAVAILABLE) when a worker of the plan is not attached."""
        self.plan = plan
        self._decode_stack = ExitStack()
        self._prefill_stack = ExitStack()
        is_local = plan.prefill_worker is None
        lease = registry.lease(plan.decode_worker, num_tokens if is_local and not moves else 0)
        self.decode: WorkerLease = self._decode_stack.enter_context(lease)
        self.prefill: WorkerLease | None = None
        if plan.prefill_worker is not None and not moves:
            try:
                lease = registry.lease(plan.prefill_worker, num_tokens)
                self.prefill = self._prefill_stack.enter_context(lease)
            except KvferryError:
                self._decode_stack.close()
                raise

    def prompt_computed(self) -> None:
        """The first token is there: no prompt tokens wait on either worker."""
        self.decode.computed()
        if self.prefill is not None:
            self.prefill.computed()

    def refused_by(self, side: Side) -> None:
        """That worker had no room."""
        lease = self.decode if side is Side.DECODE else self.prefill
        if lease is not None:
            lease.refused()

    def release_prefill(self) -> None:
        """The prefill worker is done with the request. Idempotent."""
        self._prefill_stack.close()

    def release(self) -> None:
        """Idempotent."""
        self._prefill_stack.close()
        self._decode_stack.close()

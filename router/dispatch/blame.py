"""Which workers a failed attempt speaks against: for the breaker, and for the next attempt."""

import random

from kvferry_rpc.common_pb2 import ErrorCode
from router.dispatch.attempt import AttemptFailed
from router.dispatch.placement import Side
from router.dispatch.worker_links import WorkerLinks
from router.policy import Plan
from router.workers.worker_registry import WorkerRegistry


class Blame:
    """Event-loop thread only."""

    def __init__(self, registry: WorkerRegistry, links: WorkerLinks, rng: random.Random) -> None:
        """`rng` spreads the probes of workers that fail; it decides nothing else."""
        self._registry = registry
        self._links = links
        self._rng = rng

    def count(self, plan: Plan, failure: AttemptFailed) -> None:
        """Count it against the worker that failed; of a hand-off either end may be at fault."""
        code, workers = failure.error.code, {plan.decode_worker, plan.prefill_worker}
        if code in (ErrorCode.UNAVAILABLE, ErrorCode.INTERNAL):
            workers = {plan.decode_worker if failure.side is Side.DECODE else plan.prefill_worker}
        elif code != ErrorCode.HANDOFF_FAILED:
            return
        for worker_id in workers:
            if worker_id is not None:
                self._registry.failed(worker_id, self._rng.random())

    def workers_to_avoid(self, plan: Plan, failure: AttemptFailed) -> set[str]:
        """In the next attempt. Asked a moment later, when it has shown who is gone."""
        unavailable = failure.error.code == ErrorCode.UNAVAILABLE
        blamed = set()
        session = self._links.decode_session(plan.decode_worker)
        if session is None or not session.is_open or (unavailable and failure.side is Side.DECODE):
            blamed.add(plan.decode_worker)
        if plan.prefill_worker is not None:
            is_gone = self._registry.registration(plan.prefill_worker) is None
            if is_gone or (unavailable and failure.side is Side.PREFILL):
                self._registry.suspect(plan.prefill_worker)
                blamed.add(plan.prefill_worker)
        # Blocks that did not verify: either end may be at fault.
        return blamed or {plan.decode_worker, plan.prefill_worker or plan.decode_worker}

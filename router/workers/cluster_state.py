"""The snapshot that `ClusterState` answers with."""

from kvferry_rpc.public_pb2 import ClusterStateResponse, WorkerState
from router.dispatch.dispatcher import Dispatcher
from router.workers.worker_registry import WorkerRegistry, WorkerView


def cluster_state(model: str, router_id: str, registry: WorkerRegistry, dispatcher: Dispatcher) -> ClusterStateResponse:
    """Workers in the order of their ids, and what this router has under way. Event-loop thread only."""
    return ClusterStateResponse(
        model=model,
        workers=[_worker_state(view) for view in registry.views()],
        requests_in_flight=dispatcher.in_flight,
        requests_queued=dispatcher.queued,
        router_id=router_id,
    )


def _worker_state(view: WorkerView) -> WorkerState:
    register, load = view.register, view.load
    return WorkerState(
        worker_id=register.worker_id,
        role=view.role,
        address=register.address,
        state=view.health.value,
        pid=register.pid,
        blocks_total=register.num_blocks,
        blocks_free=load.blocks_free,
        blocks_cached=load.blocks_cached,
        blocks_used=load.blocks_used,
        blocks_quarantined=load.blocks_quarantined,
        sequences_running=load.sequences_running,
        sequences_waiting=load.sequences_waiting,
        sequences_receiving=load.sequences_receiving,
        steps=load.steps,
        preemptions=load.preemptions,
        report_age_ms=int(view.report_age_s * 1000),
        block_size=register.layout.block_size,
        drafted_tokens=load.drafted_tokens,
        accepted_tokens=load.accepted_tokens,
    )

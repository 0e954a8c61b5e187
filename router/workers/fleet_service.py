"""The internal service of whoever scales the cluster: what there is, what there is to do, and orders to workers."""

from collections.abc import Callable
from typing import Any

from kvferry_rpc import internal_pb2_grpc
from kvferry_rpc.internal_pb2 import (
    DrainWorkerRequest,
    DrainWorkerResponse,
    FleetState,
    FleetWorker,
    ObserveRequest,
    SetWorkerRoleRequest,
    SetWorkerRoleResponse,
)
from router.workers.orders import WorkerOrders
from router.workers.worker_registry import WorkerRegistry, WorkerView
from runtime.errors import KvferryError

SERVICE_NAME = "kvferry.internal.v1.Fleet"


class FleetService(internal_pb2_grpc.FleetServicer):
    """Event-loop thread only."""

    def __init__(self, registry: WorkerRegistry, demand: Callable[[], FleetState]) -> None:
        """`demand`: the state without its workers."""
        self._registry = registry
        self._orders = WorkerOrders(registry)
        self._demand = demand

    async def Observe(self, request: ObserveRequest, context: Any) -> FleetState:
        """See the .proto file."""
        state = self._demand()
        state.workers.extend(_worker(view) for view in self._registry.views())
        return state

    async def Drain(self, request: DrainWorkerRequest, context: Any) -> DrainWorkerResponse:
        """See the .proto file."""
        try:
            if request.over:
                self._orders.lift_drain(request.worker_id)
            else:
                self._orders.drain(request.worker_id, force=request.force)
        except KvferryError as error:
            await context.abort(error.grpc_status, error.message)
        return DrainWorkerResponse()

    async def SetRole(self, request: SetWorkerRoleRequest, context: Any) -> SetWorkerRoleResponse:
        """See the .proto file."""
        try:
            self._orders.set_role(request.worker_id, request.role, force=request.force)
        except KvferryError as error:
            await context.abort(error.grpc_status, error.message)
        return SetWorkerRoleResponse()


def _worker(view: WorkerView) -> FleetWorker:
    return FleetWorker(
        register=view.register,
        load=view.load,
        state=view.health.value,
        requests_in_flight=view.requests_in_flight,
        report_age_ms=int(view.report_age_s * 1000),
    )

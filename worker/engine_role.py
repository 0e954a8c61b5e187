"""What a role shows to its host, whichever it is: an engine loop, both ends of hand-offs and a gRPC service.

`decode_worker.role` and `prefill_worker.role` wire them up, and so say in what the two differ.
"""

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from engine.engine import EngineLoad
from engine.loop import EngineLoop
from engine.wire import load_report
from kv_transfer.receiver import HandoffReceiver
from kv_transfer.sender import HandoffSender
from kvferry_rpc import internal_pb2
from runtime.grpc_life import GrpcServer
from runtime.in_flight import InFlight
from worker.parts import RoleParts, WorkerParts


class RoleView(Protocol):
    """What the frozen view of every role has. Totals count from the start of its life."""

    @property
    def load(self) -> EngineLoad: ...

    @property
    def handoffs_committed(self) -> int: ...

    @property
    def handoffs_failed(self) -> int: ...

    @property
    def bytes_moved(self) -> int: ...


class RoleService(Protocol):
    """A role's gRPC service. Event-loop thread only."""

    # Whether it refuses new requests.
    draining: bool
    # Requests that draining must wait for.
    in_flight: InFlight

    def add_to(self, server: GrpcServer) -> None:
        """Offer it."""
        ...

    def end_sessions(self) -> None:
        """End the streams that outlast requests, behind their last messages."""
        ...


ViewT = TypeVar("ViewT", bound=RoleView)


class EngineRole(Generic[ViewT]):
    """One life in one role. See `runtime.worker_life.HostedWorker` for the methods."""

    def __init__(
        self,
        parts: WorkerParts,
        own: RoleParts,
        role: internal_pb2.Role.ValueType,
        sender: HandoffSender,
        receiver: HandoffReceiver,
        engine_loop: EngineLoop[Any, ViewT],
        service: RoleService,
    ) -> None:
        """Closes all of them, but not the parts of the process."""
        self.kv_events = own.kv_events
        self.transports = parts.transports
        self.num_blocks = parts.plan.num_blocks
        self._plan, self._options = parts.plan, parts.options
        self._incarnation = own.identity.incarnation
        self._role = role
        self._sender, self._receiver = sender, receiver
        self._engine_loop = engine_loop
        self._service = service

    @property
    def in_flight(self) -> InFlight:
        return self._service.in_flight

    @property
    def is_at_rest(self) -> bool:
        return self._engine_loop.snapshot.view.load.is_at_rest

    def add_services(self, server: GrpcServer) -> None:
        self._service.add_to(server)

    def start(self, on_fatal: Callable[[], None]) -> None:
        self._receiver.start()
        self._engine_loop.start(lambda error: on_fatal())

    def describe(self, address: str) -> internal_pb2.Register:
        return internal_pb2.Register(
            worker_id=self._options.worker_id,
            incarnation=self._incarnation,
            role=self._role,
            address=address,
            transports=self.transports,
            **self._plan.facts(self._options),
        )

    def load_report(self) -> internal_pb2.LoadReport:
        view = self._engine_loop.snapshot.view
        report = load_report(view.load, self._engine_loop.stalled_ms)
        report.handoffs_committed = view.handoffs_committed
        report.handoffs_failed = view.handoffs_failed
        report.bytes_moved = view.bytes_moved
        report.tickets_refused = sum(self._receiver.snapshot().refused.values())
        return report

    def set_draining(self, draining: bool) -> None:
        self._service.draining = draining

    def end_drain(self) -> None:
        self._service.end_sessions()

    def close(self, timeout_s: float) -> bool:
        self._sender.close(timeout_s)
        is_fenced = self._receiver.close(timeout_s)
        return self._engine_loop.stop(timeout_s) and is_fenced

"""A decode worker on the parts of its process, put together and shown to its host."""

from collections.abc import Callable

from decode_worker.export import Exporter
from decode_worker.hand_over import HandOvers
from decode_worker.server import DecodeService
from decode_worker.worker import Command, DecodeView, DecodeWorker, ExportEvent
from engine.build import log_load
from engine.loop import EngineLoop
from engine.wire import load_report
from kv_transfer.receiver import HandoffReceiver
from kv_transfer.sender import HandoffSender
from kvferry_rpc import internal_pb2, internal_pb2_grpc
from runtime.grpc_life import GrpcServer
from runtime.in_flight import InFlight
from worker.parts import WorkerParts


class DecodeRole:
    """One life as a decode worker. See `runtime.worker_life.HostedWorker` for the methods."""

    def __init__(self, parts: WorkerParts) -> None:
        """Takes the pool; whoever had it before is closed. Raises KvferryError or ValueError when that cannot be."""
        options = self._options = parts.options
        clock, self._plan, self._transports = parts.clock, parts.plan, parts.transports
        self._on_fatal: Callable[[], None] = _nobody_told
        own = parts.begin(prefill_only=False)
        engine, layout, limits = own.engine, self._plan.layout, self._plan.limits
        self.kv_events = own.kv_events
        self._incarnation = own.identity.incarnation
        self._receiver = HandoffReceiver(
            own.identity,
            network=parts.network,
            bind_host=options.host,
            port=options.data_port,
            transports=self._transports,
            lease_s=options.lease_s,
            clock=clock,
            on_event=lambda event: self._engine_loop.notify(event),
        )
        self._sender = HandoffSender(
            own.identity,
            network=parts.network,
            transports=self._transports,
            max_backlog_bytes=options.max_backlog_bytes,
            clock=clock,
            on_event=lambda event: self._engine_loop.notify(ExportEvent(event)),
        )
        exporter = Exporter(engine, self._sender, layout)
        hand_overs = HandOvers(engine, self._sender, layout)
        worker = DecodeWorker(
            engine, self._receiver, exporter, hand_overs, limits.vocab_size, self.kv_events, clock, parts.tracer
        )
        self._engine_loop: EngineLoop[Command, DecodeView] = EngineLoop(
            worker,
            clock=clock,
            max_inbox=options.max_waiting,
            on_fatal=lambda error: self._on_fatal(),
            name=options.worker_id,
        )
        self._service = DecodeService(self._engine_loop, limits, parts.grammars, self._incarnation, clock)
        log_load(f"decode worker {options.worker_id}", self._plan, options.device)

    @property
    def in_flight(self) -> InFlight:
        return self._service.in_flight

    @property
    def is_at_rest(self) -> bool:
        return self._engine_loop.snapshot.view.load.is_at_rest

    @property
    def transports(self) -> tuple[str, ...]:
        return self._transports

    @property
    def num_blocks(self) -> int:
        return self._plan.num_blocks

    def add_services(self, server: GrpcServer) -> None:
        server.add_service(
            internal_pb2_grpc.add_DecodeWorkerServicer_to_server,
            self._service,
            "kvferry.internal.v1.DecodeWorker",
            internal=True,
        )

    def start(self, on_fatal: Callable[[], None]) -> None:
        self._on_fatal = on_fatal
        self._receiver.start()
        self._engine_loop.start()

    def describe(self, address: str) -> internal_pb2.Register:
        return internal_pb2.Register(
            worker_id=self._options.worker_id,
            incarnation=self._incarnation,
            role=internal_pb2.DECODE,
            address=address,
            transports=self._transports,
            **self._plan.facts(self._options),
        )

    def load_report(self) -> internal_pb2.LoadReport:
        view = self._engine_loop.snapshot.view
        report = load_report(view.load, self._engine_loop.stalled_ms)
        report.handoffs_committed = view.handoffs_committed
        report.handoffs_failed = view.handoffs_failed
        report.bytes_moved = view.bytes_received
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


def _nobody_told() -> None:
    """Stands in until `start` says whom to tell."""

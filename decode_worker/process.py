"""A decode worker, put together from its configuration and shown to its host."""

import secrets
from collections.abc import Callable

from decode_worker.config import DecodeConfig
from decode_worker.export import Exporter
from decode_worker.hand_over import HandOvers
from decode_worker.server import DecodeService
from decode_worker.worker import Command, DecodeView, DecodeWorker, ExportEvent
from engine.build import build_engine, log_load, plan_engine, start_followers
from engine.grammar import GrammarCompiler
from engine.loop import EngineLoop
from engine.wire import load_report
from kv_transfer.identity import Identity
from kv_transfer.receiver import HandoffReceiver
from kv_transfer.region import MemoryRegion, available_memory_bytes
from kv_transfer.sender import HandoffSender
from kvferry_rpc import internal_pb2, internal_pb2_grpc
from runtime.clock import SystemClock
from runtime.grpc_life import GrpcServer
from runtime.in_flight import InFlight
from runtime.kv_event_log import KVEventLog
from runtime.tracing import open_tracer


class DecodeProcess:
    """Everything that one decode worker owns. See `runtime.worker_host.HostedWorker` for the methods."""

    def __init__(self, config: DecodeConfig, secret: bytes) -> None:
        """Prepares and maps the model and takes the pool's memory: seconds, or minutes for a new model. Raises
        KvferryError, RegionError or ValueError when that cannot be done."""
        self._config = config
        self._clock = SystemClock()
        self._on_fatal: Callable[[], None] = _nobody_told
        self._tracer = open_tracer(config, config.worker_id, self._clock)
        self._network = config.network(config.host)
        self._transports = tuple(self._network.transports)
        self._plan = plan_engine(config, available_bytes=available_memory_bytes())
        shared = "shm" in self._transports or config.tensor_parallel > 1
        self._pool = MemoryRegion.allocate(self._plan.pool_bytes, shared=shared)
        self._followers = start_followers(config, self._plan, self._pool.file)
        self._incarnation = secrets.token_bytes(16)
        self.kv_events = KVEventLog()
        engine = build_engine(config, self._plan, self._pool.buffer, prefill_only=False, followers=self._followers)
        identity = Identity(config.worker_id, self._incarnation, secret, self._plan.layout, self._pool)
        self._receiver = HandoffReceiver(
            identity,
            network=self._network,
            bind_host=config.host,
            port=config.data_port,
            transports=self._transports,
            lease_s=config.lease_s,
            clock=self._clock,
            on_event=lambda event: self._engine_loop.notify(event),
        )
        self._sender = HandoffSender(
            identity,
            network=self._network,
            transports=self._transports,
            max_backlog_bytes=config.max_backlog_bytes,
            clock=self._clock,
            on_event=lambda event: self._engine_loop.notify(ExportEvent(event)),
        )
        exporter = Exporter(engine, self._sender, self._plan.layout)
        hand_overs = HandOvers(engine, self._sender, self._plan.layout)
        vocab_size = self._plan.limits.vocab_size
        worker = DecodeWorker(
            engine, self._receiver, exporter, hand_overs, vocab_size, self.kv_events, self._clock, self._tracer
        )
        self._engine_loop: EngineLoop[Command, DecodeView] = EngineLoop(
            worker,
            clock=self._clock,
            max_inbox=config.max_waiting,
            on_fatal=lambda error: self._on_fatal(),
            name=config.worker_id,
        )
        self._grammars = GrammarCompiler(self._plan.model)
        self._service = DecodeService(
            self._engine_loop, self._plan.limits, self._grammars, self._incarnation, self._clock
        )
        log_load(f"decode worker {config.worker_id}", self._plan, config.device)

    @property
    def in_flight(self) -> InFlight:
        return self._service.in_flight

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
            worker_id=self._config.worker_id,
            incarnation=self._incarnation,
            role=internal_pb2.DECODE,
            address=address,
            transports=self._transports,
            **self._plan.facts(self._config),
        )

    def load_report(self) -> internal_pb2.LoadReport:
        view = self._engine_loop.snapshot.view
        report = load_report(view.load, self._engine_loop.stalled_ms)
        report.handoffs_committed = view.handoffs_committed
        report.handoffs_failed = view.handoffs_failed
        report.bytes_moved = view.bytes_received
        report.tickets_refused = sum(self._receiver.snapshot().refused.values())
        return report

    def begin_drain(self) -> None:
        self._service.draining = True

    def end_drain(self) -> None:
        self._service.end_sessions()

    def close(self, timeout_s: float) -> None:
        self._sender.close(timeout_s)
        self._receiver.close(timeout_s)
        self._engine_loop.stop(timeout_s)
        self._grammars.close()
        if self._followers is not None:
            self._followers.close(timeout_s)
        self._network.close()
        if self._tracer is not None:
            self._tracer.close()
        self._pool.close()


def _nobody_told() -> None:
    """Stands in until `start` says whom to tell."""

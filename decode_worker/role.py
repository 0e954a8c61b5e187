"""A decode worker on the parts of its process."""

from decode_worker.export import Exporter
from decode_worker.hand_over import HandOvers
from decode_worker.server import DecodeService
from decode_worker.worker import Command, DecodeView, DecodeWorker, ExportEvent
from engine.build import log_load
from engine.loop import EngineLoop
from kv_transfer.sender import HandoffSender
from kvferry_rpc import internal_pb2
from worker.engine_role import EngineRole
from worker.parts import WorkerParts


def decode_role(parts: WorkerParts) -> EngineRole[DecodeView]:
    """One life as a decode worker. Takes the pool; whoever had it before is closed. Raises KvferryError or ValueError
    when that cannot be."""
    options, clock, plan = parts.options, parts.clock, parts.plan
    own = parts.begin(prefill_only=False)
    receiver = parts.receiver(own, lambda event: engine_loop.notify(event), lease_s=options.lease_s)
    sender = HandoffSender(
        own.identity,
        network=parts.network,
        transports=parts.transports,
        max_backlog_bytes=options.max_backlog_bytes,
        clock=clock,
        on_event=lambda event: engine_loop.notify(ExportEvent(event)),
    )
    exporter = Exporter(own.engine, sender, plan.layout)
    hand_overs = HandOvers(own.engine, sender, plan.layout)
    worker = DecodeWorker(
        own.engine, receiver, exporter, hand_overs, plan.limits.vocab_size, own.kv_events, clock, parts.tracer
    )
    engine_loop: EngineLoop[Command, DecodeView] = EngineLoop(
        worker, clock=clock, max_inbox=options.max_waiting, name=options.worker_id
    )
    service = DecodeService(engine_loop, plan.limits, parts.grammars, own.identity.incarnation, clock)
    log_load(f"decode worker {options.worker_id}", plan, options.device)
    return EngineRole(parts, own, internal_pb2.DECODE, sender, receiver, engine_loop, service)

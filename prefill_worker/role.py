"""A prefill worker on the parts of its process."""

from engine.build import log_load
from engine.loop import EngineLoop
from kv_transfer.events import SendEvent, Sent
from kv_transfer.sender import HandoffSender
from kvferry_rpc import internal_pb2
from prefill_worker.pull import Puller
from prefill_worker.server import PrefillService
from prefill_worker.worker import Command, Nudge, PrefillView, PrefillWorker, PullEvent
from worker.engine_role import EngineRole
from worker.parts import WorkerParts

# A pull that shows no sign of life is over after this: its request waits.
_PULL_LEASE_S = 5.0


def prefill_role(parts: WorkerParts) -> EngineRole[PrefillView]:
    """One life as a prefill worker. Takes the pool; whoever had it before is closed. Raises KvferryError or ValueError
    when that cannot be."""
    options, clock, plan = parts.options, parts.clock, parts.plan
    own = parts.begin(prefill_only=True)

    def on_send_event(event: SendEvent) -> None:
        if isinstance(event, Sent):
            worker.report_sent(event)
        engine_loop.notify(event)

    sender = HandoffSender(
        own.identity,
        network=parts.network,
        transports=parts.transports,
        forced=options.forced,
        wire_dtype=options.wire_dtype,
        max_backlog_bytes=options.max_backlog_bytes,
        clock=clock,
        on_event=on_send_event,
        on_backlog=lambda: engine_loop.notify(Nudge()),
    )
    receiver = parts.receiver(
        own, lambda event: engine_loop.notify(PullEvent(event)), lease_s=min(options.lease_s, _PULL_LEASE_S)
    )
    puller = Puller(own.engine, receiver, plan.layout.block_bytes, clock)
    worker = PrefillWorker(own.engine, sender, puller, plan.layout.num_layers, own.kv_events, clock, parts.tracer)
    engine_loop: EngineLoop[Command, PrefillView] = EngineLoop(
        worker, clock=clock, max_inbox=options.max_waiting, name=options.worker_id
    )
    # What decode workers hold was made of fewer bits then: this cache stays exact.
    pulls = options.wire_dtype is None
    service = PrefillService(engine_loop, plan.limits, parts.grammars, clock, pulls=pulls)
    log_load(f"prefill worker {options.worker_id}", plan, options.device)
    return EngineRole(parts, own, internal_pb2.PREFILL, sender, receiver, engine_loop, service)

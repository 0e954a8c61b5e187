"""A prefill and a decode worker in one process: real engines, real hand-offs, no gRPC and no router."""

import itertools
import queue
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from decode_worker.worker import AdmitRequest, CancelRequest, DecodeView, DecodeWorker, sequence_id
from decode_worker.worker import Command as DecodeCommand
from engine.build import EnginePlan, build_engine, plan_engine
from engine.loop import EngineLoop
from engine.options import EngineOptions
from engine.wire import build_sequence
from kv_transfer.events import SendEvent, Sent
from kv_transfer.faults import FaultPlan
from kv_transfer.identity import Identity
from kv_transfer.receiver import HandoffReceiver
from kv_transfer.region import MemoryRegion
from kv_transfer.sender import HandoffSender
from kv_transfer.transport_memory import MemoryNetwork
from kvferry_rpc import common_pb2, internal_pb2
from prefill_worker.worker import Cancel, PrefillView, PrefillWorker, Submit
from prefill_worker.worker import Command as PrefillCommand
from runtime.clock import SystemClock
from runtime.kv_event_log import KVEventLog

WAIT_S = 30.0  # only ever reached by a test that fails
_SECRET = b"a secret of the tests"


@dataclass
class Outcome:
    """What a router would have heard of one request."""

    first: common_pb2.TokenOutput | None = None
    tokens: list[common_pb2.TokenOutput] = field(default_factory=list)
    prefill_done: internal_pb2.PrefillDone | None = None
    decode_done: internal_pb2.DecodeDone | None = None
    prefill_error: common_pb2.Error | None = None
    decode_error: common_pb2.Error | None = None

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]


class WorkerPair:
    """Use as a context manager: leaving it insists that both workers are at rest with every block back."""

    def __init__(
        self,
        model: Path,
        cache_dir: Path,
        *,
        transport: str = "memory",
        faults: FaultPlan | None = None,
        verify_checksums: bool = True,
        num_blocks: int = 32,
        lease_s: float = 10.0,
        **options: Any,
    ) -> None:
        settings: dict[str, Any] = {"block_size": 8, "token_budget": 16, "max_num_seqs": 8, **options}
        self.options = EngineOptions(model=str(model), cache_dir=cache_dir, num_blocks=num_blocks, **settings)
        self.plan: EnginePlan = plan_engine(self.options, available_bytes=None)
        self.clock = SystemClock()
        self.fatal: list[Exception] = []
        network: dict[str, Any] = {"network": MemoryNetwork()} if transport == "memory" else {}
        self._pools = [MemoryRegion.allocate(self.plan.pool_bytes, shared=shared) for shared in (False, True)]
        self._ids = itertools.count(1)
        self.prefill_log, self.decode_log = KVEventLog(), KVEventLog()
        self._start_decode(transport, lease_s, verify_checksums, network)
        self._start_prefill(transport, faults, network)

    def _start_decode(self, transport: str, lease_s: float, verify: bool, network: dict[str, Any]) -> None:
        engine = build_engine(self.options, self.plan, self._pools[1].buffer, prefill_only=False)
        self.receiver = HandoffReceiver(
            self._identity("decode", self._pools[1]),
            bind_host="127.0.0.1",
            transports=(transport,),
            lease_s=lease_s,
            verify_checksums=verify,
            clock=self.clock,
            on_event=lambda event: self.decode.notify(event),
            **network,
        )
        limits = self.plan.limits
        self._decode_worker = DecodeWorker(engine, self.receiver, limits.vocab_size, self.decode_log, self.clock)
        self.decode_engine = engine
        self.decode: EngineLoop[DecodeCommand, DecodeView] = EngineLoop(
            self._decode_worker, clock=self.clock, max_inbox=64, on_fatal=self.fatal.append
        )
        self.receiver.start()
        self.decode.start()

    def _start_prefill(self, transport: str, faults: FaultPlan | None, network: dict[str, Any]) -> None:
        engine = build_engine(self.options, self.plan, self._pools[0].buffer, prefill_only=True)
        self.sender = HandoffSender(
            self._identity("prefill", self._pools[0]),
            transports=(transport,),
            clock=self.clock,
            on_event=self._on_send_event,
            faults=faults,
            **network,
        )
        self._prefill_worker = PrefillWorker(
            engine, self.sender, self.plan.layout.num_layers, self.prefill_log, self.clock
        )
        self.prefill_engine = engine
        self.prefill: EngineLoop[PrefillCommand, PrefillView] = EngineLoop(
            self._prefill_worker, clock=self.clock, max_inbox=64, on_fatal=self.fatal.append
        )
        self.prefill.start()

    def _on_send_event(self, event: SendEvent) -> None:
        if isinstance(event, Sent):
            self._prefill_worker.report_sent(event)
        self.prefill.notify(event)

    def _identity(self, name: str, pool: MemoryRegion) -> Identity:
        return Identity(name, name.encode().ljust(16, b"."), _SECRET, self.plan.layout, pool)

    def __enter__(self) -> "WorkerPair":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if error is None:
                self.wait_at_rest()
        finally:
            self.sender.close(10.0)
            self.receiver.close(10.0)
            self.prefill.stop(10.0)
            self.decode.stop(10.0)

    # ---- what a router does

    def admit(
        self,
        prompt: SequenceOf[int],
        sampling: common_pb2.SamplingParams,
        *,
        local_prefill: bool = False,
        deadline_s: float = WAIT_S,
        num_output_tokens: int = 0,
    ) -> "Request":
        """Admit on the decode worker; the request's events collect in it."""
        number = next(self._ids)
        message = internal_pb2.Admit(
            request_id=f"request-{number}",
            attempt=1,
            prompt_token_ids=prompt,
            num_output_tokens=num_output_tokens,
            sampling=sampling,
            local_prefill=local_prefill,
        )
        request = Request(message, session_id=number)
        self.decode.submit(
            AdmitRequest(
                session_id=number,
                request_id=message.request_id,
                attempt=1,
                sequence=build_sequence(message, self.plan.limits, sequence_id(number, message.request_id, 1)),
                local_prefill=local_prefill,
                deadline=self.clock.now() + deadline_s,
                emit=request.on_decode,
            )
        )
        return request

    def prefill_into(self, request: "Request", ticket: internal_pb2.Ticket, *, deadline_s: float = WAIT_S) -> None:
        """Send the prompt to the prefill worker."""
        now = self.clock.now()
        sequence = build_sequence(request.message, self.plan.limits, ticket.handoff_id)
        request.submit = Submit(sequence, ticket, now, now + deadline_s, request.on_prefill)
        self.prefill.submit(request.submit)

    def run(self, prompt: SequenceOf[int], sampling: common_pb2.SamplingParams, **admit: Any) -> Outcome:
        """One request to its end on both workers."""
        request = self.admit(prompt, sampling, **admit)
        if admit.get("local_prefill"):
            return request.wait(prefill=False)
        ticket = request.ticket()
        if ticket is None:
            return request.outcome
        self.prefill_into(request, ticket)
        return request.wait()

    def cancel(self, request: "Request") -> None:
        """Cancel on all workers that have it, as a router does when its client leaves."""
        self.decode.notify(CancelRequest(request.session_id, request.message.request_id, 1))
        if request.submit is not None:
            self.prefill.notify(Cancel(request.submit))

    def wait_at_rest(self) -> None:
        """Until no worker holds anything; then audit both."""
        deadline = self.clock.now() + WAIT_S
        while not self._at_rest():
            assert self.clock.now() < deadline, (self.prefill.snapshot, self.decode.snapshot)
            assert not self.fatal, self.fatal
            time.sleep(0.005)  # snapshots can only be looked at
        self.prefill.stop(10.0)
        self.decode.stop(10.0)
        for worker in (self._prefill_worker, self._decode_worker):
            worker.tick(self.clock.now())  # its thread has ended: the test owns it now
        for engine, log in ((self.prefill_engine, self.prefill_log), (self.decode_engine, self.decode_log)):
            engine.check_integrity()
            assert engine.is_idle
            assert engine.usage().available == engine.usage().total
            told = {block_hash for block_hash, _ in log.read(None, 0).changes}
            assert told == set(engine.block_manager.snapshot_hashes()), "routers believe in another cache"

    def _at_rest(self) -> bool:
        loads = (self.prefill.snapshot.view.load, self.decode.snapshot.view.load)
        busy = any(load.num_running + load.num_waiting + load.num_receiving for load in loads)
        return not busy and all(load.blocks.available == load.blocks.total for load in loads)


class Request:
    """The events of one request, from both workers."""

    def __init__(self, message: internal_pb2.Admit, session_id: int) -> None:
        self.message = message
        self.session_id = session_id  # a session of its own: events of a step are batched by session
        self.submit: Submit | None = None
        self.outcome = Outcome()
        self._events: queue.Queue[internal_pb2.DecodeEvent | internal_pb2.PrefillEvent] = queue.Queue()

    def on_decode(self, events: list[internal_pb2.DecodeEvent]) -> None:
        for event in events:
            self._events.put(event)

    def on_prefill(self, event: internal_pb2.PrefillEvent) -> None:
        self._events.put(event)

    def ticket(self) -> internal_pb2.Ticket | None:
        """The ticket; None when the decode worker refused."""
        event = self._events.get(timeout=WAIT_S)
        if event.WhichOneof("kind") == "ticket":
            assert isinstance(event, internal_pb2.DecodeEvent)
            return event.ticket
        self._take(event)
        return None

    def wait(self, *, prefill: bool = True) -> Outcome:
        """Until both workers (or only decode) have said their last word."""
        outcome = self.outcome
        while not (outcome.decode_done or outcome.decode_error) or (
            prefill and not (outcome.prefill_done or outcome.prefill_error)
        ):
            self._take(self._events.get(timeout=WAIT_S))
        return outcome

    def wait_prefill(self) -> Outcome:
        """Until the prefill worker has said its last word."""
        while not (self.outcome.prefill_done or self.outcome.prefill_error):
            self._take(self._events.get(timeout=WAIT_S))
        return self.outcome

    def _take(self, event: internal_pb2.DecodeEvent | internal_pb2.PrefillEvent) -> None:
        outcome = self.outcome
        if isinstance(event, internal_pb2.PrefillEvent):
            match event.WhichOneof("kind"):
                case "first_token":
                    outcome.first = event.first_token
                case "done":
                    outcome.prefill_done = event.done
                case _:
                    outcome.prefill_error = event.error
            return
        match event.WhichOneof("kind"):
            case "tokens":
                outcome.tokens.extend(event.tokens.tokens)
            case "done":
                outcome.decode_done = event.done
            case _:
                outcome.decode_error = event.failed

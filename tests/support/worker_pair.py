"""A prefill and a decode worker in one process: real engines, real hand-offs, no gRPC and no router."""

import itertools
import queue
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from decode_worker.export import Exporter, check_export
from decode_worker.hand_over import HandOvers
from decode_worker.job import AdmitRequest
from decode_worker.worker import CancelRequest, DecodeView, DecodeWorker, ExportEvent, sequence_id
from decode_worker.worker import Command as DecodeCommand
from engine.build import EnginePlan, build_engine, plan_engine
from engine.loop import EngineLoop
from engine.options import EngineOptions
from engine.wire import build_sequence
from kv_transfer.backlog import DEFAULT_MAX_BACKLOG_BYTES
from kv_transfer.events import SendEvent, Sent
from kv_transfer.faults import FaultPlan
from kv_transfer.identity import Identity
from kv_transfer.receiver import HandoffReceiver
from kv_transfer.region import MemoryRegion
from kv_transfer.sender import HandoffSender
from kv_transfer.transport_memory import MemoryNetwork
from kvferry_rpc import common_pb2, internal_pb2
from prefill_worker.job import Submit
from prefill_worker.pull import Puller
from prefill_worker.worker import Cancel, Nudge, PrefillView, PrefillWorker, PullEvent
from prefill_worker.worker import Command as PrefillCommand
from runtime.clock import Clock, SystemClock
from runtime.kv_event_log import KVEventLog
from runtime.tracing import TraceContext, Tracer
from tests.support.step_gate import StepGate

WAIT_S = 30.0  # only ever reached by a test that fails
_SECRET = b"a secret of the tests"


@dataclass
class Outcome:
    """What a router would have heard of one request."""

    first: common_pb2.TokenOutput | None = None
    verified: internal_pb2.HandoffVerified | None = None
    tokens: list[common_pb2.TokenOutput] = field(default_factory=list)
    scored_by_prefill: list[common_pb2.PromptTokenLogprob] = field(default_factory=list)
    scored_by_decode: list[common_pb2.PromptTokenLogprob] = field(default_factory=list)
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
        clock: Clock | None = None,
        pull_faults: FaultPlan | None = None,
        pull_patience_s: float = WAIT_S,
        max_backlog_bytes: int = DEFAULT_MAX_BACKLOG_BYTES,
        tracers: tuple[Tracer | None, Tracer | None] = (None, None),
        **options: Any,
    ) -> None:
        """`tracers`: of the prefill worker and of the decode worker."""
        self._tracers = tracers
        settings: dict[str, Any] = {"block_size": 8, "token_budget": 16, "max_num_seqs": 8, **options}
        self.options = EngineOptions(model=str(model), cache_dir=cache_dir, num_blocks=num_blocks, **settings)
        self.plan: EnginePlan = plan_engine(self.options, available_bytes=None)
        self.clock = clock or SystemClock()
        self.fatal: list[Exception] = []
        network: dict[str, Any] = {"network": MemoryNetwork()} if transport == "memory" else {}
        self._pools = [MemoryRegion.allocate(self.plan.pool_bytes, shared=True) for _ in range(2)]
        self._ids = itertools.count(1)
        self.prefill_log, self.decode_log = KVEventLog(), KVEventLog()
        common = {"transports": (transport,), "clock": self.clock, **network}
        self._start_decode(common, lease_s, verify_checksums, pull_faults)
        sending = {"faults": faults, "max_backlog_bytes": max_backlog_bytes, **common}
        self._start_prefill(common, sending, lease_s, pull_patience_s)
        self.trace: TraceContext | None = None  # Where the spans of the next requests belong.
        self.exports = True  # whether this router carries the tickets of pulls

    def _start_decode(self, common: dict[str, Any], lease_s: float, verify: bool, faults: FaultPlan | None) -> None:
        engine = build_engine(self.options, self.plan, self._pools[1].buffer, prefill_only=False)
        identity = self._identity("decode", self._pools[1])
        self.receiver = HandoffReceiver(
            identity,
            bind_host="127.0.0.1",
            lease_s=lease_s,
            verify_checksums=verify,
            on_event=lambda event: self.decode.notify(event),
            **common,
        )
        self.export_sender = HandoffSender(
            identity, on_event=lambda event: self.decode.notify(ExportEvent(event)), faults=faults, **common
        )
        exporter = Exporter(engine, self.export_sender, self.plan.layout)
        vocab_size = self.plan.limits.vocab_size
        hand_overs = HandOvers(engine, self.export_sender, self.plan.layout)
        self._decode_worker = DecodeWorker(
            engine, self.receiver, exporter, hand_overs, vocab_size, self.decode_log, self.clock, self._tracers[1]
        )
        self.decode_gate = StepGate(self._decode_worker)
        self.decode_engine = engine
        self.decode: EngineLoop[DecodeCommand, DecodeView] = EngineLoop(
            self._decode_worker, clock=self.clock, max_inbox=64
        )
        self.receiver.start()
        self.decode.start(self.fatal.append)

    def _start_prefill(
        self, common: dict[str, Any], sending: dict[str, Any], lease_s: float, patience_s: float
    ) -> None:
        engine = build_engine(self.options, self.plan, self._pools[0].buffer, prefill_only=True)
        identity, layout = self._identity("prefill", self._pools[0]), self.plan.layout
        self.sender = HandoffSender(
            identity,
            on_event=self._on_send_event,
            on_backlog=lambda: self.prefill.notify(Nudge()),
            **sending,
        )
        self.pull_receiver = HandoffReceiver(
            identity,
            bind_host="127.0.0.1",
            lease_s=lease_s,
            on_event=lambda event: self.prefill.notify(PullEvent(event)),
            **common,
        )
        self.pull_receiver.start()
        puller = Puller(engine, self.pull_receiver, layout.block_bytes, self.clock, patience_s=patience_s)
        self._prefill_worker = PrefillWorker(
            engine, self.sender, puller, layout.num_layers, self.prefill_log, self.clock, self._tracers[0]
        )
        self.prefill_gate = StepGate(self._prefill_worker)
        self.prefill_engine = engine
        self.prefill: EngineLoop[PrefillCommand, PrefillView] = EngineLoop(
            self._prefill_worker, clock=self.clock, max_inbox=64
        )
        self.prefill.start(self.fatal.append)

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
            for end in (self.sender, self.export_sender, self.receiver, self.pull_receiver):
                end.close(10.0)
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
        cache_salt: bytes = b"",
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
            cache_salt=cache_salt,
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
                trace=self.trace,
            )
        )
        return request

    def prefill_into(
        self,
        request: "Request",
        ticket: internal_pb2.Ticket,
        *,
        deadline_s: float = WAIT_S,
        source_tokens: int | None = None,
    ) -> None:
        """Send the prompt to the prefill worker; with `source_tokens`, as one that decode holds so many tokens of."""
        now = self.clock.now()
        sequence = build_sequence(request.message, self.plan.limits, ticket.handoff_id)
        source = None
        if source_tokens is not None:
            source = internal_pb2.KVSource(decode_worker="decode", num_tokens=source_tokens)

        def reply(event: internal_pb2.PrefillEvent) -> None:
            if event.WhichOneof("kind") != "pull":
                request.on_prefill(event)
            else:
                request.pull = event.pull
                if self.exports:
                    self.export(request, event.pull)

        request.submit = Submit(sequence, ticket, now, now + deadline_s, reply, source, trace=self.trace)
        self.prefill.submit(request.submit)

    def export(self, request: "Request", ticket: internal_pb2.Ticket, salt: bytes | None = None) -> None:
        """Carry a pull's ticket to the decode worker."""
        num_tokens = (ticket.first_block + len(ticket.block_ids)) * ticket.layout.block_size
        message = internal_pb2.Export(
            request_id=request.message.request_id,
            attempt=1,
            prompt_token_ids=request.message.prompt_token_ids[:num_tokens],
            cache_salt=request.message.cache_salt if salt is None else salt,
            ticket=ticket,
            deadline_ms=5000,
        )
        self.decode.notify(check_export(message, self.clock.now()))

    def run(
        self,
        prompt: SequenceOf[int],
        sampling: common_pb2.SamplingParams,
        *,
        source_tokens: int | None = None,
        **admit: Any,
    ) -> Outcome:
        """One request to its end on both workers."""
        request = self.admit(prompt, sampling, **admit)
        if admit.get("local_prefill"):
            return request.wait(prefill=False)
        ticket = request.ticket()
        if ticket is None:
            return request.outcome
        self.prefill_into(request, ticket, source_tokens=source_tokens)
        return request.wait()

    def cancel(self, request: "Request") -> None:
        """Cancel on all workers that have it, as a router does when its client leaves."""
        self.decode.notify(CancelRequest(request.session_id, request.message.request_id, 1))
        if request.submit is not None:
            self.prefill.notify(Cancel(request.submit))

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Until the workers' snapshots fulfil the condition."""
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline, (self.prefill.snapshot, self.decode.snapshot)
            assert not self.fatal, self.fatal
            time.sleep(0.005)  # snapshots can only be looked at

    def wait_at_rest(self) -> None:
        """Until no worker holds anything; then audit both."""
        self.wait_until(self._at_rest)
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
        self.pull: internal_pb2.Ticket | None = None
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
                case "prompt_logprobs":
                    assert outcome.first is None, "the first token came before the prompt was scored"
                    outcome.scored_by_prefill.extend(event.prompt_logprobs.tokens)
                case "first_token":
                    outcome.first = event.first_token
                case "done":
                    outcome.prefill_done = event.done
                case _:
                    outcome.prefill_error = event.error
            return
        match event.WhichOneof("kind"):
            case "verified":
                assert not outcome.tokens, "tokens came before the word that their KV is here"
                outcome.verified = event.verified
            case "prompt_logprobs":
                assert not outcome.tokens, "tokens came before the prompt was scored"
                outcome.scored_by_decode.extend(event.prompt_logprobs.tokens)
            case "tokens":
                outcome.tokens.extend(event.tokens.tokens)
            case "done":
                outcome.decode_done = event.done
            case _:
                outcome.decode_error = event.failed

"""A prefill worker's handler without threads: a test hands it one event after the other."""

from collections import deque
from typing import Any

from kvferry_rpc.common_pb2 import KVCacheLayout
from kvferry_rpc.internal_pb2 import KVSource, PrefillEvent, Ticket
from prefill_worker.job import Submit
from prefill_worker.pull import Puller
from prefill_worker.worker import PrefillWorker, PullEvent
from runtime.clock import ManualClock
from runtime.kv_event_log import KVEventLog
from tests.support.scripted_handoffs import ScriptedReceiver, ScriptedSender
from tests.support.toy_engine import ToyEngine, sequence
from tests.support.toy_model import ToyModel

MODEL = ToyModel()


class PrefillBench:
    """A worker with blocks of 8 tokens and steps of 8; calls are numbered, and so are their hand-offs."""

    def __init__(self, num_blocks: int = 16) -> None:
        self.toy = ToyEngine(MODEL, num_blocks=num_blocks, token_budget=8, prefill_only=True)
        self.inbox: deque[Any] = deque()
        self.sender = ScriptedSender(self.toy.cache, self.inbox)
        self.receiver = ScriptedReceiver(self.toy.cache, self.inbox, PullEvent)
        self.clock = ManualClock()
        puller = Puller(self.toy.engine, self.receiver, 4096, self.clock)  # type: ignore[arg-type]
        self.worker = PrefillWorker(
            self.toy.engine,
            self.sender,  # type: ignore[arg-type]
            puller,
            MODEL.num_layers,
            KVEventLog(),
            self.clock,
        )
        self.sender.on_sent = self.worker.report_sent
        self.heard: list[list[PrefillEvent]] = []
        self.calls: list[Submit] = []

    def submit(
        self,
        prompt: list[int],
        handoff_id: str,
        *,
        first_block: int = 0,
        blocks: int | None = None,
        source: KVSource | None = None,
        deadline: float = 10.0,
        salt: bytes = b"",
        layout: KVCacheLayout | None = None,
        awaits_constraint: bool = False,
    ) -> Submit:
        needed = -(-len(prompt) // 8) - first_block if blocks is None else blocks
        ticket = Ticket(
            handoff_id=handoff_id,
            attempt=1,
            first_block=first_block,
            block_ids=range(needed),
            layout=layout or MODEL.layout(8).to_proto(),
        )
        events: list[PrefillEvent] = []
        self.heard.append(events)
        seq = sequence(handoff_id, prompt, cache_salt=salt)
        submit = Submit(seq, ticket, self.clock.now(), deadline, events.append, source, awaits_constraint)
        self.calls.append(submit)
        self.worker.handle(submit)
        return submit

    def compute(self) -> None:
        while self.worker.step():
            self.sender.check()

    def deliver(self) -> None:
        while self.inbox:
            self.worker.handle(self.inbox.popleft())

    def kinds(self, call: int = 0) -> list[str | None]:
        return [event.WhichOneof("kind") for event in self.heard[call]]

    def error(self, call: int = 0) -> int:
        return self.heard[call][-1].error.code

    def assert_whole(self) -> None:
        self.worker.tick(self.clock.now())
        assert self.toy.engine.is_idle
        self.toy.engine.check_integrity()

"""A decode worker's handler without threads: a test hands it one event after the other."""

from collections import deque
from typing import Any

from decode_worker.export import Exporter
from decode_worker.hand_over import HandOvers
from decode_worker.job import AdmitRequest
from decode_worker.worker import CancelRequest, DecodeWorker, ExportEvent, sequence_id
from engine.sequence import SamplingParams
from kvferry_rpc.common_pb2 import TokenOutput
from kvferry_rpc.internal_pb2 import DecodeEvent
from runtime.clock import ManualClock
from runtime.kv_event_log import KVEventLog
from tests.support.scripted_handoffs import ScriptedReceiver, ScriptedSender
from tests.support.toy_engine import ToyEngine, sequence
from tests.support.toy_model import VOCAB_SIZE, ToyModel

MODEL = ToyModel()
PROMPT = list(range(1, 31))
TOKEN = TokenOutput(token_id=5).SerializeToString()


class DecodeBench:
    """A worker with eight blocks of 8 tokens, and what two routers hear from it."""

    def __init__(self, num_blocks: int = 8, speculative_tokens: int = 0) -> None:
        self.toy = ToyEngine(MODEL, num_blocks=num_blocks, speculative_tokens=speculative_tokens)
        self.inbox: deque[Any] = deque()
        self.receiver = ScriptedReceiver(self.toy.cache, self.inbox)
        self.clock = ManualClock()
        self.log = KVEventLog()
        self.sender = ScriptedSender(self.toy.cache, self.inbox, ExportEvent)
        exporter = Exporter(self.toy.engine, self.sender, self.toy.cache.layout)  # type: ignore[arg-type]
        self.worker = DecodeWorker(
            self.toy.engine,
            self.receiver,  # type: ignore[arg-type]
            exporter,
            HandOvers(self.toy.engine, self.sender, self.toy.cache.layout),  # type: ignore[arg-type]
            VOCAB_SIZE,
            self.log,
            self.clock,
        )
        self.heard: dict[int, list[DecodeEvent]] = {1: [], 2: []}
        self.messages = 0

    def admit(
        self,
        name: str = "r",
        session: int = 1,
        *,
        local: bool = False,
        max_tokens: int = 4,
        sampling: SamplingParams | None = None,
    ) -> None:
        def emit(events: list[DecodeEvent]) -> None:
            self.messages += 1
            self.heard[session].extend(events)

        seq = sequence(sequence_id(session, name, 1), PROMPT, max_tokens=max_tokens, sampling=sampling)
        self.worker.handle(AdmitRequest(session, name, 1, seq, local, 10.0, emit))

    def cancel(self, name: str = "r", session: int = 1) -> None:
        self.worker.handle(CancelRequest(session, name, 1))

    def deliver(self) -> None:
        while self.inbox:
            self.worker.handle(self.inbox.popleft())

    def run(self) -> None:
        while self.worker.has_work:
            self.worker.step()

    def kinds(self, session: int = 1) -> list[str | None]:
        return [event.WhichOneof("kind") for event in self.heard[session]]

    def assert_whole(self) -> None:
        self.worker.tick(self.clock.now())
        assert self.toy.engine.is_idle
        self.toy.engine.check_integrity()

"""Cancels, failures, commits, fences, deadlines and lost sessions in random order, on one worker at a time.

Whatever the order: the worker goes on, each request hears exactly one last word (or none, if nobody listens), nobody
touches blocks that a peer still uses, and in the end nothing is held.
"""

import random
from collections import deque
from typing import Any

import pytest

from decode_worker.export import Exporter, ExportRequest
from decode_worker.hand_over import HandOverRequest, HandOvers, PauseRequest, ResumeRequest
from decode_worker.job import AdmitRequest
from decode_worker.worker import CancelRequest, DecodeWorker, ExportEvent, SessionClosed, sequence_id
from kv_cache.block_hash import BlockHasher
from kv_transfer.events import Committed
from kvferry_rpc.common_pb2 import TokenOutput
from kvferry_rpc.internal_pb2 import DecodeEvent, KVSource, PrefillEvent, Ticket
from prefill_worker.job import Submit
from prefill_worker.pull import Puller
from prefill_worker.worker import Cancel, PrefillWorker, PullEvent
from runtime.clock import ManualClock
from runtime.errors import ErrorCode, KvferryError
from runtime.kv_event_log import KVEventLog
from tests.support.scripted_handoffs import ScriptedReceiver, ScriptedSender
from tests.support.toy_engine import ToyEngine, sequence
from tests.support.toy_model import VOCAB_SIZE, ToyModel

MODEL = ToyModel()
LAYOUT = MODEL.layout(8)
HASHER = BlockHasher.for_layout(LAYOUT)
STEPS = 250
BASE = [(7 * i * i + 3 * i + 1) % (VOCAB_SIZE - 1) + 1 for i in range(48)]


def random_prompt(rng: random.Random) -> list[int]:
    """Half of them with a prefix that others have too."""
    length = rng.choice((0, 1, 7, 8, 9, 16, 24, 40))
    prefix = BASE[:length] if rng.random() < 0.5 else [rng.randrange(1, VOCAB_SIZE) for _ in range(length)]
    return [*prefix, rng.randrange(1, VOCAB_SIZE)]


class World:
    """One worker between a scripted sender and a scripted receiver, and an inbox that lags."""

    worker: Any
    sender: ScriptedSender
    receiver: ScriptedReceiver

    def __init__(self, rng: random.Random, toy: ToyEngine) -> None:
        self.rng = rng
        self.toy = toy
        self.inbox: deque[Any] = deque()
        self.clock = ManualClock()
        self.log = KVEventLog()

    def deliver(self) -> None:
        if self.inbox:
            self.worker.handle(self.inbox.popleft())

    def step(self) -> None:
        if self.worker.has_work:
            self.worker.step()
        self.receiver.check()
        self.sender.check()

    def tick(self) -> None:
        self.clock.advance(self.rng.random() * 0.2)
        self.worker.tick(self.clock.now())

    @property
    def has_loose_ends(self) -> bool:
        """Whether anything is still to be delivered, ended or computed."""
        under_way = self.receiver.failed or self.receiver.live or self.sender.open_handoffs
        return bool(self.inbox or under_way or self.worker.has_work)

    def check_nothing_held(self) -> None:
        assert not self.worker._jobs
        assert not self.worker.has_timers
        assert not self.receiver.committed, "what was committed was never released"
        assert self.toy.engine.is_idle
        self.toy.engine.check_integrity()
        told = {block_hash for block_hash, _ in self.log.read(None, 0).changes}
        assert told == set(self.toy.blocks.snapshot_hashes())


class DecodeWorld(World):
    """A decode worker, and three routers' sessions."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng, ToyEngine(MODEL, num_blocks=10, token_budget=11, max_num_seqs=4, max_waiting=3))
        for layer in range(MODEL.num_layers):
            self.toy.cache.k(layer).zero_()
            self.toy.cache.v(layer).zero_()
        self.receiver = ScriptedReceiver(self.toy.cache, self.inbox)
        self.sender = ScriptedSender(self.toy.cache, self.inbox, ExportEvent)
        self.exported = self.moves = self.handed_over = 0
        self.worker = DecodeWorker(
            self.toy.engine,
            self.receiver,  # type: ignore[arg-type]
            Exporter(self.toy.engine, self.sender, LAYOUT),  # type: ignore[arg-type]
            HandOvers(self.toy.engine, self.sender, LAYOUT),  # type: ignore[arg-type]
            VOCAB_SIZE,
            self.log,
            self.clock,
        )
        self.heard: dict[str, list[DecodeEvent]] = {}
        self.unwanted: set[str] = set()
        self.sessions = [1, 2, 3]
        self.next_session = 4

    def act(self) -> None:
        choices = [self.admit, self.cancel, self.deliver, self.deliver, self.deliver, self.step, self.step]
        choices += [self.commit, self.commit, self.fail, self.fence, self.tick, self.export, self.end_export]
        choices += [self.pause, self.pause, self.resume, self.hand_over]
        if self.rng.random() < 0.02:
            choices = [self.close_session]
        self.rng.choice(choices)()

    def admit(self) -> None:
        session, name = self.rng.choice(self.sessions), f"r{self.rng.randrange(12)}"
        seq_id = sequence_id(session, name, 1)
        if seq_id in self.heard:
            return  # the server lets a session use a name once
        seq = sequence(seq_id, random_prompt(self.rng), max_tokens=self.rng.choice((1, 2, 9, 30)))
        self.heard[seq_id] = []
        if self.rng.random() < 0.05:
            self.receiver.refuse_next = KvferryError(ErrorCode.OVERLOADED, "scripted")
        deadline = self.clock.now() + self.rng.choice((0.5, 5.0, 50.0))
        local = self.rng.random() < 0.3
        self.inbox.append(AdmitRequest(session, name, 1, seq, local, deadline, self.hear_of(session)))

    def hear_of(self, session: int) -> Any:
        def emit(events: list[DecodeEvent]) -> None:
            for event in events:
                self.heard[sequence_id(session, event.request_id, event.attempt)].append(event)

        return emit

    def cancel(self) -> None:
        session, name = self.rng.choice(self.sessions), f"r{self.rng.randrange(12)}"
        self.unwanted.add(sequence_id(session, name, 1))
        self.inbox.append(CancelRequest(session, name, 1))

    def close_session(self) -> None:
        session = self.sessions.pop(self.rng.randrange(3))
        self.sessions.append(self.next_session)
        self.next_session += 1
        self.unwanted.update(key for key in self.heard if key.startswith(f"{session}/"))
        self.inbox.append(SessionClosed(session))

    def export(self) -> None:
        name, blocks = f"x{self.rng.randrange(6)}", self.rng.randrange(1, 6)
        first = self.rng.randrange(blocks)
        ticket = Ticket(handoff_id=name, first_block=first, block_ids=range(blocks - first), layout=LAYOUT.to_proto())
        self.inbox.append(ExportRequest(tuple(BASE[: 8 * blocks]), b"", ticket, self.clock.now() + 5.0))

    def pause(self) -> None:
        if self.heard:
            self.inbox.append(PauseRequest(self.rng.choice(list(self.heard))))

    def resume(self) -> None:
        if self.heard and self.rng.random() < 0.3:
            self.inbox.append(ResumeRequest(self.rng.choice(list(self.heard))))

    def hand_over(self) -> None:
        for seq_id in sorted(self.worker._hand_overs.paused):
            seq = self.toy.engine.get(seq_id)
            assert seq is not None, "it stands still, and is not here"
            blocks, name = -(-(seq.num_tokens - 1) // 8), f"m{self.moves}"
            self.moves += 1
            first = self.rng.randrange(blocks + 1)
            ids = range(blocks - first)
            ticket = Ticket(handoff_id=name, first_block=first, block_ids=ids, layout=LAYOUT.to_proto())
            if self.rng.random() < 0.1:
                self.sender.refuse_next = ValueError("scripted")
            self.worker.handle(HandOverRequest(seq_id, ticket))

    def end_export(self) -> None:
        for name, outgoing in self.rng.sample(list(self.sender.open_handoffs.items()), len(self.sender.open_handoffs)):
            self.exported += outgoing.committed and name[0] == "x"
            self.handed_over += outgoing.committed and name[0] == "m"
            if outgoing.over:
                self.sender.drain(name)
            elif self.rng.random() < 0.7:
                self.sender.sent(name)
            else:
                self.sender.fail(name, KvferryError(ErrorCode.HANDOFF_FAILED, "scripted"))
            if self.rng.random() < 0.5:
                return

    def commit(self) -> None:
        if self.receiver.live:
            handoff_id = self.rng.choice(list(self.receiver.live))
            token = TokenOutput(token_id=self.rng.choice((1, 2, 3, VOCAB_SIZE)))  # the last one is out of range
            data = b"\xff" if self.rng.random() < 0.1 else token.SerializeToString()
            self.receiver.commit(handoff_id, data, num_tokens=1000 if self.rng.random() < 0.1 else None)

    def fail(self) -> None:
        if self.receiver.live:
            handoff_id = self.rng.choice(list(self.receiver.live))
            self.receiver.fail(handoff_id, KvferryError(ErrorCode.HANDOFF_FAILED, "scripted"))

    def fence(self) -> None:
        if self.receiver.failed:
            self.receiver.fence(self.rng.choice(list(self.receiver.failed)))

    def settle(self) -> None:
        """No more requests: every hand-off ends, everything is delivered, the rest is computed or times out."""
        for handoff_id in list(self.receiver.live):
            self.receiver.fail(handoff_id, KvferryError(ErrorCode.HANDOFF_FAILED, "scripted"))
        while self.has_loose_ends:
            self.end_export()
            for handoff_id in list(self.receiver.failed):
                self.receiver.fence(handoff_id)
            for handoff_id in list(self.receiver.live):  # admitted only now
                self.receiver.fail(handoff_id, KvferryError(ErrorCode.HANDOFF_FAILED, "scripted"))
            self.inbox += [ResumeRequest(seq_id) for seq_id in sorted(self.worker._hand_overs.paused)]
            self.deliver()
            self.step()
        self.worker.tick(self.clock.now())

    def check_at_rest(self) -> None:
        self.check_nothing_held()
        moves = self.worker._hand_overs
        assert (len(moves), moves.paused, self.worker._leaving) == (0, set(), {})
        assert not self.worker._seq_of
        assert not self.worker._quarantines
        assert not self.worker._outbox
        assert not self.worker._exporter
        for seq_id, events in self.heard.items():
            kinds = [event.WhichOneof("kind") for event in events]
            last_words = [kind for kind in kinds if kind in ("done", "failed", "handed_over")]
            assert len(last_words) == 1 or (not last_words and seq_id in self.unwanted), (seq_id, kinds)
            assert not last_words or kinds[-1] == last_words[0], (seq_id, kinds)
            assert "ticket" not in kinds[1:], (seq_id, kinds)


class PrefillWorld(World):
    """A prefill worker. Some calls repeat another call's ticket."""

    def __init__(self, rng: random.Random) -> None:
        num_blocks = rng.choice((7, 14))
        limits = {"token_budget": 11, "max_num_seqs": 3, "max_waiting": 4}
        super().__init__(rng, ToyEngine(MODEL, num_blocks=num_blocks, prefill_only=True, **limits))
        self.sender = ScriptedSender(self.toy.cache, self.inbox)
        self.receiver = ScriptedReceiver(self.toy.cache, self.inbox, PullEvent)
        self.names: dict[str, bytes] = {}  # of what each pull wants
        self.pulled = 0
        self.worker = PrefillWorker(
            self.toy.engine,
            self.sender,  # type: ignore[arg-type]
            Puller(self.toy.engine, self.receiver, 64, self.clock),  # type: ignore[arg-type]
            MODEL.num_layers,
            self.log,
            self.clock,
        )
        self.sender.on_sent = self.worker.report_sent
        self.calls: list[Submit] = []
        self.heard: list[list[PrefillEvent]] = []
        self.unwanted: set[int] = set()

    def act(self) -> None:
        choices = [self.submit, self.cancel, self.deliver, self.deliver, self.deliver, self.step, self.step]
        choices += [self.sent, self.sent, self.fail, self.tick, self.end_pull, self.end_pull, self.hold_back]
        if self.rng.random() < 0.3:
            choices = [self.drain]
        self.sender.sent_at_once = self.rng.random() < 0.2
        self.rng.choice(choices)()

    def submit(self) -> None:
        number, prompt = len(self.calls), random_prompt(self.rng)
        ticket = Ticket(
            handoff_id=f"h{number}",
            attempt=1,
            first_block=0,
            block_ids=range(-(-len(prompt) // 8)),
            layout=LAYOUT.to_proto(),
        )
        if self.calls and self.rng.random() < 0.2:
            again = self.rng.choice(self.calls[-4:])
            ticket, prompt = again.ticket, list(again.sequence.token_ids[: again.sequence.num_arrival_tokens])
        elif self.rng.random() < 0.1:
            self.sender.refuse_next = self.rng.choice(
                (ValueError("scripted"), KvferryError(ErrorCode.UNAVAILABLE, "scripted"))
            )
        events: list[PrefillEvent] = []
        self.heard.append(events)
        deadline = self.clock.now() + self.rng.choice((0.5, 5.0, 50.0))
        seq = sequence(ticket.handoff_id, prompt)
        source = KVSource(decode_worker=f"d{self.rng.randrange(50)}", num_tokens=self.rng.choice((0, 8, 40)))
        given = source if self.rng.random() < 0.6 else None

        def reply(event: PrefillEvent) -> None:
            events.append(event)
            if event.WhichOneof("kind") == "pull":
                wanted = event.pull.first_block + len(event.pull.block_ids)
                self.names[event.pull.handoff_id] = HASHER.hash_blocks(prompt)[wanted - 1]

        self.calls.append(Submit(seq, ticket, self.clock.now(), deadline, reply, given))
        self.inbox.append(self.calls[-1])

    def end_pull(self) -> None:
        if self.receiver.failed and self.rng.random() < 0.5:
            self.receiver.fence(self.rng.choice(list(self.receiver.failed)))
        elif self.receiver.live:
            handoff_id = self.rng.choice(list(self.receiver.live))
            if self.rng.random() < 0.8:
                is_right = self.rng.random() < 0.8
                self.receiver.commit(handoff_id, self.names[handoff_id] if is_right else b"another text")
                self.pulled += is_right
            else:
                self.receiver.fail(handoff_id, KvferryError(ErrorCode.HANDOFF_FAILED, "scripted"))

    def hold_back(self) -> None:
        """Some links fall behind, others catch up."""
        self.sender.behind = {key for key in self.sender.open_handoffs if self.rng.random() < 0.3}

    def cancel(self) -> None:
        if self.calls:
            number = self.rng.randrange(max(0, len(self.calls) - 8), len(self.calls))
            self.unwanted.add(number)
            self.inbox.append(Cancel(self.calls[number]))

    def sent(self) -> None:
        ready = [key for key, outgoing in self.sender.open_handoffs.items() if outgoing.committed and not outgoing.over]
        if ready:
            self.sender.sent(self.rng.choice(ready))

    def fail(self) -> None:
        live = [key for key, outgoing in self.sender.open_handoffs.items() if not outgoing.over]
        if live:
            self.sender.fail(self.rng.choice(live), KvferryError(ErrorCode.HANDOFF_FAILED, "scripted"))

    def drain(self) -> None:
        over = [key for key, outgoing in self.sender.open_handoffs.items() if outgoing.over]
        if len(over) > 2 or (over and self.rng.random() < 0.2):
            self.sender.drain(self.rng.choice(over))

    def settle(self) -> None:
        """No more calls: everything is delivered and computed, every hand-off ends."""
        while self.has_loose_ends:
            self.sender.behind = set()
            self.end_pull()
            self.sent()
            self.drain()
            self.deliver()
            self.step()
        self.worker.tick(self.clock.now())

    def check_at_rest(self) -> None:
        self.check_nothing_held()
        assert not self.worker._unanswered
        assert not self.worker._puller
        for number, events in enumerate(self.heard):
            kinds = [event.WhichOneof("kind") for event in events]
            kinds = kinds[kinds[:1] == ["pull"] :]
            allowed = [["error"], ["first_token", "done"], ["first_token", "error"]]
            if number in self.unwanted:
                allowed += [[], ["first_token"]]
            assert kinds in allowed, (number, kinds)


@pytest.mark.parametrize("world", [DecodeWorld, PrefillWorld])
@pytest.mark.parametrize("seed", range(12))
def test_no_order_of_events_breaks_a_worker_or_leaves_anything_held(
    world: type[DecodeWorld] | type[PrefillWorld], seed: int
) -> None:
    here = world(random.Random(seed))
    for _ in range(STEPS):
        here.act()
    here.settle()
    here.check_at_rest()


def test_the_orders_tried_reach_every_kind_of_end() -> None:
    """The test above would prove little if its random worlds never committed, preempted, timed out or repeated."""
    ends: set[tuple[str | None, int]] = set()
    committed = pulled = exported = handed_over = 0
    for seed in range(4):
        decode = DecodeWorld(random.Random(seed))
        prefill = PrefillWorld(random.Random(seed))
        for _ in range(3 * STEPS):
            decode.act()
            prefill.act()
            committed += any(isinstance(event, Committed) for event in list(decode.inbox)[-1:])
        decode.settle()
        prefill.settle()
        ends |= {(event.WhichOneof("kind"), event.failed.code) for told in decode.heard.values() for event in told}
        ends |= {(event.WhichOneof("kind"), event.error.code) for told in prefill.heard for event in told}
        pulled += prefill.pulled
        exported, handed_over = exported + decode.exported, handed_over + decode.handed_over
    for code in (ErrorCode.OVERLOADED, ErrorCode.HANDOFF_FAILED, ErrorCode.DEADLINE_EXCEEDED):
        assert ("failed", code) in ends
        assert ("error", code) in ends
    assert ("error", ErrorCode.INVALID_REQUEST) in ends
    assert ("done", 0) in ends
    assert min(committed, pulled, exported, handed_over) > 0

"""Both hand-off tables on a simulated network and a hand-moved clock, stepped in an order drawn from a seed.

Nothing here has a thread: a step is one message delivered, one write begun or ended, one abort, one lost link, one jump
of the clock. Memory is modelled as one value a page, so that a write that lands where it must not is seen at once.

Payload travels in one of three ways:
* IN_BAND (tcp; ucx looks the same from here): behind its Write, and the receiver puts it into the pool;
* LANDED (shm): into the pool, and then the Write is sent;
* ANNOUNCED (nixl): the Write is sent, then it lands by itself; the receiver waits for that, or until its link ends.
"""

import random
import zlib
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from kv_transfer import fingerprint
from kv_transfer.handoff import (
    CloseLink,
    Effect,
    Failure,
    Post,
    ReportCommitted,
    ReportDrained,
    ReportFailed,
    ReportFenced,
    ReportSent,
)
from kv_transfer.messages import Abort, Commit, Fence, Open, Renew, Write
from kv_transfer.outbound import OutboundHandoff
from kv_transfer.receive_table import ReceiveCounts, ReceiveTable
from kv_transfer.records import CommitRecord
from kv_transfer.send_table import SendTable, Work
from tests.support.kv_pair import LAYOUT

LEASE_S = 6.0
ANSWER_S = 5.0
NUM_BLOCKS = 12
Page = tuple[int, int]


class Way(Enum):
    """How payload travels."""

    IN_BAND = "in-band"
    LANDED = "landed"
    ANNOUNCED = "announced"


@dataclass
class Payload:
    """What one Write brings: a value for each page. `landed`: it is in the pool."""

    pages: dict[Page, Any]
    landed: bool = False


@dataclass
class Wire:
    """One link: frames under way each way, and how far each end has come in ending it."""

    number: int
    to_receiver: deque[Any] = field(default_factory=deque)
    to_sender: deque[Any] = field(default_factory=deque)
    receiving: tuple[Write, Payload, int] | None = None
    broken: bool = False
    sender_gone: bool = False
    receiver_failed: bool = False
    receiver_closed: bool = False

    def break_off(self) -> None:
        self.broken = True
        self.to_sender.clear()


class HandoffSim:
    """One schedule. `run` raises AssertionError at the first thing that must not happen."""

    def __init__(self, seed: int, *, way: Way, faults: bool) -> None:
        self.random = random.Random(seed)
        self.way = way
        self.one_sided = way is not Way.IN_BAND
        self.faults = faults
        self.now = 0.0
        self.receiver = ReceiveTable(
            num_blocks=NUM_BLOCKS,
            num_layers=LAYOUT.num_layers,
            page_bytes=LAYOUT.page_bytes,
            incarnation=b"i" * 16,
            lease_s=LEASE_S,
            verify=True,
        )
        self.sender = SendTable(answer_timeout_s=ANSWER_S)
        self.wires: list[Wire] = []
        self.pool: dict[Page, Any] = {}
        self.free = list(range(NUM_BLOCKS))
        self.places: dict[str, tuple[int, tuple[int, ...]]] = {}
        self.received: dict[str, list[str]] = {}
        self.sent: dict[str, list[str]] = {}
        self.fenced: set[str] = set()
        self.work: dict[int, tuple[Work, Payload]] = {}
        self.scripts: dict[str, list[Any]] = {}
        self.stopped = False

    def run(self, steps: int) -> None:
        """Random steps, then everything to its end."""
        for _ in range(steps):
            self.step()
        self.settle(kill=self.random.random() < 0.2)

    def settle(self, *, kill: bool) -> None:
        """Let everything come to its end: messages, leases, deadlines; or first kill the sender's process."""
        self.stopped = False
        if kill:
            self.scripts.clear()
            self.work.clear()
            for wire in self.wires:
                wire.broken = wire.sender_gone = True
        for _ in range(60):
            while self.scripts and not kill:
                self.advance_script()
            for _ in range(120):
                for wire in self.wires:
                    self.deliver_to_receiver(wire)
                    if not kill:
                        self.deliver_to_sender(wire)
                if not kill:
                    self.begin_work()
                    self.end_work()
            self.move_clock(2.0, kill=kill)
            if len(self.receiver) == 0 and (kill or len(self.sender) == 0):
                break
        self.check_end(kill=kill)

    def check_end(self, *, kill: bool) -> None:
        """Every hand-off has had its one ending on each side, and nothing is held."""
        assert self.receiver.counts() == ReceiveCounts(0, 0, 0, 0)
        assert self.receiver.next_expiry() is None
        assert sorted(self.free) == list(range(NUM_BLOCKS))
        for name in self.places:
            assert self.received[name] in (["ReportCommitted"], ["ReportFailed", "ReportFenced"]), name
        if kill:
            return
        assert len(self.sender) == 0
        for name, events in self.sent.items():
            assert events in (["ReportSent", "ReportDrained"], ["ReportFailed", "ReportDrained"]), name
            if events[0] == "ReportSent":
                assert self.received[name] == ["ReportCommitted"]

    # ---- steps

    def step(self) -> None:
        choices = [self.reserve_and_open] + [self.deliver] * 6 + [self.advance_script] * 4
        choices += [self.begin_work] * 3 + [self.end_work] * 3 + [self.move_clock]
        rare = [self.abort_receiver, self.abort_sender, self.break_wire, self.jump_clock, self.stop_or_go, self.forge]
        self.random.choice(rare if self.random.random() < 0.04 else choices)()

    def reserve_and_open(self) -> None:
        wanted = self.random.randint(0, 3)
        if len(self.free) < wanted or len(self.places) >= 40:
            return
        ids = tuple(self.free.pop(self.random.randrange(len(self.free))) for _ in range(wanted))
        first = self.random.randint(0, 2)
        name = f"h{len(self.places)}"
        self.places[name] = (first, ids)
        self.receiver.reserve(
            name, secret=b"s", attempt=1, first_block=first, block_ids=ids, num_tokens=9, now=self.now
        )
        if self.random.random() < 0.1:
            return  # A ticket that no sender ever uses.
        wire = self.live_wire()
        handoff = OutboundHandoff(
            handoff_id=name,
            attempt=1,
            incarnation=b"i" * 16,
            secret=b"s",
            first_block=first,
            block_ids=ids,
            lease_s=LEASE_S,
            deadline=self.now + self.random.choice((8.0, 60.0)),
            link=wire.number,
            layout=LAYOUT,
        )
        self.sent[name] = []
        end = first + wanted
        script: list[Any] = [("push", 0, range(end), range(layer, layer + 1)) for layer in range(LAYOUT.num_layers)]
        self.scripts[name] = [*script, ("commit",)]
        self.at_sender(self.sender.open(handoff, self.now))

    def advance_script(self) -> None:
        if self.stopped or not self.scripts:
            return
        name = self.random.choice(list(self.scripts))
        action = self.scripts[name].pop(0)
        if not self.scripts[name]:
            del self.scripts[name]
        if action[0] == "push":
            self.at_sender(self.sender.push(name, *action[1:]))
        else:
            self.at_sender(self.sender.commit(name, CommitRecord(9, b"t")))

    def deliver(self) -> None:
        if not self.wires:
            return
        wire = self.random.choice(self.wires)
        if self.random.random() < 0.5:
            self.deliver_to_receiver(wire)
        elif not self.stopped:
            self.deliver_to_sender(wire)

    def deliver_to_receiver(self, wire: Wire) -> None:
        if wire.receiving is not None:
            self.end_receive(wire)
        elif wire.to_receiver and not wire.receiver_failed:
            self.handle_at_receiver(wire, *self.take(wire.to_receiver))
        elif wire.broken and not wire.receiver_failed and not wire.to_receiver:
            wire.receiver_failed = True
            self.at_receiver(self.receiver.link_failed(wire.number, "lost"))
        elif wire.receiver_failed and not wire.receiver_closed and wire.sender_gone:
            wire.receiver_closed = True
            self.at_receiver(self.receiver.link_closed(wire.number))

    def deliver_to_sender(self, wire: Wire) -> None:
        if wire.to_sender and not wire.broken:
            message, _ = self.take(wire.to_sender)
            self.at_sender(self.sender.handle(wire.number, message, self.now))
        elif wire.broken and not wire.sender_gone:
            self.at_sender(self.sender.link_lost(wire.number, Failure("lost")))
            # The channel is closed only when the link's writer has left the peer's pool.
            wire.sender_gone = wire.number not in self.work or not self.one_sided

    def take(self, queue: deque[Any]) -> tuple[Any, Payload]:
        draw = self.random.random() if self.faults else 0.5
        if draw < 0.03 and len(queue) > 1:
            queue.rotate(-1)
        item: tuple[Any, Payload] = queue.popleft()
        if draw > 0.97:
            queue.append(item)
        if 0.94 < draw < 0.96 and queue:
            item = queue.popleft()  # The one before it is lost.
        return item

    def handle_at_receiver(self, wire: Wire, message: Any, payload: Payload) -> None:
        table, number = self.receiver, wire.number
        if isinstance(message, Write):
            seed, effects = table.begin_write(number, message, self.now)
            self.at_receiver(effects)
            if seed is not None:
                wire.receiving = (message, payload, seed)
        elif isinstance(message, Open):
            self.at_receiver(table.open(number, message, transport="t", one_sided=self.one_sided, now=self.now))
        elif isinstance(message, Commit):
            self.at_receiver(table.commit(number, message, self.now))
        elif isinstance(message, Renew):
            self.at_receiver(table.renew(number, message, self.now))
        elif isinstance(message, Abort):
            self.at_receiver(table.peer_abort(number, message))
        elif isinstance(message, Fence):
            self.at_receiver(table.fence(number, message))

    def end_receive(self, wire: Wire) -> None:
        """The payload is there, or (the link being broken off) will not be waited for any longer."""
        assert wire.receiving is not None
        message, payload, seed = wire.receiving
        landed = payload.landed
        if self.way is Way.IN_BAND:
            landed = not (wire.broken and self.random.random() < 0.5)
            self.land(message.handoff_id, payload)
        if not landed and not wire.broken:
            return
        wire.receiving = None
        found = self.fingerprints(message, seed) if landed else []
        self.at_receiver(self.receiver.end_write(message, landed=landed, fingerprints=found, now=self.now))

    def fingerprints(self, message: Write, seed: int) -> list[int]:
        """Of the pages that a Write names, as they are in the pool now."""
        layers = range(message.layer, message.layer + message.num_layers)
        return [fingerprint_of(self.pool.get((block, layer)), seed) for block in message.block_ids for layer in layers]

    def begin_work(self) -> None:
        if self.stopped or not self.wires:
            return
        wire = self.random.choice(self.wires)
        if wire.sender_gone or wire.number in self.work:
            return
        work = self.sender.next_work(wire.number, self.now)
        if work is None:
            return
        payload = Payload({})
        if work.run is not None:
            handoff = work.handoff
            seed = fingerprint.seed(handoff.handoff_id, handoff.attempt)
            for block in work.run.blocks:
                for layer in work.run.layers:
                    value = (handoff.handoff_id, block, layer)
                    handoff.fingerprints[handoff.page_number(block, layer)] = fingerprint_of(value, seed)
                    payload.pages[handoff.block_ids[block - handoff.first_block], layer] = value
            if self.way is Way.ANNOUNCED:
                self.send_write(wire, work, payload)
        self.work[wire.number] = (work, payload)

    def end_work(self) -> None:
        if self.stopped or not self.work:
            return
        number = self.random.choice(list(self.work))
        work, payload = self.work.pop(number)
        handoff = work.handoff
        if work.run is None:
            seed = fingerprint.seed(handoff.handoff_id, handoff.attempt)
            checksums = fingerprint.fold_blocks(handoff.fingerprints, LAYOUT.num_layers, seed)
            self.at_sender(self.sender.commit_built(handoff, checksums, b""))
            return
        if self.one_sided:
            self.land(handoff.handoff_id, payload)
        if self.way is not Way.ANNOUNCED:
            self.send_write(self.wires[number], work, payload)
        self.at_sender(self.sender.work_done(handoff, [work.run], self.now))

    def send_write(self, wire: Wire, work: Work, payload: Payload) -> None:
        assert work.run is not None
        handoff, blocks, layers = work.handoff, work.run.blocks, work.run.layers
        first = blocks.start - handoff.first_block
        ids = handoff.block_ids[first : first + len(blocks)]
        if not wire.broken:
            wire.to_receiver.append((Write(handoff.handoff_id, blocks.start, ids, layers.start, len(layers)), payload))

    def abort_receiver(self) -> None:
        if self.places:
            self.at_receiver(self.receiver.abort(self.random.choice(list(self.places)), Failure("cancelled")))

    def abort_sender(self) -> None:
        if self.places and not self.stopped:
            self.at_sender(self.sender.abort(self.random.choice(list(self.places)), Failure("cancelled")))

    def break_wire(self) -> None:
        if self.wires:
            self.random.choice(self.wires).break_off()

    def stop_or_go(self) -> None:
        self.stopped = not self.stopped

    def forge(self) -> None:
        """Another link says something about a hand-off that is not its own."""
        if not self.places or not self.wires:
            return
        name = self.random.choice(list(self.places))
        first, ids = self.places[name]
        forged = (
            Open(name, 1, b"i" * 16, b"wrong", "t"),
            Open(name, 2, b"i" * 16, b"s", "t"),
            Open(name, 1, b"j" * 16, b"s", "t"),
            Write(name, first, ids, 0, LAYOUT.num_layers),
            Commit(name, 9, b"", (1,) * len(ids), len(ids) * LAYOUT.num_layers),
            Abort(name, 7, "forged"),
            Fence(name),
            Renew((name,)),
        )
        before = {key: list(value) for key, value in self.received.items()}
        wire = Wire(10_000)
        self.handle_at_receiver(wire, self.random.choice(forged), Payload({}))
        assert wire.receiving is None, "a stranger may write"
        assert before == self.received, "a stranger changed something"

    def jump_clock(self) -> None:
        self.move_clock(self.random.choice((2.0, 7.0)))

    def move_clock(self, seconds: float = 0.25, *, kill: bool = False) -> None:
        self.now += seconds
        self.at_receiver(self.receiver.expire(self.now))
        if not self.stopped and not kill:
            self.at_sender(self.sender.expire(self.now))

    # ---- the world

    def land(self, name: str, payload: Payload) -> None:
        """Bytes reach the pool. Never after the fence, never after the commit."""
        assert name not in self.fenced, f"a write of {name} landed after its fence"
        assert "ReportCommitted" not in self.received.get(name, []), f"a write of {name} landed after its commit"
        self.pool.update(payload.pages)
        payload.landed = True

    def holds(self, name: str) -> bool:
        first, ids = self.places[name]
        pages = ((block, layer) for block in range(len(ids)) for layer in range(LAYOUT.num_layers))
        return all(self.pool.get((ids[b], layer)) == (name, first + b, layer) for b, layer in pages)

    def live_wire(self) -> Wire:
        for wire in self.wires:
            if not wire.broken:
                return wire
        wire = Wire(len(self.wires))
        self.wires.append(wire)
        self.sender.link_added(wire.number)
        self.at_sender(self.sender.link_ready(wire.number, "t", self.now))
        return wire

    def at_receiver(self, effects: list[Effect]) -> None:
        """Carry out what the decode side decided."""
        for effect in effects:
            if isinstance(effect, Post):
                if effect.link < len(self.wires) and not self.wires[effect.link].broken:
                    self.wires[effect.link].to_sender.append((effect.message, Payload({})))
            elif isinstance(effect, CloseLink):
                self.wires[effect.link].break_off()
            else:
                assert isinstance(effect, ReportCommitted | ReportFailed | ReportFenced)
                self.note_received(effect.handoff_id, type(effect).__name__)

    def at_sender(self, effects: list[Effect]) -> None:
        """Carry out what the prefill side decided."""
        for effect in effects:
            if isinstance(effect, Post):
                if not self.wires[effect.link].broken:
                    self.wires[effect.link].to_receiver.append((effect.message, Payload({})))
            elif isinstance(effect, CloseLink):
                self.wires[effect.link].break_off()
            elif isinstance(effect, ReportSent | ReportFailed | ReportDrained):
                self.sent[effect.handoff_id].append(type(effect).__name__)

    def note_received(self, name: str, kind: str) -> None:
        self.received.setdefault(name, []).append(kind)
        _, ids = self.places[name]
        if kind == "ReportCommitted":
            assert self.holds(name), f"{name} was committed with other content"
            self.receiver.release(name)
        if kind == "ReportFenced":
            self.fenced.add(name)
        if kind in ("ReportCommitted", "ReportFenced"):
            self.free.extend(ids)


def fingerprint_of(value: Any, seed: int) -> int:
    """Of one page that holds this value."""
    return zlib.crc32(repr(value).encode(), seed & 0xFFFFFFFF)

"""One life of a simulated prefill worker: a real send table, a real block manager, and a pool of page values."""

from collections import deque
from dataclasses import dataclass, field

from kv_cache.block_manager import BlockManager
from kv_transfer import fingerprint
from kv_transfer.handoff import LIVE, CloseLink, Effect, Failure, Post, ReportDrained, ReportFailed, ReportSent
from kv_transfer.messages import Write
from kv_transfer.outbound import OutboundHandoff
from kv_transfer.records import CommitRecord
from kv_transfer.send_table import SendTable, Work
from tests.support.sim_decode import DecodeLife
from tests.support.sim_network import (
    ANSWER_S,
    LAYERS,
    LAYOUT,
    LEASE_S,
    Page,
    Payload,
    SimTicket,
    Way,
    Wire,
    World,
    corrupt,
    page_fingerprint,
    take,
)

NUM_BLOCKS = 12
MAX_BACKLOG_BYTES = 3 * LAYOUT.page_bytes
ENDINGS = (["ReportSent", "ReportDrained"], ["ReportFailed", "ReportDrained"])


@dataclass
class Job:
    """One request from its ticket to `Drained`. `table`: its blocks, once the scheduler has let it in."""

    ticket: SimTicket
    table: tuple[int, ...] = ()
    todo: deque[tuple[int, int]] = field(default_factory=deque)  # (block, layer) to compute
    computing: bool = False
    over: bool = False
    quarantine_id: int | None = None


class PrefillLife:
    """What dies with the process. `events`: what its table has reported, by hand-off; `past`: of those drained."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.table = SendTable(answer_timeout_s=ANSWER_S, max_backlog_bytes=MAX_BACKLOG_BYTES)
        self.blocks = BlockManager(NUM_BLOCKS, LAYOUT.block_size)
        self.pool: dict[Page, int] = {}
        self.wires: dict[int, Wire] = {}
        self.outlets: dict[bytes, Wire] = {}
        self.working: dict[int, tuple[Work, Payload]] = {}
        self.inbox: deque[Effect] = deque()
        self.jobs: dict[str, Job] = {}
        self.events: dict[str, list[str]] = {}
        self.past: list[tuple[str, list[str]]] = []
        self.alive, self.stopped = True, False

    # ---- the worker, as prefill_worker/worker.py is

    def submit(self, ticket: SimTicket, deadline: float, new_number: int) -> bool:
        """Open the hand-off. False: it is open here already."""
        hid = ticket.handoff_id
        if hid in self.jobs:
            return False
        wire = self.outlets.get(ticket.incarnation)
        if wire is None:
            wire = self.wires[new_number] = self.outlets[ticket.incarnation] = Wire(new_number, self)
            wire.asked_at = self.world.now
            self.table.link_added(new_number)
        self.jobs[hid], self.events[hid] = Job(ticket), []
        handoff = OutboundHandoff(
            handoff_id=hid,
            attempt=ticket.attempt,
            incarnation=ticket.incarnation,
            secret=ticket.secret,
            first_block=ticket.first_block,
            block_ids=ticket.block_ids,
            lease_s=LEASE_S,
            deadline=deadline,
            link=wire.number,
            layout=LAYOUT,
            num_tokens=len(ticket.prompt.tokens),
        )
        self.apply(self.table.open(handoff, self.world.now))
        return True

    def compute(self, hid: str) -> bool:
        """Let the scheduler go on with a request: let it in, or compute one layer of one block and push it."""
        job, prompt = self.jobs[hid], self.jobs[hid].ticket.prompt
        if job.over or job.quarantine_id is not None:
            return False
        if not job.table:
            cached_most = (len(prompt.tokens) - 1) // LAYOUT.block_size
            allocation = self.blocks.allocate(hid, len(prompt.tokens), prompt.hashes, prompt.tokens, cached_most)
            if allocation is None:
                self.world.seen["prefill pool full"] += 1
                return False
            cached, job.table = allocation
            job.todo.extend((b, layer) for b in range(cached, len(prompt.pages)) for layer in range(LAYERS))
            if cached:
                self.apply(self.table.push(hid, 0, job.table[:cached], range(LAYERS)))
            return True
        if not self.table.may_push(hid):
            self.world.seen["held back"] += 1
            return False
        index, layer = job.todo.popleft()
        self.pool[job.table[index], layer] = prompt.pages[index][layer]
        self.apply(self.table.push(hid, index, job.table[index : index + 1], range(layer, layer + 1)))
        size = LAYOUT.block_size
        if layer == LAYERS - 1 and index < len(prompt.hashes):
            self.blocks.store(hid, index, prompt.hashes[index], prompt.tokens[index * size : (index + 1) * size])
        if not job.todo:
            job.quarantine_id = self.blocks.quarantine(hid)
            self.apply(self.table.commit(hid, CommitRecord(len(prompt.tokens), b"t")))
        return True

    def cancel(self, hid: str) -> None:
        """No more compute, no more writes. Idempotent."""
        job = self.jobs[hid]
        job.over = True
        if job.table and job.quarantine_id is None:
            job.quarantine_id = self.blocks.quarantine(hid)
        self.apply(self.table.abort(hid, Failure("cancelled")))

    def turn(self) -> bool:
        """The engine's thread takes one event."""
        if not self.inbox:
            return False
        event = self.inbox.popleft()
        if isinstance(event, ReportFailed):
            self.cancel(event.handoff_id)
        elif isinstance(event, ReportDrained):
            job = self.jobs.pop(event.handoff_id)
            assert job.over or job.quarantine_id is not None
            if job.quarantine_id is not None:
                self.blocks.release_quarantine(job.quarantine_id)
            self.past.append((event.handoff_id, self.events.pop(event.handoff_id)))
        return True

    # ---- the sender, as kv_transfer/sender.py is

    def apply(self, effects: list[Effect]) -> None:
        """Carry out what the table decided."""
        for effect in effects:
            if isinstance(effect, Post):
                wire = self.wires.get(effect.link)
                if wire is not None and not wire.sender_broken:
                    wire.to_receiver(effect.message)
            elif isinstance(effect, CloseLink):
                self.break_off(self.wires[effect.link])
            elif isinstance(effect, ReportSent | ReportFailed | ReportDrained):
                events = self.events[effect.handoff_id]
                events.append(type(effect).__name__)
                assert any(ending[: len(events)] == events for ending in ENDINGS), (effect.handoff_id, events)
                self.inbox.append(effect)

    def connect(self, wire: Wire, peer: DecodeLife) -> None:
        """The greeting is over."""
        wire.receiver = peer
        peer.wires[wire.number] = wire
        self.apply(self.table.link_ready(wire.number, "t", self.world.now))

    def unreachable(self, wire: Wire) -> None:
        """The greeting has failed."""
        self._lost(wire)
        wire.sender_closed = True
        del self.wires[wire.number]

    def break_off(self, wire: Wire) -> None:
        """The peer sees it at once, unless our writer may be in its memory."""
        if not wire.sender_broken:
            wire.sender_broken = True
            if not self.world.one_sided:
                wire.to_receiver(None)

    def deliver(self, wire: Wire) -> bool:
        """Let the link's reader, or the end of its writer, go on by one thing."""
        if wire.receiver is None or wire.sender_closed:
            return False
        if wire.sender_failed:
            if wire.number in self.working:
                return False
            if self.world.one_sided:
                wire.to_receiver(None)
            wire.sender_closed = True
            del self.wires[wire.number]
        elif wire.dead or wire.sender_broken:
            self._lost(wire)
        elif wire.down and not wire.down_blocked:
            frame = take(self.world, wire.down)
            if frame.message is None:
                self._lost(wire)
            else:
                self.apply(self.table.handle(wire.number, frame.message, self.world.now))  # type: ignore[arg-type]
        else:
            return False
        return True

    def begin_work(self, wire: Wire) -> bool:
        """The link's writer takes what is next, reads the local pool and announces."""
        if wire.number in self.working or wire.sender_failed:
            return False
        work = self.table.next_work(wire.number, self.world.now)
        if work is None:
            return False
        payload = Payload(self._read(work))
        if work.run is not None and self.world.way is Way.ANNOUNCED:
            self._announce(wire, work, payload)
        self.working[wire.number] = (work, payload)
        return True

    def end_work(self, wire: Wire) -> bool:
        """The link's writer has written, or could not. A write over a blocked network goes on waiting."""
        if wire.number not in self.working:
            return False
        work, payload = self.working[wire.number]
        handoff = work.handoff
        if work.run is None:
            del self.working[wire.number]
            self.apply(self.table.commit_built(handoff, self._fold(handoff), b""))
            return True
        broken = wire.dead or wire.sender_broken
        if self.world.way is Way.ANNOUNCED and wire.up_blocked and not broken:
            return False
        assert payload.pages == self._read(work), f"{handoff.handoff_id}: what was being sent has changed"
        del self.working[wire.number]
        # Who writes alone cannot be stopped half-way: only the death of the connection keeps his bytes out.
        lands = self.world.way is Way.LANDED or not (wire.dead or wire.receiver_closed or wire.up_blocked)
        if self.world.one_sided and lands:
            self._land(wire, handoff.handoff_id, payload)
        if self.world.way is not Way.ANNOUNCED and not broken:
            self._announce(wire, work, payload)
        self.apply(self.table.work_done(handoff, [] if broken else [work.run], self.world.now))
        return True

    def die_writing(self, wire: Wire) -> None:
        """The process ends in the middle of what it writes."""
        if wire.number not in self.working:
            return
        work, payload = self.working.pop(wire.number)
        if work.run is None or self.world.random.random() < 0.5:
            return
        self.world.seen["died writing"] += 1
        for page in list(payload.pages):
            if self.world.random.random() < 0.5:
                payload.pages[page] = payload.pages.pop(page)
            else:
                del payload.pages[page]
        if self.world.way is Way.IN_BAND:
            payload.cut = True
            if not wire.sender_broken:
                self._announce(wire, work, payload)
        elif not (wire.dead or wire.receiver_closed or wire.up_blocked):
            self._land(wire, work.handoff.handoff_id, payload)
            payload.landed = False

    def _land(self, wire: Wire, hid: str, payload: Payload) -> None:
        assert wire.receiver is not None
        payload.landed = True
        corrupt(self.world, payload)
        if wire.receiver.alive:  # Otherwise into memory that nobody has any more.
            wire.receiver.land(hid, payload.pages)

    def _announce(self, wire: Wire, work: Work, payload: Payload) -> None:
        assert work.run is not None
        handoff, blocks, layers = work.handoff, work.run.blocks, work.run.layers
        first = blocks.start - handoff.first_block
        ids = handoff.block_ids[first : first + len(blocks)]
        if not wire.sender_broken:
            wire.to_receiver(Write(handoff.handoff_id, blocks.start, ids, layers.start, len(layers)), payload)

    def _read(self, work: Work) -> dict[Page, int]:
        """The pages of this work as the local pool has them now, by their places at the peer; fingerprints them too."""
        handoff, run = work.handoff, work.run
        if run is None:
            return {}
        seed = fingerprint.seed(handoff.handoff_id, handoff.attempt)
        pages = {}
        for index in run.blocks:
            for layer in run.layers:
                value = self.pool[handoff.source[index], layer]
                handoff.fingerprints[handoff.page_number(index, layer)] = page_fingerprint(value, seed, index, layer)
                pages[handoff.block_ids[index - handoff.first_block], layer] = value
        return pages

    def _fold(self, handoff: OutboundHandoff) -> tuple[int, ...]:
        seed = fingerprint.seed(handoff.handoff_id, handoff.attempt)
        return fingerprint.fold_blocks(handoff.fingerprints, LAYERS, seed)

    def _lost(self, wire: Wire) -> None:
        wire.sender_failed = True
        self.break_off(wire)
        self.outlets = {key: outlet for key, outlet in self.outlets.items() if outlet is not wire}
        self.apply(self.table.link_lost(wire.number, Failure("lost")))

    # ---- time, and what must hold

    def tick(self) -> None:
        self.apply(self.table.expire(self.world.now))
        for wire in list(self.wires.values()):
            if wire.receiver is None and self.world.now - wire.asked_at > ANSWER_S:
                self.unreachable(wire)
            elif wire.up_blocked and wire.number in self.working and self.world.now - wire.blocked_at > ANSWER_S:
                self.break_off(wire)  # The write has timed out.
        handoffs = self.table._handoffs.values()
        waiting = sum(handoff.num_waiting for handoff in handoffs)
        assert self.table.total_backlog_bytes == waiting * LAYOUT.page_bytes
        assert all(h.state not in LIVE or h.deadline > self.world.now for h in handoffs), "past its deadline"

    def assert_idle(self) -> None:
        """Everything has had its one ending, nothing is held, and the books are in order."""
        assert len(self.table) == 0
        assert self.table.total_backlog_bytes == 0
        assert not any((self.jobs, self.working, self.inbox, self.events))
        for hid, events in self.past:
            assert events in ENDINGS, (hid, events)
        self.blocks.check_integrity()
        assert self.blocks.usage().available == NUM_BLOCKS

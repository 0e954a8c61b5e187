"""One life of a simulated decode worker: a real receive table, a real block manager, and a pool of page values."""

from collections import deque
from dataclasses import dataclass

from kv_cache.block_manager import BlockManager
from kv_transfer.handoff import (
    CloseLink,
    Effect,
    Failure,
    Post,
    ReportCommitted,
    ReportFailed,
    ReportFenced,
    ReportRefused,
)
from kv_transfer.messages import Abort, Commit, Fence, HandoffMessage, Open, Renew, Write
from kv_transfer.receive_table import ReceiveCounts, ReceiveTable
from tests.support.sim_network import (
    LAYERS,
    LAYOUT,
    LEASE_S,
    Page,
    Payload,
    Prompt,
    SimTicket,
    Way,
    Wire,
    World,
    page_fingerprint,
    take,
)

NUM_BLOCKS = 10
ENDINGS = (["ReportCommitted"], ["ReportFailed", "ReportFenced"])


@dataclass
class Admitted:
    """A request from its ticket to its last token."""

    ticket: SimTicket
    table: tuple[int, ...]


class DecodeLife:
    """What dies with the process. `events`: what its table has reported, by hand-off."""

    def __init__(self, world: World, name: str, incarnation: bytes) -> None:
        self.world = world
        self.name = name
        self.incarnation = incarnation
        self.table = ReceiveTable(
            num_blocks=NUM_BLOCKS,
            num_layers=LAYERS,
            page_bytes=LAYOUT.page_bytes,
            incarnation=incarnation,
            lease_s=LEASE_S,
            verify=True,
        )
        self.blocks = BlockManager(NUM_BLOCKS, LAYOUT.block_size)
        self.pool: dict[Page, int] = {}
        self.wires: dict[int, Wire] = {}
        self.inbox: deque[Effect] = deque()
        self.admitted: dict[str, Admitted] = {}
        self.receiving: set[str] = set()
        self.running: dict[str, Admitted] = {}
        self.quarantines: dict[str, int] = {}
        self.events: dict[str, list[str]] = {}
        self.alive, self.stopped = True, False

    # ---- the worker, as decode_worker/worker.py is

    def admit(self, prompt: Prompt, attempt: int) -> SimTicket | None:
        """Reserve blocks and a place; None when the pool is too full."""
        hid = f"{self.name}.{self.incarnation[0]}/{len(self.admitted)}"
        allocation = self.blocks.allocate(hid, len(prompt.tokens) + 1, prompt.hashes, prompt.tokens)
        if allocation is None:
            return None
        first, table = allocation
        ids = table[first : len(prompt.pages)]
        for block in ids:
            for layer in range(LAYERS):
                self.pool[block, layer] = -1  # Whatever was there, it is not what will be.
        secret = self.world.random.randbytes(8)
        self.table.reserve(
            hid,
            secret=secret,
            attempt=attempt,
            first_block=first,
            block_ids=ids,
            num_tokens=len(prompt.tokens),
            now=self.world.now,
        )
        ticket = SimTicket(hid, attempt, self.incarnation, secret, first, ids, prompt, self.name)
        self.admitted[hid] = Admitted(ticket, table)
        self.receiving.add(hid)
        self.events[hid] = []
        return ticket

    def cancel(self, hid: str) -> None:
        """The router wants it no more."""
        if hid in self.running:
            self.finish(hid)
        elif hid in self.receiving:
            self.receiving.discard(hid)
            self.quarantines[hid] = self.blocks.quarantine(hid)
            self.apply(self.table.abort(hid, Failure("cancelled")))

    def turn(self) -> bool:
        """The engine's thread takes one event."""
        if not self.inbox:
            return False
        event = self.inbox.popleft()
        assert isinstance(event, ReportCommitted | ReportFailed | ReportFenced)
        hid = event.handoff_id
        if isinstance(event, ReportCommitted):
            self.table.release(hid)
            if hid in self.receiving:
                self.receiving.discard(hid)
                self._run(hid)
            else:
                self._release(hid)
        elif isinstance(event, ReportFenced):
            self._release(hid)
        elif hid in self.receiving:
            self.receiving.discard(hid)
            self.quarantines[hid] = self.blocks.quarantine(hid)
        return True

    def finish(self, hid: str) -> None:
        """A running sequence ends: what was received must still be there."""
        self.assert_holds(self.running.pop(hid))
        self.blocks.free(hid)

    def _run(self, hid: str) -> None:
        admitted = self.running[hid] = self.admitted[hid]
        prompt, size = admitted.ticket.prompt, LAYOUT.block_size
        for index, name in enumerate(prompt.hashes):
            self.blocks.store(hid, index, name, prompt.tokens[index * size : (index + 1) * size])

    def _release(self, hid: str) -> None:
        self.blocks.release_quarantine(self.quarantines.pop(hid))

    # ---- the receiver, as kv_transfer/receiver.py is

    def apply(self, effects: list[Effect]) -> None:
        """Carry out what the table decided."""
        for effect in effects:
            if isinstance(effect, Post):
                wire = self.wires.get(effect.link)
                if wire is not None and not wire.receiver_broken:
                    wire.to_sender(effect.message)
            elif isinstance(effect, CloseLink):
                self.break_off(effect.link)
            elif isinstance(effect, ReportRefused):
                self.world.seen[f"refused: {effect.kind.value}"] += 1
            else:
                assert isinstance(effect, ReportCommitted | ReportFailed | ReportFenced)
                events = self.events[effect.handoff_id]
                events.append(type(effect).__name__)
                assert any(ending[: len(events)] == events for ending in ENDINGS), (effect.handoff_id, events)
                if isinstance(effect, ReportCommitted):
                    self.assert_holds(self.admitted[effect.handoff_id])
                self.inbox.append(effect)

    def break_off(self, link: int) -> None:
        wire = self.wires.get(link)
        if wire is not None and not wire.receiver_broken:
            wire.receiver_broken = True
            wire.to_sender(None)

    def deliver(self, wire: Wire) -> bool:
        """Let the link's reader go on by one thing."""
        if wire.receiver_closed:
            return False
        if wire.receiver_failed:
            return self._wait_for_close(wire)
        if wire.receiving is not None:
            return self._end_receive(wire)
        if wire.dead or (wire.receiver_broken and not self.world.one_sided):
            self._failed(wire)
        elif wire.up and not wire.up_blocked:
            frame = take(self.world, wire.up)
            if frame.message is None:
                wire.sender_closed = True
                self._failed(wire)
            else:
                self.handle(wire.number, frame.message, frame.payload, wire)
        else:
            return False
        return True

    def handle(self, number: int, message: HandoffMessage, payload: Payload, wire: Wire | None) -> None:
        """One message on a link; `wire` None: a stranger's, which must not get to write."""
        table, now = self.table, self.world.now
        if isinstance(message, Write):
            seed, effects = table.begin_write(number, message, now)
            self.apply(effects)
            if seed is not None:
                assert wire is not None, "a stranger may write"
                wire.receiving = (message, payload, seed)
        elif isinstance(message, Open):
            self.apply(table.open(number, message, transport="t", one_sided=self.world.one_sided, now=now))
        elif isinstance(message, Commit):
            self.apply(table.commit(number, message, now))
        elif isinstance(message, Renew):
            self.apply(table.renew(number, message, now))
        elif isinstance(message, Abort):
            self.apply(table.peer_abort(number, message))
        elif isinstance(message, Fence):
            self.apply(table.fence(number, message))

    def land(self, hid: str, pages: dict[Page, int]) -> None:
        """Bytes reach the pool: never after the fence or the commit, and only into blocks held for this hand-off."""
        assert not {"ReportFenced", "ReportCommitted"} & set(self.events[hid]), f"a write of {hid} landed too late"
        held = self.blocks.block_table(hid) if hid in self.blocks else self.admitted[hid].table
        assert hid in self.blocks or hid in self.quarantines, f"{hid} writes into blocks that nobody holds for it"
        assert all(block in held for block, _ in pages), f"{hid} writes into blocks of others"
        self.pool.update(pages)

    def _end_receive(self, wire: Wire) -> bool:
        """The payload is there, or (the link being over) will not be waited for any longer."""
        assert wire.receiving is not None
        message, payload, seed = wire.receiving
        over = wire.dead or wire.receiver_broken or wire.sender_closed
        landed = payload.landed
        if self.world.way is Way.IN_BAND:
            landed = not payload.cut and not (over and self.world.random.random() < 0.5)
            self.land(message.handoff_id, payload.pages)
        elif not landed and not over and not any(frame.message is None for frame in wire.up):
            return False
        wire.receiving = None
        found = self._fingerprints(message, seed) if landed else []
        self.apply(self.table.end_write(message, landed=landed, fingerprints=found, now=self.world.now))
        if not landed:
            self.world.seen["cut short"] += 1
            self._failed(wire)
        return True

    def _fingerprints(self, message: Write, seed: int) -> list[int]:
        layers = range(message.layer, message.layer + message.num_layers)
        blocks = enumerate(message.block_ids, start=message.block_index)
        return [
            page_fingerprint(self.pool.get((b, layer)), seed, index, layer) for index, b in blocks for layer in layers
        ]

    def _failed(self, wire: Wire) -> None:
        wire.receiver_failed = True
        self.break_off(wire.number)
        self.apply(self.table.link_failed(wire.number, "lost"))

    def _wait_for_close(self, wire: Wire) -> bool:
        """A link that failed is closed, at once unless only its peer's own close can fence what is left."""
        if self.table.must_outlive(wire.number) and not (wire.dead or wire.sender_closed):
            if not wire.up or wire.up_blocked:
                return False
            wire.sender_closed = wire.up.popleft().message is None
            return True
        wire.receiver_closed = True
        self.apply(self.table.link_closed(wire.number))
        del self.wires[wire.number]
        return True

    # ---- what must hold

    def assert_holds(self, admitted: Admitted) -> None:
        for index, values in enumerate(admitted.ticket.prompt.pages):
            found = [self.pool.get((admitted.table[index], layer)) for layer in range(LAYERS)]
            assert found == values, f"{admitted.ticket.handoff_id}: block {index} holds {found}, not {values}"

    def assert_idle(self) -> None:
        """Everything has had its one ending, nothing is held, and the books are in order."""
        assert self.table.counts() == ReceiveCounts(0, 0, 0, 0), self.table.counts()
        assert self.table.next_expiry() is None
        assert not any((self.receiving, self.running, self.quarantines, self.inbox))
        for hid, events in self.events.items():
            assert events in ENDINGS, (hid, events)
        self.blocks.check_integrity()
        assert self.blocks.usage().available == NUM_BLOCKS

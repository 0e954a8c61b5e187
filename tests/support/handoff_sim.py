"""Simulated decode and prefill workers on a hand-moved clock, stepped in an order drawn from a seed.

Both sides own what real workers own: the hand-off table and a block manager, whose blocks are reserved, quarantined and
freed by the same events; the engine's thread takes those events one by one, later than they happen. Nothing here has a
thread: a step is one message delivered, one write begun or ended, one event taken, one jump of the clock, or one
misfortune. Memory is one value a page, so that a write that lands where it must not is seen at once.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from kv_transfer.messages import Abort, Commit, Fence, HandoffMessage, Open, Renew, Write
from tests.support.sim_decode import DecodeLife
from tests.support.sim_network import KEEPALIVE_S, LAYERS, PROMPTS, Payload, SimTicket, Way, Wire, World
from tests.support.sim_prefill import PrefillLife

NUM_DECODE, NUM_PREFILL = 2, 3
MAX_ADMITTED = 30
MISFORTUNE = 0.03
_STRANGER = 10_000_000
Life = TypeVar("Life", DecodeLife, PrefillLife)


class HandoffSim:
    """One schedule. `run` raises at the first thing that must not happen. `world.seen` counts what did."""

    def __init__(self, seed: int, *, way: Way, faults: bool) -> None:
        self.world = World(random.Random(seed), way, faults)
        self.lives = 0
        self.num_links = 0
        self.num_admitted = 0
        self.decodes = [self._decode(f"d{number}") for number in range(NUM_DECODE)]
        self.prefills = [self._prefill() for _ in range(NUM_PREFILL)]
        self.past: list[DecodeLife | PrefillLife] = []
        self.tickets: list[SimTicket] = []
        self.old_tickets: list[SimTicket] = []
        self._steps = self._weighted()
        self._misfortunes: list[Callable[[], None]] = [
            self.cancel_at_decode, self.cancel_at_prefill, self.break_wire, self.jump_clock, self.stop_or_go, self.kill,
            self.partition, self.heal, self.forge, self.forge, self.replay_ticket,
        ]  # fmt: skip

    def run(self, steps: int) -> None:
        """Random steps, then everything to its end."""
        draw, choice = self.world.random.random, self.world.random.choice
        for _ in range(steps):
            if draw() < MISFORTUNE:
                choice(self._misfortunes)()
            else:
                choice(self._steps)()
        self.settle()

    def settle(self) -> None:
        """Let everything come to its end: messages, leases, deadlines. The network may stay as it is."""
        if self.world.random.random() < 0.2:
            self.kill()
        for life in self._lives():
            life.stopped = False
        self.tickets.clear()
        for _ in range(70):
            while self._all_go_on():
                pass
            if self._is_idle():
                break
            self.move_clock(2.0)
        self.check_end()

    def check_end(self) -> None:
        """Every hand-off has had its one ending on each side, nothing is held, and both sides agree."""
        for life in self._lives():
            life.assert_idle()
        committed = {
            hid
            for life in (*self.decodes, *self.past)
            if isinstance(life, DecodeLife)
            for hid, events in life.events.items()
            if events == ["ReportCommitted"]
        }
        for life in (*self.prefills, *self.past):
            for hid, events in life.past if isinstance(life, PrefillLife) else ():
                self.world.seen[f"prefill: {events[0]}"] += 1
                assert events[0] != "ReportSent" or hid in committed, f"{hid} was sent, but nobody has it"
        for decode in self.decodes:
            self.world.seen.update(f"decode: {events[0]}" for events in decode.events.values())

    # ---- steps

    def _weighted(self) -> list[Callable[[], object]]:
        return [
            self.admit, self.dispatch, *[self.deliver] * 8, *[self.work] * 6, *[self.compute] * 4, *[self.turn] * 4,
            self.connect, self.connect, self.finish, self.move_clock,
        ]  # fmt: skip

    def admit(self) -> None:
        """The router asks a decode worker for a place."""
        decode = self._any(self.decodes)
        if decode is None or self.num_admitted >= MAX_ADMITTED:
            return
        self.num_admitted += 1
        ticket = decode.admit(self.world.random.choice(PROMPTS), self.world.random.randint(1, 2))
        if ticket is None:
            self.world.seen["decode pool full"] += 1
        elif self.world.random.random() < 0.9:
            self.tickets.append(ticket)
        else:
            self.world.seen["ticket never used"] += 1
            self.old_tickets.append(ticket)

    def dispatch(self) -> None:
        """The router gives a ticket to a prefill worker."""
        prefill = self._any(self.prefills)
        if prefill is not None and self.tickets:
            ticket = self.tickets.pop(self.world.random.randrange(len(self.tickets)))
            self.old_tickets.append(ticket)
            self._submit(prefill, ticket)

    def connect(self) -> None:
        """A greeting comes to its end, one way or the other. Some find another life than the ticket's."""
        prefill = self._any(self.prefills)
        waiting = [wire for wire in prefill.wires.values() if wire.receiver is None] if prefill else []
        if prefill is None or not waiting:
            return
        wire = self.world.random.choice(waiting)
        incarnation = next(key for key, outlet in prefill.outlets.items() if outlet is wire)
        peer = next((decode for decode in self.decodes if decode.incarnation == incarnation), None)
        if peer is None:
            self.world.seen["stale incarnation"] += 1
            peer = self._any(self.decodes)
            if peer is None or self.world.random.random() < 0.5:
                prefill.unreachable(wire)
                return  # Otherwise as if the greeting had not checked: then the receive table must.
        if peer.alive and not peer.stopped:
            prefill.connect(wire, peer)

    def deliver(self) -> None:
        """Something arrives somewhere."""
        life = self._anyone()
        if life is not None and life.wires:
            life.deliver(self.world.random.choice(list(life.wires.values())))

    def work(self) -> None:
        """A link's writer begins or ends something."""
        prefill = self._any(self.prefills)
        if prefill is not None and prefill.wires:
            wire = self.world.random.choice(list(prefill.wires.values()))
            if not prefill.end_work(wire):
                prefill.begin_work(wire)

    def compute(self) -> None:
        prefill = self._any(self.prefills)
        if prefill is not None and prefill.jobs:
            prefill.compute(self.world.random.choice(list(prefill.jobs)))

    def turn(self) -> None:
        life = self._anyone()
        if life is not None:
            life.turn()

    def finish(self) -> None:
        decode = self._any(self.decodes)
        if decode is not None and decode.running:
            decode.finish(self.world.random.choice(list(decode.running)))

    def move_clock(self, seconds: float = 0.25) -> None:
        self.world.now += seconds
        for life in self._lives():
            for wire in life.wires.values():
                blocked = wire.up_blocked or wire.down_blocked
                if blocked and not wire.dead and self.world.now - wire.blocked_at > KEEPALIVE_S:
                    self.world.seen["keepalive"] += 1
                    wire.give_up()
            if life.stopped:
                continue
            if isinstance(life, PrefillLife):
                life.tick()
            else:
                life.apply(life.table.expire(self.world.now))
            if self.world.random.random() < 0.1:
                life.blocks.check_integrity()

    # ---- misfortunes

    def cancel_at_decode(self) -> None:
        decode = self._any(self.decodes)
        if decode is not None and decode.admitted:
            decode.cancel(self.world.random.choice(list(decode.admitted)))
            self.world.seen["cancelled at decode"] += 1

    def cancel_at_prefill(self) -> None:
        prefill = self._any(self.prefills)
        if prefill is not None and prefill.jobs:
            prefill.cancel(self.world.random.choice(list(prefill.jobs)))
            self.world.seen["cancelled at prefill"] += 1

    def break_wire(self) -> None:
        """One end has had enough of the link, whatever for."""
        wire = self._any_wire()
        if wire is None or wire.receiver is None:
            return
        self.world.seen["link broken"] += 1
        if self.world.random.random() < 0.5 and not wire.sender.stopped:
            wire.sender.break_off(wire)
        elif not wire.receiver.stopped and wire.receiver.alive:
            wire.receiver.break_off(wire.number)

    def jump_clock(self) -> None:
        self.world.seen["clock jumped"] += 1
        self.move_clock(self.world.random.choice((2.0, 7.0)))

    def stop_or_go(self) -> None:
        """SIGSTOP, or SIGCONT."""
        number = self.world.random.randrange(NUM_DECODE + NUM_PREFILL)
        life = self.decodes[number] if number < NUM_DECODE else self.prefills[number - NUM_DECODE]
        life.stopped = not life.stopped
        self.world.seen["stopped"] += life.stopped

    def kill(self) -> None:
        """SIGKILL, of a stopped process too. Another life begins with nothing."""
        number = self.world.random.randrange(NUM_DECODE + NUM_PREFILL)
        if number < NUM_DECODE:
            decode = self.decodes[number]
            for wire in decode.wires.values():
                wire.to_sender(None)
                wire.receiver_broken = wire.receiver_failed = wire.receiver_closed = True
            self.decodes[number] = self._decode(decode.name)
            self.world.seen["decode killed"] += 1
            self._bury(decode)
        else:
            prefill = self.prefills[number - NUM_DECODE]
            for wire in prefill.wires.values():
                prefill.die_writing(wire)
                if not (wire.sender_broken and not self.world.one_sided):
                    wire.to_receiver(None)
                wire.sender_broken = wire.sender_failed = wire.sender_closed = True
            self.prefills[number - NUM_DECODE] = self._prefill()
            self.world.seen["prefill killed"] += 1
            self._bury(prefill)

    def partition(self) -> None:
        """The network holds back what one end says, or both. Not between processes that share memory."""
        wire = self._any_wire()
        if wire is None or wire.dead or self.world.way is Way.LANDED:
            return
        kind = self.world.random.choice(("up", "down", "both"))
        self.world.seen[f"partition: {kind}"] += 1
        wire.up_blocked, wire.down_blocked = kind != "down", kind != "up"
        wire.blocked_at = self.world.now

    def heal(self) -> None:
        wire = self._any_wire(blocked=True)
        if wire is not None:
            self.world.seen["healed"] += 1
            wire.up_blocked = wire.down_blocked = False

    def replay_ticket(self) -> None:
        """A ticket that was used, lost or outlived its worker is used (again)."""
        prefill = self._any(self.prefills)
        if prefill is not None and self.old_tickets:
            self.world.seen["ticket replayed"] += self._submit(prefill, self.world.random.choice(self.old_tickets))

    def forge(self) -> None:
        """A worker that does not hold a ticket says something about its hand-off, on a link of its own."""
        decode = self._any(self.decodes)
        if decode is None or not self.old_tickets:
            return
        ticket = self.world.random.choice(self.old_tickets)
        hid, ids = ticket.handoff_id, ticket.block_ids
        good = Open(hid, ticket.attempt, decode.incarnation, ticket.secret, "t")
        forged: tuple[HandoffMessage, ...] = (
            Open(hid, ticket.attempt, decode.incarnation, b"guess", "t"),
            Open(hid, ticket.attempt + 1, decode.incarnation, ticket.secret, "t"),
            Open(hid, ticket.attempt, b"elsewhere", ticket.secret, "t"),
            Open(hid, ticket.attempt, decode.incarnation, ticket.secret, "other"),
            *([good] if hid not in decode.receiving or ticket in self._opened(decode) else []),
            Write(hid, ticket.first_block, ids, 0, LAYERS),
            Commit(hid, len(ticket.prompt.tokens), b"", (1,) * len(ids), len(ids) * LAYERS),
            Abort(hid, 7, "forged"),
            Fence(hid),
            Renew((hid,)),
        )
        before = {key: list(value) for key, value in decode.events.items()}
        decode.handle(_STRANGER, self.world.random.choice(forged), Payload(), None)
        assert before == decode.events, "a stranger changed something"
        self.world.seen["forged"] += 1

    # ---- inside

    def _opened(self, decode: DecodeLife) -> list[SimTicket]:
        """Tickets that are bound to a link already."""
        return [
            decode.admitted[hid].ticket
            for hid, handoff in decode.table._handoffs.items()
            if handoff.link is not None and hid in decode.admitted
        ]

    def _submit(self, prefill: PrefillLife, ticket: SimTicket) -> bool:
        self.num_links += 1
        deadline = self.world.now + self.world.random.choice((8.0, 60.0))
        return prefill.submit(replace(ticket), deadline, self.num_links)

    def _decode(self, name: str) -> DecodeLife:
        self.lives += 1
        return DecodeLife(self.world, name, bytes([self.lives]) * 16)

    def _prefill(self) -> PrefillLife:
        self.lives += 1
        return PrefillLife(self.world, self.lives)

    def _bury(self, life: DecodeLife | PrefillLife) -> None:
        life.alive = False
        self.past.append(life)

    def _any(self, lives: Sequence[Life]) -> Life | None:
        life = self.world.random.choice(lives)
        return None if life.stopped else life

    def _lives(self) -> list[DecodeLife | PrefillLife]:
        return [*self.decodes, *self.prefills]

    def _anyone(self) -> DecodeLife | PrefillLife | None:
        decode = self.world.random.random() < NUM_DECODE / (NUM_DECODE + NUM_PREFILL)
        return self._any(self.decodes) if decode else self._any(self.prefills)

    def _any_wire(self, *, blocked: bool = False) -> Wire | None:
        wires = [wire for life in self.prefills for wire in life.wires.values()]
        if blocked:
            wires = [wire for wire in wires if wire.up_blocked or wire.down_blocked]
        return self.world.random.choice(wires) if wires else None

    def _all_go_on(self) -> bool:
        """One round of everything that can go on; whether anything did."""
        went = False
        for prefill in self.prefills:
            self.connect()
            for wire in list(prefill.wires.values()):
                went |= prefill.end_work(wire) or prefill.begin_work(wire)
                went |= prefill.deliver(wire)
            for hid in list(prefill.jobs):
                went |= prefill.compute(hid)
            went |= prefill.turn()
        for decode in self.decodes:
            for wire in list(decode.wires.values()):
                went |= decode.deliver(wire)
            went |= decode.turn()
            for hid in list(decode.running):
                decode.finish(hid)
        return went

    def _is_idle(self) -> bool:
        return not any(len(decode.table) or decode.inbox for decode in self.decodes) and not any(
            prefill.jobs for prefill in self.prefills
        )

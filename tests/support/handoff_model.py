"""A tiny configuration of both hand-off tables, explored in every order in which its steps can happen.

One link, one or two hand-offs that want the same blocks one after the other, pages of one value each, and a budget of
misfortunes that may strike anywhere. Times are only "before" and "when it is due", so that the states are finite. Two
states that differ in nothing are explored once.
"""

import dataclasses
import math
from collections import deque
from dataclasses import dataclass, field

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
from kv_transfer.messages import Abort, Commit, Fence, HandoffMessage, Open, Renew, Write
from kv_transfer.outbound import OutboundHandoff
from kv_transfer.pages import PageRun
from kv_transfer.receive_table import ReceiveTable
from kv_transfer.records import CommitRecord
from kv_transfer.send_table import SendTable
from tests.support.kv_pair import LAYOUT as _LAYOUT
from tests.support.sim_network import Way

LAYOUT = dataclasses.replace(_LAYOUT, num_layers=1)
LINK, STRANGER = 1, 2
LIFE, SECRET = b"life", b"secret"
LEASE_S, ANSWER_S, DEADLINE_S = 9.0, 5.0, 1000.0
RENEW_S = 3.0
_RECEIVED: tuple[list[str], ...] = ([], ["committed"], ["failed"], ["failed", "fenced"])
_SENT: tuple[list[str], ...] = ([], ["sent"], ["failed"], ["sent", "drained"], ["failed", "drained"])
Action = tuple[str, ...]


@dataclass
class Model:
    """One state of everything. `budget`: misfortunes that may still happen."""

    way: Way
    num_handoffs: int
    num_blocks: int
    budget: int
    recv: ReceiveTable = field(init=False)
    send: SendTable = field(init=False)
    up: deque[tuple[HandoffMessage | None, bool]] = field(default_factory=deque)
    down: deque[HandoffMessage | None] = field(default_factory=deque)
    memory: dict[int, str] = field(default_factory=dict)
    owner: dict[int, str] = field(default_factory=dict)
    receiving: Write | None = None
    working: tuple[str, PageRun | None] | None = None
    landed: int = 0  # ANNOUNCED: of the writes announced, how many are in the pool ...
    awaited: int = 0  # ... and how many the receiver has begun to wait for.
    received: dict[str, list[str]] = field(default_factory=dict)
    sent: dict[str, list[str]] = field(default_factory=dict)
    pushed: dict[str, int] = field(default_factory=dict)
    sender: str = "up"  # then broken, failed, closed
    receiver: str = "up"
    killed: bool = False
    ended: bool = False  # The receiver has seen the end of what the sender says.

    def __post_init__(self) -> None:
        self.recv = ReceiveTable(
            num_blocks=self.num_blocks, num_layers=1, page_bytes=256, incarnation=LIFE, lease_s=LEASE_S, verify=True
        )
        self.send = SendTable(answer_timeout_s=ANSWER_S)
        self.send.link_added(LINK)
        self.send.link_ready(LINK, "t", 0.0)

    @property
    def one_sided(self) -> bool:
        return self.way is not Way.IN_BAND

    # ---- steps

    def do(self, action: Action, *, costs: int = 0) -> None:
        """One step. Raises AssertionError when something happens that must not."""
        self.budget -= costs
        getattr(self, f"_{action[0]}")(*action[1:])
        self._forget_times()
        self.check()

    def check(self) -> None:
        """What must hold in every state."""
        assert all(events in _RECEIVED for events in self.received.values()), self.received
        assert all(events in _SENT for events in self.sent.values()), self.sent
        for name, events in self.sent.items():
            assert "sent" not in events or self.received[name] == ["committed"], f"{name} was sent, but not received"
        held = {block for handoff in self.recv._handoffs.values() for block in handoff.block_ids}
        assert set(self.recv._owner) <= held, "a block is writable by nobody's leave"

    def check_end(self) -> None:
        """What must hold when nothing can happen any more."""
        assert all(self.received[name] in _RECEIVED[1::2] for name in self.received), self.received
        assert not len(self.recv), "the receiver still holds something"
        assert not self.owner, "blocks are lost"
        if not self.killed:
            assert all(events in _SENT[3:] for events in self.sent.values()), self.sent
            assert not len(self.send), "the sender still holds something"
            assert not self.send.total_backlog_bytes

    # ---- the workers

    def _reserve(self, name: str) -> None:
        ids = tuple(range(self.num_blocks))
        self.owner = dict.fromkeys(ids, name)
        tokens = self.num_blocks * LAYOUT.block_size
        self.recv.reserve(name, secret=SECRET, attempt=1, first_block=0, block_ids=ids, num_tokens=tokens, now=0.0)
        self.received[name] = []
        if self.sender == "up":  # Otherwise it is a ticket that nobody uses.
            self._open(name)

    def _open(self, name: str) -> None:
        ids = tuple(range(self.num_blocks))
        self.sent[name], self.pushed[name] = [], 0
        handoff = OutboundHandoff(
            handoff_id=name, attempt=1, incarnation=LIFE, secret=SECRET, first_block=0, block_ids=ids,
            lease_s=LEASE_S, deadline=DEADLINE_S, link=LINK, layout=LAYOUT,
        )  # fmt: skip
        self._at_sender(self.send.open(handoff, 0.0))

    def _push(self, name: str) -> None:
        done = self.pushed[name]
        self.pushed[name] += 1
        if done < self.num_blocks:
            self._at_sender(self.send.push(name, done, [done], range(1)))
        else:
            self._at_sender(self.send.commit(name, CommitRecord(self.num_blocks * LAYOUT.block_size, b"t")))

    def _abort_receiver(self, name: str) -> None:
        self._at_receiver(self.recv.abort(name, Failure("cancelled")))

    def _abort_sender(self, name: str) -> None:
        self._at_sender(self.send.abort(name, Failure("cancelled")))

    # ---- the sender's end

    def _begin_work(self) -> None:
        work = self.send.next_work(LINK, 0.0)
        if work is None:
            return
        handoff = work.handoff
        self.working = handoff.handoff_id, work.run
        if work.run is not None:
            seed = fingerprint.seed(handoff.handoff_id, 1)
            for index in work.run.blocks:
                handoff.fingerprints[index] = _fingerprint(handoff.handoff_id, index, seed)
            if self.way is Way.ANNOUNCED:
                self._write(handoff.handoff_id, work.run)

    def _end_work(self) -> None:
        assert self.working is not None
        (name, run), self.working = self.working, None
        handoff = self.send._handoffs[name]
        if run is None:
            checksums = fingerprint.fold_blocks(handoff.fingerprints, 1, fingerprint.seed(name, 1))
            self._at_sender(self.send.commit_built(handoff, checksums, b""))
            return
        if self.one_sided:
            self._land(name, run.blocks)
        if self.way is not Way.ANNOUNCED:
            self._write(name, run)
        lost = self.sender != "up" and not self.one_sided
        self._at_sender(self.send.work_done(handoff, [] if lost else [run], 0.0))

    def _write(self, name: str, run: PageRun) -> None:
        if self.sender == "up":
            self.up.append((Write(name, run.blocks.start, tuple(run.blocks), 0, 1), True))

    def _sender(self) -> None:
        if self.sender == "failed":
            if self.one_sided:
                self.up.append((None, True))
            self.sender = "closed"
        elif self.sender == "broken":
            self._lost()
        else:
            message = self.down.popleft()
            if message is None:
                self._break_sender()
                self._lost()
            else:
                self._at_sender(self.send.handle(LINK, message, 0.0))  # type: ignore[arg-type]

    def _lost(self) -> None:
        self.sender = "failed"
        self._at_sender(self.send.link_lost(LINK, Failure("lost")))

    def _break_sender(self) -> None:
        if self.sender == "up":
            self.sender = "broken"
            self.down.clear()
            if not self.one_sided:
                self.up.append((None, True))

    def _kill(self) -> None:
        """With whatever it is writing half done: of two pages, the first has landed."""
        self.killed = True
        name, run = self.working or ("", None)
        if run is not None:
            if self.one_sided:
                self._land(name, run.blocks[:1], whole=False)
            elif self.sender == "up":
                self.up.append((Write(name, run.blocks.start, tuple(run.blocks), 0, 1), False))
        self.working = None
        if self.one_sided or self.sender == "up":
            self.up.append((None, True))
        self.sender = "closed"
        self.down.clear()

    # ---- the receiver's end

    def receiver_can_go_on(self) -> bool:
        if self.receiver == "failed":
            return self.ended or bool(self.up) or not self.recv.must_outlive(LINK)
        if self.receiving is not None:
            over = self.receiver == "broken" or any(message is None for message, _ in self.up)
            return self.way is not Way.ANNOUNCED or over or self.landed >= self.awaited
        return bool(self.up) or (self.receiver == "broken" and not self.one_sided)

    def _receiver(self) -> None:
        if self.receiver == "failed":
            if self.recv.must_outlive(LINK) and not self.ended and self.up.popleft()[0] is not None:
                return
            self.receiver = "closed"
            self._at_receiver(self.recv.link_closed(LINK))
        elif self.receiving is not None:
            self._end_receive(whole=self.way is not Way.ANNOUNCED or self.landed >= self.awaited)
        elif self.receiver == "broken" and not self.one_sided:
            self._receiver_fails()
        else:
            message, whole = self.up.popleft()
            if message is None:
                self.ended = True
                self._receiver_fails()
            else:
                self._hear(LINK, message)
                if not whole and self.receiving is not None:
                    self._end_receive(whole=False)

    def _hear(self, link: int, message: HandoffMessage) -> None:
        recv = self.recv
        if isinstance(message, Write):
            self.awaited += self.way is Way.ANNOUNCED and link == LINK
            seed, effects = recv.begin_write(link, message, 0.0)
            self._at_receiver(effects)
            if seed is not None:
                assert link == LINK, "a stranger may write"
                self.receiving = message
        elif isinstance(message, Open):
            self._at_receiver(recv.open(link, message, transport="t", one_sided=self.one_sided, now=0.0))
        elif isinstance(message, Commit):
            self._at_receiver(recv.commit(link, message, 0.0))
        elif isinstance(message, Renew):
            self._at_receiver(recv.renew(link, message, 0.0))
        elif isinstance(message, Abort):
            self._at_receiver(recv.peer_abort(link, message))
        elif isinstance(message, Fence):
            self._at_receiver(recv.fence(link, message))

    def _end_receive(self, *, whole: bool) -> None:
        message, self.receiving = self.receiving, None
        assert message is not None
        name, blocks = message.handoff_id, message.block_ids
        if not self.one_sided:
            self._land(name, range(blocks[0], blocks[-1] + 1 if whole else blocks[0]))
        seed = fingerprint.seed(name, 1)
        found = [_fingerprint(self.memory.get(block, ""), block, seed) for block in blocks] if whole else []
        self._at_receiver(self.recv.end_write(message, landed=whole, fingerprints=found, now=0.0))
        if not whole:
            self._receiver_fails()

    def _receiver_fails(self) -> None:
        self._break_receiver()
        self.receiver = "failed"
        self._at_receiver(self.recv.link_failed(LINK, "lost"))

    def _break_receiver(self) -> None:
        if self.receiver == "up":
            self.receiver = "broken"
            if self.sender == "up":
                self.down.append(None)

    # ---- misfortunes

    def _lease(self) -> None:
        self._at_receiver(self.recv.expire(LEASE_S))

    def _renew(self) -> None:
        self._at_sender(self.send.expire(RENEW_S))

    def _silence(self) -> None:
        self._at_sender(self.send.expire(ANSWER_S))

    def _deadline(self) -> None:
        self._at_sender(self.send.expire(DEADLINE_S))

    def _lose(self) -> None:
        self.up.popleft()

    def _double(self) -> None:
        self.up.insert(1, self.up[0])

    def _swap(self) -> None:
        self.up[0], self.up[1] = self.up[1], self.up[0]

    def forge(self) -> None:
        """Somebody else speaks of the hand-offs that there have been."""
        ids = tuple(range(self.num_blocks))
        for name in list(self.received):
            said: tuple[HandoffMessage, ...] = (
                Open(name, 1, LIFE, b"guess", "t"), Open(name, 1, b"past", SECRET, "t"),
                Open(name, 2, LIFE, SECRET, "t"), Open(name, 1, LIFE, SECRET, "other"), Write(name, 0, ids, 0, 1),
                Commit(name, 1, b"", (0,), 1), Abort(name, 7, "forged"), Fence(name), Renew((name,)),
            )  # fmt: skip
            for message in said:
                self._hear(STRANGER, message)
        self._forget_times()

    # ---- the world

    def _land(self, name: str, blocks: range, *, whole: bool = True) -> None:
        for block in blocks:
            assert self.owner.get(block) == name, f"{name} writes into block {block} of {self.owner.get(block)}"
            self.memory[block] = name
        self.landed += self.way is Way.ANNOUNCED and whole

    def _at_receiver(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Post):
                if effect.link == LINK and self.receiver == "up" and self.sender == "up":
                    self.down.append(effect.message)
            elif isinstance(effect, CloseLink):
                self._break_receiver()
            elif isinstance(effect, ReportCommitted):
                name = effect.handoff_id
                assert all(self.memory.get(block) == name for block in range(self.num_blocks)), f"{name} has other KV"
                self._ended(name, "committed")
                self.recv.release(name)
            elif isinstance(effect, ReportFailed):
                self.received[effect.handoff_id].append("failed")
            elif isinstance(effect, ReportFenced):
                self._ended(effect.handoff_id, "fenced")

    def _ended(self, name: str, how: str) -> None:
        self.received[name].append(how)
        assert set(self.owner.values()) == {name}, f"{name} gives blocks of {self.owner} back"
        self.owner.clear()

    def _at_sender(self, effects: list[Effect]) -> None:
        names = {ReportSent: "sent", ReportFailed: "failed", ReportDrained: "drained"}
        for effect in effects:
            if isinstance(effect, Post):
                if self.sender == "up" and self.receiver in ("up", "broken"):
                    self.up.append((effect.message, True))
            elif isinstance(effect, CloseLink):
                self._break_sender()
            elif isinstance(effect, ReportSent | ReportFailed | ReportDrained):
                self.sent[effect.handoff_id].append(names[type(effect)])

    def _forget_times(self) -> None:
        """All times but "never" are the same to the tables here: what is due comes when `lease` or `renew` says so."""
        for inbound in self.recv._handoffs.values():
            inbound.lease_expires_at = LEASE_S if inbound.lease_expires_at < math.inf else math.inf
            inbound.first_write_at = inbound.last_write_at = None
        self.recv._refused.clear()
        self.recv._expired.__init__()  # type: ignore[misc]
        for outbound in self.send._handoffs.values():
            outbound.renew_at, outbound.first_write_at, outbound.last_write_at = RENEW_S, None, None
        for link in self.send._links.values():
            link.unanswered_since = 0.0 if link.unanswered_since < math.inf else math.inf


def _fingerprint(value: str, block: int, seed: int) -> int:
    return (seed ^ (block + 1) * 0x9E3779B97F4A7C15 ^ (int(value[1:]) + 1 if value else 0)) & 0xFFFFFFFFFFFFFFFF

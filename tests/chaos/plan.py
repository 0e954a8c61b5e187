"""Which faults come when: drawn from a seed, without looking at anything. Durations are in seconds."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

ROUTER = "router"
PREFILL = ("prefill-0", "prefill-1")
DECODE = ("decode-0", "decode-1")
WORKERS = PREFILL + DECODE
NODES = (ROUTER, *WORKERS)


class FaultKind(Enum):
    """What can go wrong. Network faults hit all that a node sends to and gets from the other nodes."""

    KILL = "kill"  # SIGKILL; it is started again
    STOP = "stop"  # SIGTERM, the worker drains; it is started again
    FREEZE = "freeze"  # SIGSTOP, later SIGCONT
    KILL_ROUTER = "kill router"
    STOP_ROUTER = "stop router"
    PARTITION = "partition"  # nothing gets out and nothing in
    DEAF = "deaf"  # nothing gets in
    MUTE = "mute"  # nothing gets out
    CUT = "cut"  # nothing passes between the node and one other
    LOSS = "loss"  # `amount`: share of packets
    DELAY = "delay"  # `amount`: seconds, one way
    CAP = "cap"  # `amount`: bytes a second, each way
    FULL_DISK = "full disk"  # no room where all nodes write logs and traces


LASTING = frozenset(FaultKind) - {FaultKind.KILL, FaultKind.STOP, FaultKind.KILL_ROUTER, FaultKind.STOP_ROUTER}
"""Kinds that go on for a while. The others are over at once, and what they cost is the way back."""


@dataclass(frozen=True)
class Fault:
    """One fault. `peer` is the other node of a CUT; `duration_s` is 0 for kinds that do not last."""

    kind: FaultKind
    node: str
    peer: str = ""
    duration_s: float = 0.0
    amount: float = 0.0

    @property
    def nodes(self) -> frozenset[str]:
        """The node, or the two, that it is about."""
        return frozenset({self.node, self.peer} - {""})

    def __str__(self) -> str:
        amount = {
            FaultKind.LOSS: f" of {self.amount:.0%}",
            FaultKind.DELAY: f" of {self.amount * 1000:.0f} ms",
            FaultKind.CAP: f" at {self.amount / 1000:.0f} kB/s",
        }.get(self.kind, "")
        between = f" and {self.peer}" if self.peer else ""
        lasting = f" for {self.duration_s:.1f} s" if self.duration_s else ""
        return f"{self.kind.value}{amount}: {self.node}{between}{lasting}"


@dataclass(frozen=True)
class Step:
    """Faults that begin together, after a while of calm."""

    calm_s: float
    faults: tuple[Fault, ...]


@dataclass(frozen=True)
class Pace:
    """How long things last. `double`: share of steps with two faults at a time."""

    calm_s: tuple[float, float]
    duration_s: tuple[float, float]
    double: float


# Beyond the router's limits for silence (5 s and 15 s) and beyond the lease of a hand-off (10 s), or well within them.
LONG = Pace(calm_s=(0.5, 4.0), duration_s=(0.5, 20.0), double=0.3)
SHORT = Pace(calm_s=(0.2, 0.6), duration_s=(0.5, 2.0), double=1.0)


def steps(seed: int, pace: Pace, kinds: Sequence[FaultKind] = tuple(FaultKind)) -> Iterator[Step]:
    """Steps without end. Each kind comes as often as every other: they are drawn like cards, and shuffled again when
    all have been played. Two faults at a time hit different nodes, and never stop both decode workers."""
    rng = random.Random(seed)
    deck: list[FaultKind] = []

    def draw() -> Fault:
        if not deck:
            deck.extend(kinds)
            rng.shuffle(deck)
        return _fault(rng, deck.pop(), pace)

    while True:
        faults = [draw()]
        if rng.random() < pace.double:
            second = draw()
            if not second.nodes & faults[0].nodes and not _ends_decoding(faults[0], second):
                faults.append(second)
            else:
                deck.append(second.kind)
        yield Step(rng.uniform(*pace.calm_s), tuple(faults))


def _fault(rng: random.Random, kind: FaultKind, pace: Pace) -> Fault:
    node = ROUTER if kind in (FaultKind.KILL_ROUTER, FaultKind.STOP_ROUTER) else rng.choice(WORKERS)
    peer, amount = "", 0.0
    if kind is FaultKind.CUT:
        node, peer = rng.choice(PREFILL), rng.choice((*DECODE, ROUTER))
    elif kind in (FaultKind.LOSS, FaultKind.DELAY):
        amount = rng.uniform(0.005, 0.15)
    elif kind is FaultKind.CAP:
        amount = rng.uniform(50_000, 2_000_000)
    elif kind is FaultKind.FULL_DISK:
        node = "all"
    # Squared, so that most are short and some outlast every limit.
    shortest, longest = pace.duration_s
    duration_s = shortest + (longest - shortest) * rng.random() ** 2 if kind in LASTING else 0.0
    return Fault(kind, node, peer, duration_s, amount)


_SILENCING = frozenset(FaultKind) - {FaultKind.LOSS, FaultKind.DELAY, FaultKind.CAP, FaultKind.FULL_DISK}


def _ends_decoding(first: Fault, second: Fault) -> bool:
    """Whether nobody could decode: then all that could be seen is that nothing works."""
    hit = {fault.node for fault in (first, second) if fault.kind in _SILENCING}
    return set(DECODE) <= hit

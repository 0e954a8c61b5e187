"""Carries out the faults of a plan, and takes each back when its time is over."""

import asyncio
import contextlib
import signal
from collections.abc import Iterable
from pathlib import Path

from tests.chaos.nodes import Nodes
from tests.chaos.plan import NODES, Fault, FaultKind
from tests.chaos.switch import LinkState, Pair
from tests.chaos.world import World

_CHUNK = b"\0" * (1 << 16)
_SIGNALS = {
    FaultKind.KILL: signal.SIGKILL,
    FaultKind.KILL_ROUTER: signal.SIGKILL,
    FaultKind.STOP: signal.SIGTERM,
    FaultKind.STOP_ROUTER: signal.SIGTERM,
}


async def inject(fault: Fault, nodes: Nodes, world: World) -> None:
    """Do it, wait as long as it lasts, undo it."""
    if fault.kind in _SIGNALS:
        await nodes.end(fault.node, _SIGNALS[fault.kind])
    elif fault.kind is FaultKind.FREEZE:
        nodes.signal(fault.node, signal.SIGSTOP)
        try:
            await asyncio.sleep(fault.duration_s)
        finally:
            nodes.signal(fault.node, signal.SIGCONT)
    elif fault.kind is FaultKind.FULL_DISK:
        filler = world.disk / "filler"
        try:
            await asyncio.to_thread(_fill, filler)
            await asyncio.sleep(fault.duration_s)
        finally:
            filler.unlink(missing_ok=True)
    else:
        with world.disturb(links_of(fault), link_state(fault)):
            await asyncio.sleep(fault.duration_s)


def links_of(fault: Fault) -> frozenset[Pair]:
    """The links, one for each direction, that a network fault is about. Clients reach the router whatever happens."""
    others = [fault.peer] if fault.peer else [name for name in NODES if name != fault.node]
    out, back = _pairs(fault.node, others), _pairs_back(fault.node, others)
    if fault.kind is FaultKind.MUTE:
        return frozenset(out)
    if fault.kind is FaultKind.DEAF:
        return frozenset(back)
    return frozenset((*out, *back))


def link_state(fault: Fault) -> LinkState:
    """What becomes of them."""
    if fault.kind is FaultKind.LOSS:
        return LinkState(loss=fault.amount)
    if fault.kind is FaultKind.DELAY:
        return LinkState(delay_s=fault.amount)
    if fault.kind is FaultKind.CAP:
        return LinkState(bytes_per_s=fault.amount)
    return LinkState(blocked=True)


def _pairs(node: str, others: Iterable[str]) -> list[Pair]:
    return [(node, other) for other in others]


def _pairs_back(node: str, others: Iterable[str]) -> list[Pair]:
    return [(other, node) for other in others]


def _fill(path: Path) -> None:
    """Until there is no room."""
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(_CHUNK) == len(_CHUNK):
            pass

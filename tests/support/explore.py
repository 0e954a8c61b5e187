"""Breadth first over every state of a `Model` that can be reached, each once."""

import copyreg
import dataclasses
import functools
import hashlib
import io
import operator
import pickle
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kv_cache.layout import KVCacheLayout
from kv_transfer.inbound import InboundHandoff
from kv_transfer.outbound import OutboundHandoff
from tests.support.handoff_model import LAYOUT, LINK, Action, Model


def free(state: Model) -> list[Action]:
    """Steps that need no misfortune: the two workers and the network doing their work."""
    found: list[Action] = []
    name = f"h{len(state.received)}"
    if len(state.received) < state.num_handoffs and not state.owner and not state.killed:
        found.append(("reserve", name))
    if not state.killed:
        found += [("push", key) for key, done in state.pushed.items() if done <= state.num_blocks]
        if state.working is not None:
            found.append(("end_work",))
        elif state.sender in ("up", "broken") and state.send._links.get(LINK) and state.send._links[LINK].queue:
            found.append(("begin_work",))
        waits = (state.sender == "up" and not state.down) or (state.sender == "failed" and state.working is not None)
        if state.sender != "closed" and not waits:
            found.append(("sender",))
    if state.receiver != "closed" and state.receiver_can_go_on():
        found.append(("receiver",))
    return found


def misfortunes(state: Model) -> list[Action]:
    """What may happen at any time, as often as the budget allows."""
    if not state.budget:
        return []
    found: list[Action] = [("abort_receiver", name) for name in state.received if not state.received[name]]
    if state.recv.next_expiry() is not None:
        found.append(("lease",))
    if state.receiver == "up":
        found.append(("break_receiver",))
    if state.up:
        found += [("lose",), ("double",)] if state.up[0][0] is not None else []
        found += [("swap",)] if len(state.up) > 1 and None not in (state.up[0][0], state.up[1][0]) else []
    if state.killed:
        return found
    found += [("abort_sender", name) for name, events in state.sent.items() if not events]
    if state.sender == "up":
        found += [("break_sender",), ("silence",)]
        found += [("open", name) for name, events in state.sent.items() if events[1:]]
    if len(state.send):
        found += [("renew",), ("deadline",)]
    return [*found, ("kill",)]


def timers(state: Model) -> list[Action]:
    """What happens when nothing else does."""
    found: list[Action] = [("lease",)] if state.recv.next_expiry() is not None else []
    return [*found, ("deadline",)] if len(state.send) and not state.killed else found


def explore(start: Model, *, max_states: int = 1_000_000) -> tuple[int, Counter[str]]:
    """Visit every state that can be reached; how many there are, and how often each step was taken.

    Raises AssertionError with the shortest way to the first state that must not be.
    """
    for table in (start.recv, start.send):
        _pickle_by_values(type(table), tuple(vars(table)))
    first = _frozen(start)
    came: dict[bytes, tuple[bytes, Action] | None] = {_key(start): None}
    todo, taken = deque([(first, _key(start))]), Counter[str]()
    while todo:
        blob, key = todo.popleft()
        state: Model = pickle.loads(blob)  # noqa: S301 - our own bytes
        going_on, due = free(state), timers(state)
        steps = [(action, 0) for action in going_on] + [(action, 1) for action in misfortunes(state)]
        if not going_on:
            steps += [(action, 0) for action in due]
        changes = bool(going_on)
        _checked(state.forge, came, key, ("forge",))
        _checked(functools.partial(_same, state, key), came, key, ("forge",))
        for action, costs in steps:
            after: Model = pickle.loads(blob)  # noqa: S301
            _checked(functools.partial(after.do, action, costs=costs), came, key, action)
            taken[action[0]] += 1
            after_key = _key(after)
            changes |= after_key != key and not costs
            if after_key not in came:
                came[after_key] = key, action
                todo.append((_frozen(after), after_key))
        if not changes:
            _checked(state.check_end, came, key, ("the end",))
        assert len(came) <= max_states, "the model is not as small as it should be"
    return len(came), taken


def _same(state: Model, key: bytes) -> None:
    assert _key(state) == key, "a stranger changed something"


def _checked(
    step: Callable[[], None], came: dict[bytes, tuple[bytes, Action] | None], key: bytes, action: Action
) -> None:
    try:
        step()
    except Exception as error:
        way = [" ".join(action)]
        while (before := came[key]) is not None:
            key, step_before = before
            way.append(" ".join(step_before))
        raise AssertionError(f"{error!r} after: {', '.join(reversed(way))}") from error


def _layout() -> KVCacheLayout:
    return LAYOUT


def _array(dtype: str, shape: tuple[int, ...], data: bytes) -> np.ndarray[Any, Any]:
    return np.frombuffer(bytearray(data), dtype).reshape(shape)


# Most of the time goes into pickling, and a third of that would go into the names of attributes, and numpy's ways.
_TABLE: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    **copyreg.dispatch_table,
    KVCacheLayout: lambda layout: (_layout, ()),
    np.ndarray: lambda array: (_array, (array.dtype.char, array.shape, array.tobytes())),
}
_NAMES: dict[type, Sequence[str]] = {}


def _pickle_by_values(cls: type, names: tuple[str, ...]) -> None:
    """Of objects of this class, which have these attributes and no others, only the values are written."""
    values = operator.attrgetter(*names)
    _NAMES[cls] = names
    _TABLE[cls] = lambda instance: (_made_of, (cls, *values(instance)))


def _made_of(cls: type, *values: object) -> object:
    made: object = cls.__new__(cls)
    for name, value in zip(_NAMES[cls], values, strict=True):
        setattr(made, name, value)
    return made


for _cls in (Model, InboundHandoff, OutboundHandoff):
    _pickle_by_values(_cls, tuple(field.name for field in dataclasses.fields(_cls)))


def _frozen(state: Model, *, fast: bool = False) -> bytes:
    out = io.BytesIO()
    pickler = pickle.Pickler(out, -1)
    pickler.dispatch_table = _TABLE
    pickler.fast = fast
    pickler.dump(state)
    return out.getvalue()


def _key(state: Model) -> bytes:
    """Equal for states that differ in nothing."""
    return hashlib.blake2b(_frozen(state, fast=True), digest_size=12).digest()

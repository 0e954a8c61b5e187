"""Which change a cluster's workers need, if any. Pure: times (in seconds) are passed in; nothing is read, nothing done.

Each role has a *pressure*: what it has to do, against what its ready workers should have to do. 1 = just right.

    prefill   steps of prompts that wait for each worker, against `prefill_backlog_steps`
    decode    the larger of: blocks in use, against `decode_kv_target`; sequences, and requests that wait before the
              workers, against `decode_slots_target` of the slots

Work is shared out evenly, so with one worker more or less the pressure changes by n / (n + 1) or n / (n - 1). That is
what keeps the policy still under a constant load: it takes a worker away only where the others would then be below
`low`, and adds one only above `high`; a change that it has just made can therefore never be a reason for its opposite.

    ROLE SHORT   (pressure above `high` for `up_after_s`; a lower bound applies while requests miss their targets)
        1. the other role can spare a worker  ->  FLIP it
        2. there may be more workers          ->  ADD one
    ROLE AMPLE   (below `low` even with one less, for `down_after_s`, and requests meet their targets)
                                              ->  REMOVE one

One change at a time, then nothing for `cooldown_s`. A worker that drains, comes or is not well means that a change is
under way, or that the numbers are not to be trusted: then nothing is done, but to replace what is below the minimum.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from kvferry.scaling.fleet_view import DRAINING, ROLES, FleetView, WorkerFacts
from runtime.role_file import Role


class Action(Enum):
    """What is to be done with one worker."""

    HOLD = "hold"
    ADD = "add"
    REMOVE = "remove"
    FLIP = "flip"


@dataclass(frozen=True, slots=True)
class Decision:
    """`role`: of the worker that comes or goes; of one that is flipped, the role that it gets. `worker`: which one to
    remove or flip. `numbers` are what it was decided on."""

    action: Action
    reason: str
    role: Role | None = None
    worker: str | None = None
    numbers: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Observation:
    """A cluster at one moment. `expected`: how many workers the launcher keeps, attached or not. `slo_attainment`: the
    share of requests that met the targets of their class lately; None = there were none."""

    view: FleetView
    expected: int
    slo_attainment: float | None = None


class ScalingPolicy(Protocol):
    """What an autoscaler asks. Another one can take the place of `ThresholdPolicy`: it is made with `ScalingLimits`."""

    def decide(self, seen: Observation, now: float) -> Decision:
        """What to do now. `now`, in seconds, never goes back; the decision is taken for done."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingLimits:
    """Bounds and thresholds. Pressures are as above, times in seconds."""

    min_prefill: int = 1
    max_prefill: int = 4
    min_decode: int = 1
    max_decode: int = 4
    max_workers: int = 8
    prefill_backlog_steps: float = 8.0
    decode_kv_target: float = 0.8
    decode_slots_target: float = 0.9
    high: float = 1.0
    high_when_missing: float = 0.6
    low: float = 0.5
    slo_target: float = 0.95
    up_after_s: float = 5.0
    down_after_s: float = 60.0
    cooldown_s: float = 30.0

    def validate(self) -> None:
        """Raises ValueError naming the field."""
        for role in ROLES:
            least, most = self.bounds(role)
            if not 1 <= least <= most:
                raise ValueError(f"min_{role} must be at least 1, and at most max_{role}")
        if self.max_workers < self.min_prefill + self.min_decode:
            raise ValueError("max_workers must be at least min_prefill and min_decode together")
        if not 0 < self.low < self.high_when_missing <= self.high:
            raise ValueError("low must be positive and below high_when_missing, which must not be above high")
        if min(self.prefill_backlog_steps, self.decode_kv_target, self.decode_slots_target) <= 0:
            raise ValueError("prefill_backlog_steps, decode_kv_target and decode_slots_target must be positive")
        if not 0 < self.slo_target <= 1 or min(self.up_after_s, self.down_after_s, self.cooldown_s) < 0:
            raise ValueError("slo_target must be above 0, at most 1, and no time may be negative")

    def bounds(self, role: Role) -> tuple[int, int]:
        """Fewest and most workers of a role."""
        return (self.min_prefill, self.max_prefill) if role == "prefill" else (self.min_decode, self.max_decode)


def pressure(role: Role, view: FleetView, limits: ScalingLimits) -> float:
    """How hard pressed the ready workers of a role are; see the module. Without any: 0 if there is nothing to do."""
    workers = [worker for worker in view.of(role) if worker.is_ready]
    if role == "prefill":
        waiting = sum(worker.tokens_waiting / worker.token_budget for worker in workers)
        return waiting / (max(1, len(workers)) * limits.prefill_backlog_steps)
    sequences = sum(max(worker.sequences, worker.requests) for worker in workers) + view.requests_queued
    slots = sum(worker.max_num_seqs for worker in workers) or 1
    blocks = sum(worker.blocks_total for worker in workers) or 1
    used = sum(worker.blocks_used + worker.blocks_quarantined for worker in workers)
    return max(sequences / slots / limits.decode_slots_target, used / blocks / limits.decode_kv_target)


class ThresholdPolicy:
    """See the module. It remembers since when a role has been short or ample, and when it last changed anything."""

    def __init__(self, limits: ScalingLimits) -> None:
        """Raises ValueError for limits that make no sense."""
        limits.validate()
        self._limits = limits
        self._short_since: dict[Role, float] = {}
        self._ample_since: dict[Role, float] = {}
        self._changed_at: float | None = None

    def decide(self, seen: Observation, now: float) -> Decision:
        """See ScalingPolicy."""
        pressures = {role: pressure(role, seen.view, self._limits) for role in ROLES}
        misses = seen.slo_attainment is not None and seen.slo_attainment < self._limits.slo_target
        self._note(seen.view, pressures, misses, now)
        numbers = _numbers(seen, pressures)
        decision = self._choose(seen, pressures, now)
        if decision.action is not Action.HOLD:
            self._changed_at = now
            self._short_since.clear()
            self._ample_since.clear()
        return Decision(decision.action, decision.reason, decision.role, decision.worker, numbers)

    # ---- inside ----

    def _note(self, view: FleetView, pressures: dict[Role, float], misses: bool, now: float) -> None:
        """Since when each role has been short, or ample."""
        high = self._limits.high_when_missing if misses else self._limits.high
        for role in ROLES:
            _since(self._short_since, role, pressures[role] > high, now)
            _since(self._ample_since, role, not misses and self._could_spare(role, view, pressures), now)

    def _could_spare(self, role: Role, view: FleetView, pressures: dict[Role, float]) -> bool:
        """Whether the role has a worker above its minimum, and would be well below pressure without it."""
        count = _ready(role, view)
        least, _ = self._limits.bounds(role)
        return count > least and pressures[role] * count / (count - 1) < self._limits.low

    def _choose(self, seen: Observation, pressures: dict[Role, float], now: float) -> Decision:
        limits, view = self._limits, seen.view
        if not view.is_complete:
            return Decision(Action.HOLD, "a router was not heard")
        if any(worker.state == DRAINING for worker in view.workers):
            return Decision(Action.HOLD, "a worker drains")
        if len(view.workers) < seen.expected:
            return Decision(Action.HOLD, "a worker is on its way")
        if self._changed_at is not None and now - self._changed_at < limits.cooldown_s:
            return Decision(Action.HOLD, "the last change was a moment ago")
        for role in ROLES:
            if len(view.of(role)) < limits.bounds(role)[0]:
                return self._more(role, seen, pressures, f"{role} is below its minimum")
        if not all(worker.is_ready for worker in view.workers):
            return Decision(Action.HOLD, "a worker is not well")
        # The role that is pressed harder goes first.
        for role in sorted(ROLES, key=lambda role: -pressures[role]):
            if _lasted(self._short_since, role, limits.up_after_s, now):
                return self._more(role, seen, pressures, f"{role} is short")
        for role in ROLES:
            if _lasted(self._ample_since, role, limits.down_after_s, now):
                worker = _least_loaded(role, view).name
                return Decision(Action.REMOVE, f"{role} would be ample without {worker}", role, worker)
        return Decision(Action.HOLD, "all is well")

    def _more(self, role: Role, seen: Observation, pressures: dict[Role, float], why: str) -> Decision:
        """One more worker of a role: from the other one if that can spare it, or a new one."""
        limits, view = self._limits, seen.view
        other: Role = "decode" if role == "prefill" else "prefill"
        _, most = limits.bounds(role)
        if len(view.of(role)) >= most:
            return Decision(Action.HOLD, f"{why}, and has as many workers as it may")
        if self._could_spare(other, view, pressures):
            worker = _least_loaded(other, view).name
            return Decision(Action.FLIP, f"{why}, and {other} can spare {worker}", role, worker)
        if seen.expected >= limits.max_workers:
            return Decision(Action.HOLD, f"{why}, and there are as many workers as there may be")
        return Decision(Action.ADD, why, role)


def _ready(role: Role, view: FleetView) -> int:
    return sum(worker.is_ready for worker in view.of(role))


def _least_loaded(role: Role, view: FleetView) -> WorkerFacts:
    return min((worker for worker in view.of(role) if worker.is_ready), key=lambda worker: worker.load_key)


def _since(times: dict[Role, float], role: Role, holds: bool, now: float) -> None:
    if holds:
        times.setdefault(role, now)
    else:
        times.pop(role, None)


def _lasted(times: dict[Role, float], role: Role, for_s: float, now: float) -> bool:
    return role in times and now - times[role] >= for_s


def _numbers(seen: Observation, pressures: dict[Role, float]) -> dict[str, float]:
    numbers: dict[str, float] = {"expected": seen.expected, "requests_queued": seen.view.requests_queued}
    for role in ROLES:
        numbers[f"{role}_pressure"] = round(pressures[role], 4)
        numbers[f"{role}_ready"] = _ready(role, seen.view)
        numbers[f"{role}_attached"] = len(seen.view.of(role))
    if seen.slo_attainment is not None:
        numbers["slo_attainment"] = round(seen.slo_attainment, 4)
    return numbers

"""The loop that keeps a cluster as large as its load: look, ask the policy, do what it says, write down why.

1. Every `interval_s`, what the routers know becomes an `Observation`. Where none answers, nothing is decided.
2. The policy (`scaling_policy.py`, or a class of your own) decides on it.
3. A change is carried out by the `Fleet`, which cuts no stream; the loop waits for it. In a dry run it is only advised.
4. Each change, its outcome, and each new reason to hold still is one record, with the numbers it was decided on.

A change that fails is written down, and the next look finds the cluster as it is.
"""

import asyncio
import importlib
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from kvferry.scaling.fleet import Fleet
from kvferry.scaling.scaling_policy import Action, Decision, Observation, ScalingLimits, ScalingPolicy
from runtime.child_process import LaunchError
from runtime.clock import Clock, SystemClock
from runtime.errors import KvferryError

INTERVAL_S = 2.0
ATTAINMENT_WINDOW_S = 60.0
DEFAULT_POLICY = "kvferry.scaling.scaling_policy:ThresholdPolicy"

_log = logging.getLogger(__name__)

Record = dict[str, Any]
Mode = Literal["off", "dry-run", "on"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscaleOptions:
    """`policy`: `module:Class` of a ScalingPolicy that is made with `limits`."""

    mode: Mode = "off"
    policy: str = DEFAULT_POLICY
    limits: ScalingLimits = field(default_factory=ScalingLimits)

    def validate(self) -> None:
        """Raises ValueError naming the field."""
        self.limits.validate()
        load_policy(self.policy, self.limits)


class Attainment:
    """The share of requests that met the targets of their class, over the last while, from counters that only grow."""

    def __init__(self, window_s: float = ATTAINMENT_WINDOW_S) -> None:
        self._window_s = window_s
        self._seen: deque[tuple[float, int, int]] = deque()

    def note(self, now: float, met: int, missed: int) -> float | None:
        """Take the counters as they are now. The share over the window, None while nothing has ended in it.

        Counters that have gone back, because a router was started again, begin a new window.
        """
        if self._seen and (met < self._seen[-1][1] or missed < self._seen[-1][2]):
            self._seen.clear()
        self._seen.append((now, met, missed))
        while len(self._seen) > 2 and self._seen[1][0] <= now - self._window_s:
            self._seen.popleft()
        _, first_met, first_missed = self._seen[0]
        ended = met - first_met + missed - first_missed
        return (met - first_met) / ended if ended else None


class Autoscaler:
    """Event-loop thread only."""

    def __init__(
        self,
        fleet: Fleet,
        policy: ScalingPolicy,
        record: Callable[[Record], None],
        *,
        dry_run: bool,
        clock: Clock | None = None,
        interval_s: float = INTERVAL_S,
    ) -> None:
        """`record` takes what is to be written down, ready for JSON. `dry_run`: advise only."""
        self._fleet = fleet
        self._policy = policy
        self._record = record
        self._dry_run = dry_run
        self._clock = clock or SystemClock()
        self._interval_s = interval_s
        self._attainment = Attainment()
        self._last_hold = ""

    async def run(self) -> None:
        """Look after the cluster until cancelled."""
        while True:
            try:
                await self.step()
            except Exception:
                # A policy from elsewhere may fail in any way. The cluster serves on as it is.
                _log.exception("the autoscaler could not decide")
            await asyncio.sleep(self._interval_s)

    async def step(self) -> Decision:
        """Look once, and do what is to be done. Raises what the policy raises."""
        decision = await self._decide()
        if decision.action is Action.HOLD:
            if decision.reason != self._last_hold:
                self._write("autoscale", decision)
            self._last_hold = decision.reason
            return decision
        self._last_hold = ""
        self._write("autoscale", decision)
        if not self._dry_run:
            await self._carry_out(decision)
        return decision

    async def _decide(self) -> Decision:
        if self._fleet.is_changing:
            return Decision(Action.HOLD, "somebody else changes the cluster")
        try:
            view = await self._fleet.view()
        except KvferryError as error:
            return Decision(Action.HOLD, f"no router was heard: {error.code_name}")
        now = self._clock.now()
        attainment = self._attainment.note(now, view.slo_met, view.slo_missed)
        return self._policy.decide(Observation(view, len(self._fleet.names()), attainment), now)

    async def _carry_out(self, decision: Decision) -> None:
        outcome = "done"
        try:
            if decision.action is Action.ADD and decision.role is not None:
                outcome = f"{await self._fleet.add(decision.role)} was added"
            elif decision.action is Action.REMOVE and decision.worker is not None:
                await self._fleet.remove(decision.worker)
            elif decision.action is Action.FLIP and decision.role is not None and decision.worker is not None:
                await self._fleet.flip(decision.worker, decision.role)
        except (KvferryError, LaunchError) as error:
            outcome = f"failed: {error}"
        self._write("autoscaled", decision, outcome=outcome)

    def _write(self, event: str, decision: Decision, **more: str) -> None:
        self._record(
            {
                "event": event,
                "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "action": decision.action.value,
                "role": decision.role,
                "worker": decision.worker,
                "reason": decision.reason,
                "dry_run": self._dry_run,
                **decision.numbers,
                **more,
            }
        )


def load_policy(name: str, limits: ScalingLimits) -> ScalingPolicy:
    """The policy that `module:Class` names, made with these limits. Raises ValueError when there is no such class."""
    module_name, _, class_name = name.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"--autoscale-policy must be module:Class, not {name}: {error}") from error
    policy: ScalingPolicy = found(limits)
    return policy

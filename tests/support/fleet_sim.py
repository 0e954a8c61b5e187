"""A cluster as a scaling policy sees it, in virtual time: work is shared out evenly, and changes take a while.

Each tick is a second. Prompts wait until a prefill worker has computed them; answers occupy decode workers for as long
as they take, and wait before them where there is no room.
"""

import random
from dataclasses import dataclass, field

from kvferry.scaling.fleet_view import DRAINING, READY, ROLES, FleetView, WorkerFacts
from kvferry.scaling.scaling_policy import Action, Decision, Observation, ScalingPolicy
from runtime.role_file import Role

TOKEN_BUDGET, MAX_NUM_SEQS, NUM_BLOCKS = 256, 16, 1000


def view_of(counts: dict[Role, int], tokens_waiting: int, sequences: int, blocks: int = 0) -> FleetView:
    """Ready workers, with this to do among those of their role."""
    workers = []
    for role in ROLES:
        for index in range(counts[role]):
            first = index == 0
            prefill = role == "prefill"
            workers.append(
                WorkerFacts(
                    f"{role}-{index}", role, READY, token_budget=TOKEN_BUDGET, max_num_seqs=MAX_NUM_SEQS,
                    blocks_total=NUM_BLOCKS, tokens_waiting=tokens_waiting if prefill and first else 0,
                    sequences=sequences if first and not prefill else 0,
                    blocks_used=blocks if first and not prefill else 0,
                )
            )  # fmt: skip
    return FleetView(tuple(workers))


@dataclass
class _Worker:
    name: str
    role: Role
    ready_at: int = 0
    leaves_at: int | None = None
    becomes: Role | None = None


@dataclass
class FleetSim:
    """See the module. `history` has the counts of ready workers of each tick, `decisions` what the policy did,
    `present` all workers, ready or not, before it did the last."""

    policy: ScalingPolicy
    rng: random.Random
    start_s: int = 6
    drain_s: int = 9
    flip_s: int = 3
    tokens_per_prompt: int = 400
    answer_s: float = 5.0
    prefill_tokens_per_s: int = 1500
    now: int = 0
    workers: list[_Worker] = field(default_factory=lambda: [_Worker(f"{role}-0", role) for role in ROLES])
    backlog_tokens: float = 0.0
    running: float = 0.0
    waiting: float = 0.0
    history: list[dict[Role, int]] = field(default_factory=list)
    present: dict[Role, list[str]] = field(default_factory=dict)
    decisions: list[tuple[int, Decision]] = field(default_factory=list)
    _names: int = 0

    def tick(self, requests_per_s: float) -> None:
        """One second in which requests come at about this rate."""
        self.now += 1
        self._finish_changes()
        ready = {role: self.ready(role) for role in ROLES}
        arrivals = max(0.0, self.rng.gauss(requests_per_s, requests_per_s**0.5 / 2))
        self.backlog_tokens += arrivals * self.tokens_per_prompt
        computed = min(self.backlog_tokens, ready["prefill"] * self.prefill_tokens_per_s)
        self.backlog_tokens -= computed
        self.running -= self.running / self.answer_s
        self.waiting += computed / self.tokens_per_prompt
        taken = min(self.waiting, ready["decode"] * MAX_NUM_SEQS - self.running)
        self.running += max(0.0, taken)
        self.waiting -= max(0.0, taken)
        self.history.append(ready)
        self.present = {role: [w.name for w in self.workers if w.role == role] for role in ROLES}
        decision = self.policy.decide(Observation(self.view(), len(self.workers)), float(self.now))
        if decision.action is not Action.HOLD:
            self.decisions.append((self.now, decision))
            self._begin(decision)

    def ready(self, role: Role) -> int:
        """Workers of this role that do work."""
        return sum(w.role == role and w.ready_at <= self.now and w.leaves_at is None for w in self.workers)

    def view(self) -> FleetView:
        """What the routers know: starting workers are not attached."""
        facts = []
        for role in ROLES:
            attached = [w for w in self.workers if w.role == role and w.ready_at <= self.now]
            share = max(1, sum(w.leaves_at is None for w in attached))
            for one in attached:
                state = READY if one.leaves_at is None else DRAINING
                tokens = int(self.backlog_tokens / share) if role == "prefill" else 0
                sequences = round(self.running / share) if role == "decode" else 0
                facts.append(
                    WorkerFacts(
                        one.name, role, state, token_budget=TOKEN_BUDGET, max_num_seqs=MAX_NUM_SEQS,
                        blocks_total=NUM_BLOCKS, tokens_waiting=tokens, sequences=sequences,
                    )
                )  # fmt: skip
        return FleetView(tuple(facts), requests_queued=int(self.waiting))

    def _begin(self, decision: Decision) -> None:
        if decision.action is Action.ADD:
            assert decision.role is not None
            self._names += 1
            self.workers.append(_Worker(f"{decision.role}-n{self._names}", decision.role, self.now + self.start_s))
            return
        one = next(worker for worker in self.workers if worker.name == decision.worker)
        flips = decision.action is Action.FLIP
        one.leaves_at = self.now + (self.flip_s if flips else self.drain_s)
        one.becomes = decision.role if flips else None

    def _finish_changes(self) -> None:
        for one in list(self.workers):
            if one.leaves_at == self.now:
                one.leaves_at = None
                if one.becomes is None:
                    self.workers.remove(one)
                else:
                    one.role, one.becomes = one.becomes, None

"""What whoever scales a cluster knows of it at one moment. Pure: made from what routers tell (`fleet_admin.py`)."""

from dataclasses import dataclass

from runtime.role_file import Role

ROLES: tuple[Role, Role] = ("prefill", "decode")
READY, DRAINING = "ready", "draining"


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """One attached worker. `state`: ready, draining, stalled or failing. `sequences`: known to it in any state;
    `requests`: that all routers together count there. `incarnation` is of one life in one role."""

    name: str
    role: Role
    state: str
    incarnation: bytes = b""
    requests: int = 0
    sequences: int = 0
    tokens_waiting: int = 0
    blocks_total: int = 1
    blocks_used: int = 0
    blocks_quarantined: int = 0
    token_budget: int = 1
    max_num_seqs: int = 1

    @property
    def is_ready(self) -> bool:
        """Whether it takes work and does it."""
        return self.state == READY

    @property
    def is_at_rest(self) -> bool:
        """Whether it holds nothing of any request."""
        return not (self.requests or self.sequences or self.blocks_used or self.blocks_quarantined)

    @property
    def load_key(self) -> tuple[int, int, str]:
        """Sorts workers by how much would have to leave them."""
        return (max(self.requests, self.sequences), self.blocks_used, self.name)


@dataclass(frozen=True, slots=True)
class FleetView:
    """All attached workers, and what waits before them. SLO counts are since the routers started; `is_complete`: every
    router was heard."""

    workers: tuple[WorkerFacts, ...] = ()
    requests_queued: int = 0
    requests_in_flight: int = 0
    slo_met: int = 0
    slo_missed: int = 0
    is_complete: bool = True

    def of(self, role: str) -> tuple[WorkerFacts, ...]:
        """The workers of one role, in the order of their names."""
        return tuple(worker for worker in self.workers if worker.role == role)

    def get(self, name: str) -> WorkerFacts | None:
        """The worker of this name, if it is attached."""
        return next((worker for worker in self.workers if worker.name == name), None)

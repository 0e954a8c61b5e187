"""What a run of chaos has shown: numbers for machines, lines for people."""

import statistics
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class FaultRecord:
    """One step. `recovery_s`: from the end of its faults until the cluster was whole again and had answered; None: it
    never was."""

    at_s: float
    faults: tuple[str, ...]
    recovery_s: float | None


@dataclass
class Report:
    """`violations` are what must never happen; a run without any is good."""

    seed: int
    pace: str
    duration_s: float = 0.0
    requests: dict[str, int] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    request_s: dict[str, float] = field(default_factory=dict)
    records: list[FaultRecord] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """Whether nothing happened that must not."""
        return not self.violations

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        p50, p99 = percentiles([one.recovery_s for one in self.records if one.recovery_s is not None])
        counted: dict[str, int] = {}
        for record in self.records:
            for fault in record.faults:
                kind = fault.partition(":")[0].partition(" of ")[0].partition(" at ")[0]
                counted[kind] = counted.get(kind, 0) + 1
        return {
            **asdict(self),
            "faults": sum(counted.values()),
            "faults_by_kind": dict(sorted(counted.items())),
            "recovery_s_p50": p50,
            "recovery_s_p99": p99,
        }

    def lines(self) -> list[str]:
        """For people."""
        facts = self.as_dict()
        by_kind = ", ".join(f"{count} {kind}" for kind, count in facts["faults_by_kind"].items())
        requests = ", ".join(f"{count} {ending}" for ending, count in self.requests.items())
        p50, p99 = facts["recovery_s_p50"], facts["recovery_s_p99"]
        recovery = "nothing to recover from" if p50 is None else f"p50 {p50:.2f} s, p99 {p99:.2f} s"
        return [
            f"chaos: seed {self.seed}, pace {self.pace}, {self.duration_s:.0f} s",
            f"  faults: {facts['faults']} ({by_kind})",
            f"  requests: {requests}",
            *(f"    {count} failed visibly: {detail}" for detail, count in self.failures.items()),
            f"  good requests took: {', '.join(f'{name} {value:.2f} s' for name, value in self.request_s.items())}",
            f"  recovery: {recovery}",
            *(f"  VIOLATED: {violation}" for violation in self.violations),
            "  nothing was violated: no wrong text, no hang, no leaked block, no orphan"
            if self.is_good
            else "  FAILED",
        ]


def percentiles(values: list[float]) -> tuple[float | None, float | None]:
    """Median and 99th percentile; None of nothing."""
    if not values:
        return None, None
    ordered = sorted(values)
    return statistics.median(ordered), ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]

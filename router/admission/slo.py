"""Service classes: what a request may ask for by name, and what it then gets and is measured by."""

from dataclasses import dataclass

NO_CLASS = "none"
"""The label of requests that name no class."""


@dataclass(frozen=True, slots=True)
class SloClass:
    """One class. `ttft_s` and `tpot_s`: its targets for arrival to first token and for the mean time of each token
    after that, in seconds. `priority`: of its requests that state none. `sheds_by_ttft`: a request whose first token
    would clearly come too late is refused at once; otherwise only its own deadline counts for that."""

    name: str
    ttft_s: float
    tpot_s: float
    priority: int = 0
    sheds_by_ttft: bool = False

    def verdict(self, ttft_s: float, tpot_s: float | None) -> str:
        """`met`, or the first target that was missed. `tpot_s` None: there was one token only."""
        if ttft_s > self.ttft_s:
            return "missed_ttft"
        if tpot_s is not None and tpot_s > self.tpot_s:
            return "missed_tpot"
        return "met"


INTERACTIVE = SloClass("interactive", ttft_s=2.0, tpot_s=0.2, priority=10, sheds_by_ttft=True)
BATCH = SloClass("batch", ttft_s=60.0, tpot_s=2.0, priority=-10)
SLO_NAMES = (INTERACTIVE.name, BATCH.name)

"""Bounds of the dispatcher, in one value."""

from dataclasses import dataclass

from router.admission.admission import AdmissionLimits
from router.admission.fair_queue import TenantShares, equal_shares
from router.admission.placing import PlacingLimits
from router.admission.slo import BATCH, INTERACTIVE, SloClass


@dataclass(frozen=True, slots=True)
class DispatchLimits:
    """Bounds of the dispatcher. Tokens are those of prompts and expected answers; `max_room_wait_s` is how long a
    request may wait for room on a worker. `forecast_tokens`, `slo_classes`: see `PlacingLimits`. `strict_handoff`:
    every prompt comes from a prefill worker, provably, or the request fails; `require_transports`: over one of these,
    if any are named. `reuse_decode_kv`: prefill workers may pull what decode workers have cached."""

    max_in_flight: int = 256
    max_queued: int = 1024
    max_queued_tokens: int = 4_000_000
    max_room_wait_s: float = 120.0
    forecast_tokens: int = 512
    slo_classes: tuple[SloClass, ...] = (INTERACTIVE, BATCH)
    share_of: TenantShares = equal_shares
    strict_handoff: bool = False
    require_transports: tuple[str, ...] = ()
    reuse_decode_kv: bool = True

    @property
    def placing(self) -> PlacingLimits:
        """What bounds turns and workers."""
        queue = (self.max_in_flight, self.max_queued, self.max_queued_tokens, self.max_room_wait_s, self.share_of)
        return PlacingLimits(AdmissionLimits(*queue), self.forecast_tokens, self.slo_classes)

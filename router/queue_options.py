"""Flags of the router about who waits, for what, and how classes of service are measured."""

from dataclasses import dataclass, replace

from router.admission.slo import BATCH, INTERACTIVE, SloClass
from runtime.config import flag


@dataclass(frozen=True, kw_only=True)
class QueueOptions:
    """The forecast of KV, and the targets of the classes."""

    kv_forecast_tokens: int = flag(
        512, "Tokens ahead for which a decode worker must have KV room before a request goes there; 0 = only try."
    )
    slo_interactive_ttft_s: float = flag(INTERACTIVE.ttft_s, 'Time to first token of "slo": "interactive".')
    slo_interactive_tpot_s: float = flag(INTERACTIVE.tpot_s, "Its time per output token.")
    slo_batch_ttft_s: float = flag(BATCH.ttft_s, 'Time to first token of "slo": "batch".')
    slo_batch_tpot_s: float = flag(BATCH.tpot_s, "Its time per output token.")

    def validate(self) -> None:
        """Raises ValueError naming the flag."""
        if self.kv_forecast_tokens < 0:
            raise ValueError("--kv-forecast-tokens must not be negative")
        for name in ("interactive_ttft_s", "interactive_tpot_s", "batch_ttft_s", "batch_tpot_s"):
            if not getattr(self, f"slo_{name}") > 0:
                raise ValueError(f"--slo-{name.replace('_', '-')} must be positive")

    @property
    def slo_classes(self) -> tuple[SloClass, ...]:
        """The classes with the targets set here."""
        return (
            replace(INTERACTIVE, ttft_s=self.slo_interactive_ttft_s, tpot_s=self.slo_interactive_tpot_s),
            replace(BATCH, ttft_s=self.slo_batch_ttft_s, tpot_s=self.slo_batch_tpot_s),
        )

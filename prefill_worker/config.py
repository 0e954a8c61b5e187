"""Configuration of a prefill worker."""

from dataclasses import dataclass

from engine.options import EngineOptions
from runtime.config import flag
from runtime.worker_host import HostOptions

TRANSPORTS = ("shm", "tcp")


@dataclass(frozen=True, kw_only=True)
class PrefillConfig(EngineOptions, HostOptions):
    """A kvferry prefill worker: computes prompts and pushes their KV blocks to decode workers."""

    transports: tuple[str, ...] = flag(TRANSPORTS, "KV transports it may use; the decode worker's order decides.")

    def validate(self) -> None:
        """Raises ValueError naming the flag."""
        HostOptions.validate(self)
        EngineOptions.validate(self)
        if not self.transports or any(name not in TRANSPORTS for name in self.transports):
            raise ValueError(f"--transports must be some of {', '.join(TRANSPORTS)}")

"""Configuration of a decode worker."""

from dataclasses import dataclass

from engine.options import EngineOptions
from runtime.config import flag
from runtime.worker_host import HostOptions

TRANSPORTS = ("shm", "tcp")


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(EngineOptions, HostOptions):
    """A kvferry decode worker: receives verified KV blocks and generates."""

    transports: tuple[str, ...] = flag(TRANSPORTS, "KV transports it offers, best first.")
    data_port: int = flag(0, "Port that accepts KV blocks; 0 takes a free one.")
    lease_s: float = flag(10.0, "How long a reserved place is held after the last sign of life of its writer.")

    def validate(self) -> None:
        """Raises ValueError naming the flag."""
        HostOptions.validate(self)
        EngineOptions.validate(self)
        if not self.transports or any(name not in TRANSPORTS for name in self.transports):
            raise ValueError(f"--transports must be some of {', '.join(TRANSPORTS)}")
        if not 0 <= self.data_port <= 65535:
            raise ValueError("--data-port must be 0 to 65535")
        if not 0.1 <= self.lease_s <= 600:
            raise ValueError("--lease-s must be 0.1 to 600")

"""Configuration of a decode worker."""

from dataclasses import dataclass

from engine.options import EngineOptions
from kv_transfer.options import TransferOptions
from runtime.worker_host import HostOptions


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(EngineOptions, TransferOptions, HostOptions):
    """A kvferry decode worker: receives verified KV blocks and generates."""

    def validate(self) -> None:
        """Raises ValueError naming the flag."""
        HostOptions.validate(self)
        EngineOptions.validate(self)
        TransferOptions.validate(self)

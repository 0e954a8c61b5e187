"""Configuration of a prefill worker."""

from dataclasses import dataclass

from engine.options import EngineOptions
from kv_transfer.options import SendOptions
from runtime.worker_host import HostOptions


@dataclass(frozen=True, kw_only=True)
class PrefillConfig(EngineOptions, SendOptions, HostOptions):
    """A kvferry prefill worker: computes prompts and pushes their KV blocks to decode workers."""

    def validate(self) -> None:
        """Raises ValueError naming the flag."""
        HostOptions.validate(self)
        EngineOptions.validate(self)
        SendOptions.validate(self)

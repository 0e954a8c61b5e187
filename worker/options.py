"""Flags of every worker. Both roles have the same ones, because a worker may change its role while it runs."""

from dataclasses import dataclass

from engine.options import EngineOptions
from kv_transfer.options import SendOptions
from runtime.worker_host import HostOptions


@dataclass(frozen=True, kw_only=True)
class WorkerOptions(EngineOptions, SendOptions, HostOptions):
    """A worker, in either role."""

    def validate(self) -> None:
        """Raises ValueError naming the flag."""
        HostOptions.validate(self)
        EngineOptions.validate(self)
        SendOptions.validate(self)

"""Configuration of a decode worker."""

from dataclasses import dataclass

from worker.options import WorkerOptions


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(WorkerOptions):
    """A kvferry decode worker: receives verified KV blocks and generates."""

"""Configuration of a prefill worker."""

from dataclasses import dataclass

from worker.options import WorkerOptions


@dataclass(frozen=True, kw_only=True)
class PrefillConfig(WorkerOptions):
    """A kvferry prefill worker: computes prompts and pushes their KV blocks to decode workers."""

"""Which rows a device samples by itself."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from engine.sampler import SampleRow, changes_logits


class DeviceSampler(Protocol):
    """Chooses tokens where the logits are."""

    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
        """int64 [R] for logits fp32 [R, vocab], queued: greedy, or drawn with temperature, top-k, top-p and min-p, as
        `engine.sampler.Sampler` does. Nothing else of the rows is heeded. -1: the row cannot be sampled."""
        ...


def needs_host(row: SampleRow) -> bool:
    """Whether a row wants more than a DeviceSampler does: log probabilities, or logits changed before."""
    return row.sampling.num_logprobs is not None or changes_logits(row)

"""The sampling kernel as a DeviceSampler."""

from collections.abc import Sequence

from torch import Tensor

from engine.kernels.sampling import sample, sampling_rows
from engine.sampler import SampleRow


class TritonSampler:
    """See DeviceSampler. Stateless."""

    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
        """See DeviceSampler."""
        params, positions = [row.sampling for row in rows], [row.position for row in rows]
        return sample(logits, sampling_rows(params, positions, logits.device))

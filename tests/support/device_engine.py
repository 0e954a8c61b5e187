"""The toy engine run as on a device: batches uploaded, steps captured, layers announced by events, pools mirrored."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.batch import Batch
from engine.execution.device import CpuDevice, Event
from engine.execution.device_runner import DeviceParts, DeviceRunner
from engine.execution.graphs import GraphPool, GraphShape
from engine.execution.mirror import PoolMirror
from engine.execution.staging import Staging
from engine.model_runner import no_hook
from engine.paged_cache import PagedCache
from engine.sampler import Sampler, SampleRow
from engine.sequence import SamplingParams, TokenSample
from tests.support.padded_attention import PaddedAttention
from tests.support.toy_engine import MODEL, ToyEngine, poisoned_cache
from tests.support.toy_model import ToyModel

MAX_CONTEXT = 400


class Captures:
    """A capture as CUDA has it: replaying runs the same work, and its result is where it was the first time."""

    def __init__(self) -> None:
        self.rows_replayed: list[int] = []

    def capture(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """See Device.capture."""
        result = work().clone()

        def replay() -> Tensor:
            self.rows_replayed.append(len(result))
            return result.copy_(work())

        return replay


class FakeDeviceSampler:
    """What the kernel does, by the host's sampler. Says which rows it was given."""

    def __init__(self) -> None:
        self.num_calls = 0

    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
        """See DeviceSampler."""
        self.num_calls += 1
        plain = [SampleRow(_plain(row.sampling), (), (), row.position) for row in rows]
        found = Sampler().sample(logits, plain)
        return torch.tensor([each.token_id if isinstance(each, TokenSample) else -1 for each in found])


class LateDevice(CpuDevice):
    """Nothing is known to be done before somebody has waited for it."""

    def record(self) -> Event:
        """See Device."""
        return _Late()


class _Late:
    def __init__(self) -> None:
        self._waited = False

    def done(self) -> bool:
        return self._waited

    def wait(self) -> None:
        self._waited = True


def _plain(given: SamplingParams) -> SamplingParams:
    return SamplingParams(
        max_tokens=1,
        temperature=given.temperature,
        top_k=given.top_k,
        top_p=given.top_p,
        min_p=given.min_p,
        seed=given.seed,
    )


def graph_pool(
    model: ToyModel, cache: PagedCache, max_rows: int, captures: Captures, device: CpuDevice | None = None
) -> GraphPool:
    """Captured steps of the toy model over a pool."""
    attention = PaddedAttention(cache)

    def step(batch: Batch) -> Tensor:
        return model.logits(model.forward(batch, attention, no_hook))

    device = device or CpuDevice()
    shape = GraphShape(max_rows, MAX_CONTEXT, cache.layout.block_size)
    return GraphPool(step, shape, device, Staging(device), captures.capture)


class DeviceToyEngine(ToyEngine):
    """The runner's pool is `device_cache`; the one that hand-offs see is `cache`."""

    def __init__(
        self,
        model: ToyModel = MODEL,
        *,
        num_blocks: int,
        max_num_seqs: int = 4,
        graphs: bool = True,
        reads_host: bool = False,
        samples: bool = True,
        late: bool = False,
        **sizes: int | bool,
    ) -> None:
        self.captures = Captures()
        self.device_sampler = FakeDeviceSampler()
        self._device = (LateDevice if late else CpuDevice)(reads_host=reads_host)
        self._with = (graphs, samples, max_num_seqs)
        self.runner: DeviceRunner
        self.device_cache: PagedCache
        super().__init__(
            model,
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            make_runner=lambda cache: self._make_runner(model, cache),
            **sizes,  # type: ignore[arg-type]
        )

    def _make_runner(self, model: ToyModel, cache: PagedCache) -> tuple[DeviceRunner, PoolMirror]:
        layout, device = cache.layout, self._device
        self.device_cache = poisoned_cache(layout, cache.num_blocks)
        mirror = PoolMirror(device, pool_bytes(self.device_cache), pool_bytes(cache), layout)
        graphs, samples, max_rows = self._with
        parts = DeviceParts(
            device,
            Staging(device),
            graph_pool(model, self.device_cache, max_rows, self.captures, device) if graphs else None,
            self.device_sampler if samples else None,
            mirror,
        )
        attention = PaddedAttention(self.device_cache)
        self.runner = DeviceRunner(model, attention, parts, Sampler(), layout.block_size)
        return self.runner, mirror

    def poison(self, block_ids: Sequence[int]) -> None:
        """Fill blocks with NaN, in both pools."""
        super().poison(block_ids)
        for layer in range(self.cache.layout.num_layers):
            self.device_cache.k(layer)[list(block_ids)] = torch.nan
            self.device_cache.v(layer)[list(block_ids)] = torch.nan


def pool_bytes(cache: PagedCache) -> Tensor:
    """The whole pool, uint8."""
    return cache._pool.view(torch.uint8)

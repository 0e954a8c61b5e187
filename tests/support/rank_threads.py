"""All ranks of a model in one process, a thread each, over one pool: what a tensor parallel worker's processes do."""

import mmap
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from engine.attention.interface import AttentionBackend
from engine.attention.native import best_cpu_attention
from engine.attention.torch_paged import TorchAttention
from engine.batch import Batch
from engine.model_runner import LayerHook
from engine.models import load_model
from engine.ops.interface import Ops
from engine.ops.native_ops import best_cpu_ops
from engine.ops.torch_ops import TorchOps
from engine.paged_cache import PagedCache
from engine.parallel.group import GroupStore, TensorParallel
from engine.parallel.rank import RankParts, load_rank
from engine.prepared_model import PreparedModel
from kv_cache.layout import KVCacheLayout, KVDtype

_Result = TypeVar("_Result")
WAIT_S = 60.0  # only ever reached by a test that fails
BLOCK_SIZE = 8
NUM_BLOCKS = 12

WrapAttention = Callable[[int, AttentionBackend], AttentionBackend]


def on_all_ranks(size: int, work: Callable[[TensorParallel], _Result], step_timeout_s: float = WAIT_S) -> list[_Result]:
    """`work` on `size` ranks that have met, each in a thread; the results by rank."""
    store = GroupStore(size)

    def run(rank: int) -> _Result:
        group = TensorParallel(rank, size)
        group.connect(store if rank == 0 else store.port, step_timeout_s=step_timeout_s)
        try:
            return work(group)
        finally:
            group.close()

    with ThreadPoolExecutor(size) as threads:
        futures = [threads.submit(run, rank) for rank in range(size)]
        return [future.result(WAIT_S) for future in futures]


class PoolOfAll:
    """A pool that starts full of NaN, and what was computed on it."""

    def __init__(self, prepared: PreparedModel, dtype: KVDtype = KVDtype.FP32, *, fast: bool = False) -> None:
        """`fast`: computed by the best code for this CPU, not by plain torch."""
        self.fast = fast
        config = prepared.config
        self.prepared = prepared
        self.layout = KVCacheLayout(
            model_id=prepared.name,
            model_revision=prepared.revision,
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=BLOCK_SIZE,
            dtype=dtype,
        )
        self.memory = memoryview(mmap.mmap(-1, self.layout.pool_bytes(NUM_BLOCKS)))
        self.memory[:] = b"\xff" * len(self.memory)

    def tensor(self) -> Tensor:
        """All numbers in the pool; NaN where nobody wrote."""
        return torch.frombuffer(self.memory, dtype=torch.float32).clone()

    def attention(self, heads: range | None = None) -> AttentionBackend:
        cache = PagedCache(self.layout, NUM_BLOCKS, self.memory, heads)
        return (best_cpu_attention if self.fast else TorchAttention)(cache, self.prepared.config.attention)

    def ops(self) -> Ops:
        return best_cpu_ops() if self.fast else TorchOps()

    @torch.inference_mode()
    def compute_alone(self, batches: Sequence[Batch]) -> list[Tensor]:
        """Logits of all tokens of each batch, by one process."""
        model, attention = load_model(self.prepared, self.ops()), self.attention()
        return [model.logits(model.forward(batch, attention, lambda layer: None)).clone() for batch in batches]

    def compute_split(
        self,
        size: int,
        batches: Sequence[Batch],
        on_layer: LayerHook = lambda layer: None,
        wrap: WrapAttention = lambda rank, attention: attention,
    ) -> list[Tensor]:
        """The same by `size` ranks; `wrap(rank, attention)` may look at what a rank's backend is asked for."""

        @torch.inference_mode()
        def run(group: TensorParallel) -> list[Tensor]:
            parts: RankParts = load_rank(
                self.prepared, self.ops(), group, lambda heads: wrap(group.rank, self.attention(heads))
            )
            hook = parts.ops.announce_when_summed(on_layer) if group.rank == 0 else lambda layer: None
            return [parts.model.logits(parts.model.forward(batch, parts.attention, hook)) for batch in batches]

        return on_all_ranks(size, run)[0]

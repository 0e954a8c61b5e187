"""From options to an engine that runs: the model is prepared and mapped, the pool laid out, the parts joined."""

import logging
from dataclasses import dataclass
from typing import Any

import torch

from engine.attention.torch_paged import TorchAttention
from engine.engine import Engine
from engine.model_runner import ModelRunner
from engine.models import load_model
from engine.ops.torch_ops import TorchOps
from engine.options import DEFAULT_POOL_BYTES, EngineOptions
from engine.paged_cache import PagedCache
from engine.prepare import prepare_model
from engine.prepared_model import PreparedModel
from engine.sampler import Sampler
from engine.scheduler import SchedulerConfig
from engine.wire import DoorLimits
from kv_cache.block_hash import BlockHasher
from kv_cache.block_manager import BlockManager
from kv_cache.layout import KVCacheLayout, KVDtype

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """What is known before memory is taken: the model and the shape of the pool."""

    model: PreparedModel
    layout: KVCacheLayout
    num_blocks: int
    limits: DoorLimits

    @property
    def pool_bytes(self) -> int:
        """Size of the buffer that `build_engine` needs."""
        return self.layout.pool_bytes(self.num_blocks)

    def facts(self, options: EngineOptions) -> dict[str, Any]:
        """The fields of `Register` that tell routers what this engine can take."""
        return {
            "layout": self.layout.to_proto(),
            "num_blocks": self.num_blocks,
            "max_context_tokens": self.limits.max_context_tokens,
            "vocab_size": self.limits.vocab_size,
            "token_budget": options.token_budget,
            "max_num_seqs": options.max_num_seqs,
        }


def plan_engine(options: EngineOptions, *, available_bytes: int | None) -> EnginePlan:
    """Prepare the model, if nobody has yet, and size the pool; `available_bytes` is the memory free now, if known.

    Raises KvferryError for a model that cannot be used (see `prepare_model`), ValueError for a context that the model
    does not have or a pool that does not fit the memory.
    """
    model = prepare_model(options.model, options.cache_dir.expanduser(), _log_progress)
    config = model.config
    if options.max_context_tokens > config.max_context_tokens:
        raise ValueError(f"--max-context-tokens is beyond the model's limit of {config.max_context_tokens}")
    layout = KVCacheLayout(
        model_id=model.name,
        model_revision=model.revision,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=options.block_size,
        dtype=KVDtype.FP32,
    )
    pool_bytes = min(DEFAULT_POOL_BYTES, (available_bytes or DEFAULT_POOL_BYTES) // 4)
    num_blocks = options.num_blocks or max(1, pool_bytes // layout.block_bytes)
    needed_bytes = layout.pool_bytes(num_blocks)
    if available_bytes is not None and needed_bytes > available_bytes:
        raise ValueError(
            f"a pool of {num_blocks} blocks (--num-blocks) needs {needed_bytes / 2**20:.0f} MiB of memory, "
            f"{available_bytes / 2**20:.0f} MiB are available"
        )
    # A request that could never fit the pool must be refused at the door, so the door knows the smaller bound.
    context = options.max_context_tokens or config.max_context_tokens
    limits = DoorLimits(config.vocab_size, min(context, num_blocks * options.block_size), model.eos_token_ids)
    return EnginePlan(model, layout, num_blocks, limits)


def build_engine(options: EngineOptions, plan: EnginePlan, pool: memoryview, *, prefill_only: bool) -> Engine:
    """Join the parts. `pool`: writable, page-aligned, `plan.pool_bytes` long; it must outlive the engine.

    The engine belongs to the thread that will step it. Sets torch to one thread for the whole process.
    """
    torch.set_num_threads(1)
    model = load_model(plan.model, TorchOps())
    cache = PagedCache(plan.layout, plan.num_blocks, pool)
    config = SchedulerConfig(
        token_budget=options.token_budget,
        max_num_seqs=options.max_num_seqs,
        max_waiting=options.max_waiting,
        prefill_only=prefill_only,
    )
    runner = ModelRunner(model, TorchAttention(cache, plan.model.config.attention), Sampler(), options.block_size)
    return Engine(
        config,
        BlockManager(plan.num_blocks, options.block_size),
        BlockHasher.for_layout(plan.layout),
        runner,
    )


def log_load(what: str, plan: EnginePlan) -> None:
    """One line about what a worker serves and from how large a pool."""
    _log.info(
        "%s: %s (%s), %d blocks of %d tokens, %.0f MiB of KV, context %d",
        what,
        plan.model.name,
        plan.model.revision[:12],
        plan.num_blocks,
        plan.layout.block_size,
        plan.pool_bytes / 2**20,
        plan.limits.max_context_tokens,
    )


def _log_progress(stage: str, fraction: float) -> None:
    _log.info("preparing the model: %s (%d%%)", stage, round(fraction * 100))

"""From options to an engine that runs: the model is prepared and mapped, the pool laid out, the parts joined."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch

from engine.attention.interface import AttentionBackend
from engine.attention.native import best_cpu_attention
from engine.cpu_placement import pin
from engine.engine import Engine
from engine.execution.cuda import check_cuda
from engine.execution.graphs import GraphShape
from engine.model_runner import Model, ModelRunner, Runner
from engine.models import load_model
from engine.native import NativeUnavailable, kernels
from engine.ops.native_ops import best_cpu_ops
from engine.options import DEFAULT_POOL_BYTES, EngineOptions
from engine.paged_cache import PagedCache
from engine.parallel.channel import PoolFile
from engine.parallel.group import TensorParallel
from engine.parallel.leader import Followers, LeaderModel
from engine.parallel.rank import RankParts, load_rank
from engine.parallel.shard import check_split
from engine.prepare import prepare_model
from engine.prepared_model import PreparedModel
from engine.sampler import Sampler
from engine.scheduler import SchedulerConfig
from engine.self_test import self_test
from engine.weight_dtypes import WeightDtype
from engine.wire import DoorLimits
from kv_cache.block_hash import BlockHasher
from kv_cache.block_manager import BlockManager
from kv_cache.layout import KVCacheLayout, KVDtype

if TYPE_CHECKING:
    from engine.execution.build import DeviceEngine

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
    does not have, a pool that does not fit the memory, or a device that torch does not see.
    """
    if options.device != "cpu":
        check_cuda(torch.device(options.device))
    weight_dtype = WeightDtype(options.weight_dtype) if options.weight_dtype else None
    model = prepare_model(options.model, options.cache_dir.expanduser(), _log_progress, weight_dtype)
    config = model.shape
    check_split(model.shape, options.tensor_parallel)
    if options.max_context_tokens > config.max_context_tokens:
        raise ValueError(f"--max-context-tokens is beyond the model's limit of {config.max_context_tokens}")
    layout = KVCacheLayout(
        model_id=model.name,
        model_revision=model.revision,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=options.block_size,
        dtype=KVDtype(options.kv_cache_dtype),
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


def start_followers(options: EngineOptions, plan: EnginePlan, pool_file: tuple[int, int] | None) -> Followers | None:
    """Start the processes of the other ranks, which load while this one does; None when the model is not split.

    `pool_file`: descriptor of the memory file that the pool is in, and where it begins there. Raises ValueError when
    there are ranks and no such file, OSError when a process cannot be started.
    """
    if options.tensor_parallel == 1:
        return None
    if pool_file is None:
        raise ValueError("the ranks of a model that is split need a pool in shared memory")
    known = {field.name: getattr(options, field.name) for field in fields(EngineOptions)}
    settled = EngineOptions(**{**known, "model": str(plan.model.path), "num_blocks": plan.num_blocks})
    return Followers(settled, PoolFile(*pool_file), plan.pool_bytes)


def build_rank(options: EngineOptions, plan: EnginePlan, pool: memoryview, group: TensorParallel) -> RankParts:
    """One rank's part of the engine, over the pool that all ranks share. Raises KvferryError as `load_rank` does, and
    ValueError for CPUs that this process may not use."""
    _place(options)
    ops, threads = best_cpu_ops(options.threads), options.threads
    return load_rank(plan.model, ops, group, lambda heads: _attention(plan, pool, threads, heads))


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on its pool, ready to be stepped: what is dear to make, and the same whatever role a worker has."""

    options: EngineOptions
    plan: EnginePlan
    runner: Runner
    device: "DeviceEngine | None" = None

    def engine(self, *, prefill_only: bool, block_manager: BlockManager | None = None) -> Engine:
        """An engine that runs it. Only one at a time: the next one may be made when the last takes no more steps.

        `block_manager`: of the engine before it, whose prefix cache goes on; None = the pool is empty. Raises
        ValueError for a device with too little memory for what decoding needs there.
        """
        options, plan = self.options, self.plan
        if self.device is not None and not prefill_only:
            shape = GraphShape(options.max_num_seqs, plan.limits.max_context_tokens, options.block_size)
            with _memory_of(options.device):
                self.device.capture(shape)
        config = SchedulerConfig(
            token_budget=options.token_budget,
            max_num_seqs=options.max_num_seqs,
            max_waiting=options.max_waiting,
            prefill_only=prefill_only,
            speculative_tokens=0 if prefill_only else options.speculative_tokens,
        )
        return Engine(
            config,
            block_manager or BlockManager(plan.num_blocks, options.block_size),
            BlockHasher.for_layout(plan.layout),
            self.runner,
            self.device.mirror if self.device is not None else None,
        )


def load_on_pool(
    options: EngineOptions, plan: EnginePlan, pool: memoryview, followers: Followers | None = None
) -> LoadedModel:
    """Load the weights, and compute a few tokens with them (`self_test`). `pool`: writable, page-aligned,
    `plan.pool_bytes` long; it must outlive what uses it.

    With `followers` this process is rank 0 of them; whoever started them closes them after the last step. Sets torch's
    threads, and the CPUs, of the whole process. Raises KvferryError when a part cannot be loaded, here or there, or
    gives no token, ValueError for CPUs that it may not use or a device that does not do, OSError when a device cannot
    have `pool` pinned.
    """
    _place(options)
    if options.device != "cpu":
        on_device = _on_device(options, plan, pool)
        self_test(on_device.runner, plan.layout, plan.limits, on_device.mirror)
        return LoadedModel(options, plan, on_device.runner, on_device)
    runner = _cpu_runner(options, plan, pool, followers)
    self_test(runner, plan.layout, plan.limits)
    return LoadedModel(options, plan, runner)


def build_engine(
    options: EngineOptions,
    plan: EnginePlan,
    pool: memoryview,
    *,
    prefill_only: bool,
    followers: Followers | None = None,
) -> Engine:
    """Load the model and make an engine of it, which belongs to the thread that will step it. As `load_on_pool`."""
    return load_on_pool(options, plan, pool, followers).engine(prefill_only=prefill_only)


def _cpu_runner(options: EngineOptions, plan: EnginePlan, pool: memoryview, followers: Followers | None) -> ModelRunner:
    model: Model
    if followers is None:
        model = load_model(plan.model, best_cpu_ops(options.threads))
        attention = _attention(plan, pool, options.threads)
    else:
        parts = build_rank(options, plan, pool, followers.group)
        followers.connect()
        model, attention = LeaderModel(parts.model, parts.ops, followers), parts.attention
    return ModelRunner(model, attention, Sampler(), options.block_size)


def _on_device(options: EngineOptions, plan: EnginePlan, pool: memoryview) -> "DeviceEngine":
    try:  # Not at the top: it needs Triton, which is an extra.
        from engine.execution.build import build_on_device, cuda_device
    except ImportError as error:
        raise ValueError(f"--device {options.device} needs Triton: pip install kvferry[gpu] ({error})") from error
    with _memory_of(options.device):
        return build_on_device(plan.model, plan.layout, pool, None, cuda_device(options.device))


@contextmanager
def _memory_of(device: str) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ValueError(f"--device {device} has too little memory (--num-blocks): {error}") from error


def _place(options: EngineOptions) -> None:
    torch.set_num_threads(options.threads)
    pin(options.pin_cpus)


def _attention(plan: EnginePlan, pool: memoryview, threads: int, heads: range | None = None) -> AttentionBackend:
    cache = PagedCache(plan.layout, plan.num_blocks, pool, heads)
    return best_cpu_attention(cache, plan.model.shape.attention, threads)


def log_load(what: str, plan: EnginePlan, device: str = "cpu") -> None:
    """One line about what a worker serves, from how large a pool, and with which kernels."""
    computed_by = device
    try:
        if device == "cpu":
            computed_by = kernels().instructions
    except NativeUnavailable as error:
        computed_by = f"torch, slowly: the C kernels cannot be used, {error}"
    _log.info(
        "%s: %s (%s), weights %s, %d blocks of %d tokens, %.0f MiB of KV in %s, context %d, computed by %s",
        what,
        plan.model.name,
        plan.model.revision[:12],
        plan.model.weight_dtype.value,
        plan.num_blocks,
        plan.layout.block_size,
        plan.pool_bytes / 2**20,
        plan.layout.dtype.value,
        plan.limits.max_context_tokens,
        computed_by,
    )


def _log_progress(stage: str, fraction: float) -> None:
    _log.info("preparing the model: %s (%d%%)", stage, round(fraction * 100))

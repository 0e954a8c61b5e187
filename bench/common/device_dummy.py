"""A model of random weights that decodes on a device, in a whole engine: what a step costs depends on shapes alone."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bench.common.harness import BenchmarkError
from engine.attention.interface import AttentionBackend, LayerAttention
from engine.batch import Batch, BatchRow, build_batch
from engine.engine import Engine
from engine.execution.device import Device
from engine.execution.device_runner import DeviceParts, DeviceRunner
from engine.execution.graphs import GraphPool, GraphShape
from engine.execution.sampling import DeviceSampler
from engine.execution.staging import Staging
from engine.model_config import ModelConfig, RopeConfig
from engine.model_runner import Model, no_hook
from engine.sampler import Sampler
from engine.scheduler import SchedulerConfig
from engine.sequence import SamplingParams, Sequence, TokenSample
from engine.tensor_map import prepared_tensors
from engine.weight_dtypes import WeightDtype, stored_forms
from kv_cache.block_hash import BlockHasher
from kv_cache.block_manager import BlockManager
from kv_cache.layout import KVCacheLayout

SHAPE_8B = ModelConfig(
    family="llama",
    vocab_size=128256,
    num_layers=32,
    num_q_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_context_tokens=8192,
    attention=(LayerAttention(128**-0.5),) * 32,
    hidden_size=4096,
    intermediate_size=14336,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=500000.0),
)
"""Llama 3's of 8 billion weights."""

GREEDY = SamplingParams(max_tokens=1 << 20, temperature=0.0, ignore_eos=True)


def random_weights(config: ModelConfig, dtype: WeightDtype, device: torch.device, seed: int) -> dict[str, Tensor]:
    """Every tensor of a prepared model, small random numbers; those of norms are 1. Not for int8."""
    generator = torch.Generator(device).manual_seed(seed)
    weights = {}
    for name, form in stored_forms(prepared_tensors(config), dtype).items():
        tensor = torch.ones(form.shape, dtype=form.dtype, device=device)
        weights[name] = tensor if len(form.shape) == 1 else tensor.normal_(0.0, 0.02, generator=generator)
    return weights


@dataclass(frozen=True, slots=True)
class Load:
    """So many sequences that decode, their contexts at first, and tokens that each may become longer by."""

    batch: int
    context: int
    growth: int

    @property
    def most_tokens(self) -> int:
        """A sequence's at its end."""
        return self.context + self.growth

    def num_blocks(self, block_size: int) -> int:
        """Of a pool with room for all, and some to spare."""
        return self.batch * (-(-self.most_tokens // block_size) + 2)


@dataclass(frozen=True, slots=True, eq=False)
class Kit:
    """A model and what computes it: `attention` is over a pool of `Load.num_blocks` blocks of `layout`."""

    model: Model
    attention: AttentionBackend
    layout: KVCacheLayout
    device: Device
    sampler: DeviceSampler


class DummyDecoding:
    """An engine in which all sequences decode, greedily, as if hand-offs had brought their KV. Owner thread only.

    Several over one pool do the same with the same blocks: they may take turns, step by step.
    """

    def __init__(self, kit: Kit, load: Load, *, graphs: bool) -> None:
        """`graphs`: steps are captured and replayed; otherwise they are queued operation by operation."""
        self._kit, self._load = kit, load
        self._staging = Staging(kit.device)
        size = kit.layout.block_size
        shape = GraphShape(load.batch, load.most_tokens, size)
        self._graphs: GraphPool | None = None
        if graphs:
            self._graphs = GraphPool(self._logits, shape, kit.device, self._staging, kit.device.capture)
        parts = DeviceParts(kit.device, self._staging, self._graphs, kit.sampler)
        self._engine = Engine(
            SchedulerConfig(token_budget=load.batch, max_num_seqs=load.batch, max_waiting=1),
            BlockManager(load.num_blocks(size), size),
            BlockHasher.for_layout(kit.layout),
            DeviceRunner(kit.model, kit.attention, parts, Sampler(), size),
        )
        for number in range(load.batch):
            prompt = [(7 * number + token) % 1000 for token in range(load.context)]
            seq = Sequence(f"s{number}", prompt, GREEDY, max_context_tokens=load.most_tokens)
            if self._engine.reserve(seq) is None:
                raise BenchmarkError("the pool is too small")
            self._engine.admit_received(seq, seq.num_tokens, TokenSample(prompt[0]))

    def step(self) -> list[int]:
        """A step, as a worker takes it: its tokens. Raises BenchmarkError unless each sequence gets one."""
        schedule = self._engine.schedule()
        outputs = self._engine.publish(schedule, self._engine.run(schedule))
        tokens = [output.samples[0].token_id for output in outputs if output.samples and output.finish_reason is None]
        if len(tokens) != self._load.batch:
            raise BenchmarkError(f"a step gave {len(tokens)} tokens to {self._load.batch} sequences")
        return tokens

    @torch.inference_mode()
    def loaded(self) -> Batch:
        """A batch of contexts half-way through their growth, on the device; in the graphs' buffers, if there are any:
        what a step had prepared there is gone."""
        size, start = self._kit.layout.block_size, self._load.context + self._load.growth // 2
        blocks = start // size + 1
        tables = [range(number * blocks, (number + 1) * blocks) for number in range(self._load.batch)]
        rows = [BatchRow([0], start, table) for table in tables]
        batch = build_batch(rows, size)
        with self._kit.device.queueing():
            if self._graphs is not None:
                self._graphs.load(batch)
                return batch
            return self._staging.upload_batch(batch)

    @torch.inference_mode()
    def queue(self, batch: Batch) -> Tensor:
        """Queue what the device does in a step with the batch of `loaded`, but for sampling. Waits for nothing."""
        with self._kit.device.queueing():
            return self._logits(batch) if self._graphs is None else self._graphs.replay(batch)

    def _logits(self, batch: Batch) -> Tensor:
        return self._kit.model.logits(self._kit.model.forward(batch, self._kit.attention, no_hook))


def check_same_tokens(one: DummyDecoding, other: DummyDecoding, num_steps: int, *, what: str) -> None:
    """Raises BenchmarkError unless both give the same tokens, step by step."""
    for number in range(num_steps):
        ours, theirs = one.step(), other.step()
        if ours != theirs:
            raise BenchmarkError(f"{what}: step {number} gave {ours[:4]}... and {theirs[:4]}...")

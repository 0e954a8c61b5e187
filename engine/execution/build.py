"""An engine's parts on a device of its own: weights, pool, kernels, captured steps, and the pool's mirror."""

from collections.abc import Callable

import torch
from torch import Tensor

from engine.attention.triton import TritonAttention
from engine.batch import Batch
from engine.execution.cuda import CudaDevice
from engine.execution.device import Device
from engine.execution.device_runner import DeviceParts, DeviceRunner
from engine.execution.graphs import GraphPool, GraphShape
from engine.execution.mirror import PoolMirror
from engine.execution.staging import Staging
from engine.execution.triton_sampler import TritonSampler
from engine.model_runner import no_hook
from engine.models import load_model
from engine.ops.triton_ops import TritonOps
from engine.prepared_model import PreparedModel
from engine.sampler import Sampler
from engine.weight_dtypes import WeightDtype
from kv_cache.layout import KVCacheLayout

# Codes of int8 are multiplied in bf16.
_ACTIVATIONS = {
    WeightDtype.FP32: torch.float32,
    WeightDtype.BF16: torch.bfloat16,
    WeightDtype.FP16: torch.float16,
    WeightDtype.INT8: torch.bfloat16,
}


class DeviceEngine:
    """What is different in an engine on a device."""

    def __init__(self, runner: DeviceRunner, mirror: PoolMirror, graphs: Callable[[GraphShape], GraphPool] | None):
        """`graphs` makes captured steps; None where the model's cannot be captured."""
        self.runner = runner
        self.mirror = mirror
        self._graphs = graphs

    def capture(self, shape: GraphShape) -> None:
        """Capture decode steps for batches of this shape, which an engine that decodes wants; once is enough.

        Takes seconds. Raises torch.OutOfMemoryError when the device has too little memory.
        """
        if self._graphs is not None and not self.runner.has_graphs:
            self.runner.use_graphs(self._graphs(shape))


def cuda_device(name: str) -> CudaDevice:
    """The device that `--device` names. Raises ValueError when torch sees no such device."""
    return CudaDevice(torch.device(name))


def build_on_device(
    prepared: PreparedModel, layout: KVCacheLayout, host_pool: memoryview, shape: GraphShape | None, device: Device
) -> DeviceEngine:
    """Move the model to the device, and take a pool there as large as `host_pool`, which mirrors it.

    `shape`: of decode batches, whose steps are captured; None where nothing is decoded yet.
    Takes seconds to minutes the first time, as kernels are compiled. Raises KvferryError for a model that cannot be
    used, OSError when `host_pool` cannot be pinned, torch.OutOfMemoryError when the device has too little memory.
    """
    with device.queueing(), torch.inference_mode():
        ops = TritonOps(_ACTIVATIONS[prepared.weight_dtype])
        model = load_model(prepared, ops, device=device.torch_device)
        size_bytes = len(host_pool) // layout.block_bytes * layout.block_bytes
        pool = torch.zeros(size_bytes, dtype=torch.uint8, device=device.torch_device)
        attention = TritonAttention(pool, layout, prepared.config.attention)
        staging = Staging(device)
        mirror = PoolMirror(device, pool, device.shared_buffer(host_pool[:size_bytes]), layout)

    def decode_logits(batch: Batch) -> Tensor:
        return model.logits(model.forward(batch, attention, no_hook))

    def graphs(shape: GraphShape) -> GraphPool:
        with device.queueing(), torch.inference_mode():
            captured = GraphPool(decode_logits, shape, device, staging, device.capture)
            captured.capture_all()
        return captured

    parts = DeviceParts(device, staging, None, TritonSampler(), mirror)
    runner = DeviceRunner(model, attention, parts, Sampler(), layout.block_size)
    # Experts are chosen on the host.
    engine = DeviceEngine(runner, mirror, graphs if prepared.config.experts is None else None)
    if shape is not None:
        engine.capture(shape)
    return engine

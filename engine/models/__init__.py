"""Model execution: which decoder runs which family, and how a prepared model becomes one that runs."""

from typing import overload

import torch

from engine.model_config import ModelConfig
from engine.models.fallback import FallbackModel, load_fallback
from engine.models.transformer import Transformer
from engine.ops.interface import Ops
from engine.parallel.shard import Shard
from engine.prepared_model import PreparedModel
from engine.weights import check_tensors, map_weights


@overload
def load_model(prepared: PreparedModel, ops: Ops) -> Transformer | FallbackModel: ...


@overload
def load_model(prepared: PreparedModel, ops: Ops, shard: Shard) -> Transformer: ...


@overload
def load_model(prepared: PreparedModel, ops: Ops, *, device: torch.device) -> Transformer: ...


def load_model(
    prepared: PreparedModel, ops: Ops, shard: Shard | None = None, device: torch.device | None = None
) -> Transformer | FallbackModel:
    """Map the weights, which other processes may have mapped as well, and build the decoder around them.

    With a `shard` it is that rank's part of the decoder, and `ops` those of a rank. A model without native code is
    loaded by transformers instead, whole and by each process for itself. With a `device` the weights are copied there,
    in the dtype that they are stored in, and `ops` compute there.
    Raises KvferryError when the weights file is damaged or does not fit its config; see also `load_fallback`.
    """
    if shard is None and device is None and not isinstance(prepared.shape, ModelConfig):
        return load_fallback(prepared.path, prepared.shape)
    weights = map_weights(prepared.weights_path)
    check_tensors(prepared.weights_path, weights, prepared.tensor_forms())
    if device is not None:
        weights = {name: tensor.to(device) for name, tensor in weights.items()}
    if shard is not None:
        return Transformer(shard.config, shard.weights(weights), ops)
    return Transformer(prepared.config, weights, ops)

"""Model execution: which decoder runs which family, and how a prepared model becomes one that runs."""

from engine.models.transformer import Transformer
from engine.ops.interface import Ops
from engine.prepared_model import PreparedModel
from engine.weights import check_tensors, map_weights

# One decoder serves all families so far: they differ in biases and norms, which ModelConfig spells out.
FAMILIES: dict[str, type[Transformer]] = {"llama": Transformer, "qwen2": Transformer, "qwen3": Transformer}


def load_model(prepared: PreparedModel, ops: Ops) -> Transformer:
    """Map the weights, which other processes may have mapped as well, and build the decoder around them.

    Raises KvferryError when the weights file is damaged or does not fit its config.
    """
    weights = map_weights(prepared.weights_path)
    check_tensors(prepared.weights_path, weights, prepared.tensor_shapes())
    return FAMILIES[prepared.config.family](prepared.config, weights, ops)

"""A recorded step has every product and attention of the step, and gives again what the step gave."""

from dataclasses import replace

import torch
from torch import Tensor

from bench.common.recorded_step import Call, Recorder, TappedAttention, TappedOps, differences, replay
from engine.attention.interface import LayerAttention
from engine.attention.torch_paged import TorchAttention
from engine.batch import BatchRow, build_batch
from engine.families import parse_model_config
from engine.model_config import ModelConfig
from engine.models.transformer import Transformer
from engine.ops.torch_ops import TorchOps
from engine.paged_cache import PagedCache
from engine.tensor_map import prepared_tensors
from kv_cache.layout import KVCacheLayout, KVDtype

LAYERS, BLOCK_SIZE = 3, 8
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": LAYERS, "head_dim": 8,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 256, "eos_token_id": 2,
    "attention_bias": True,
}  # fmt: skip


@torch.inference_mode()
def record() -> tuple[list[Call], Tensor]:
    """A decode step of two sequences: what was recorded, and its logits."""
    config: ModelConfig = parse_model_config(CONFIG)
    draw = torch.Generator().manual_seed(1)
    weights = {tensor.name: torch.randn(tensor.shape, generator=draw) * 0.2 for tensor in prepared_tensors(config)}
    recorder = Recorder()
    model = Transformer(config, weights, TappedOps(TorchOps(), recorder))
    cache = PagedCache(KVCacheLayout("m", "1", LAYERS, 2, 8, BLOCK_SIZE, KVDtype.FP32), num_blocks=8)
    attention = TappedAttention(TorchAttention(cache, (LayerAttention(8**-0.5),) * LAYERS), recorder)
    prompt = build_batch([BatchRow([5, 7, 9], 0, [1]), BatchRow([4] * 11, 0, [3, 2])], BLOCK_SIZE)
    model.forward(prompt, attention, lambda _: None)
    batch = build_batch([BatchRow([11], 3, [1]), BatchRow([8], 11, [3, 2])], BLOCK_SIZE)
    with recorder.recording() as calls:
        logits = model.logits(model.forward(batch, attention, lambda _: None))
    model.forward(batch, attention, lambda _: None)
    return calls, logits


def test_a_llama_step_has_four_products_and_one_attention_a_layer_and_the_logits() -> None:
    calls, logits = record()
    assert len(calls) == 5 * LAYERS + 1, "and nothing of the steps before and after"
    assert sum(call.in_place for call in calls) == 2 * LAYERS
    assert torch.equal(calls[-1].output, logits)


def test_the_calls_give_again_what_the_step_gave() -> None:
    calls, _ = record()
    assert differences(calls) == 0
    assert differences(calls) == 0, "comparing must not change anything"


def test_another_output_is_noticed() -> None:
    calls, _ = record()
    changed = calls[4].output.clone()
    changed.view(-1)[3] += 1e-3
    calls[4] = replace(calls[4], output=changed)
    assert differences(calls) == 1


def test_a_replay_repeats_every_call() -> None:
    calls, _ = record()
    before = [call.arguments[0].clone() for call in calls if call.in_place]
    replay(calls)
    after = [call.arguments[0] for call in calls if call.in_place]
    assert all(not torch.equal(old, new) for old, new in zip(before, after, strict=True))

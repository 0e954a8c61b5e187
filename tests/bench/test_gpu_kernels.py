"""What is counted, and the dummy's steps; without a GPU the benchmark says so. Kernels are tested elsewhere."""

import json
from dataclasses import replace

import pytest
import torch

from bench.common.device_attention import Shape
from bench.common.device_dummy import (
    SHAPE_8B,
    DummyDecoding,
    Kit,
    Load,
    check_same_tokens,
    random_weights,
)
from bench.common.harness import BenchmarkError
from bench.gpu_kernels import main
from engine.attention.interface import LayerAttention
from engine.execution.device import CpuDevice
from engine.models.transformer import Transformer
from engine.ops.torch_ops import TorchOps
from engine.paged_cache import PagedCache
from engine.tensor_map import prepared_tensors
from engine.weight_dtypes import WeightDtype
from kv_cache.layout import KVCacheLayout, KVDtype
from tests.support.device_engine import FakeDeviceSampler
from tests.support.padded_attention import PaddedAttention

CONFIG = replace(
    SHAPE_8B,
    vocab_size=96,
    num_layers=2,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=8,
    hidden_size=32,
    intermediate_size=48,
    attention=(LayerAttention(8**-0.5),) * 2,
)
LOAD = Load(batch=3, context=20, growth=24)


@pytest.fixture
def kit() -> Kit:
    layout = KVCacheLayout("bench", "0", 2, 2, 8, 8, KVDtype.FP32)
    weights = random_weights(CONFIG, WeightDtype.FP32, torch.device("cpu"), seed=0)
    # Louder than the dummy's own, so that different contexts give different tokens.
    model = Transformer(CONFIG, {name: tensor * 10 for name, tensor in weights.items()}, TorchOps())
    attention = PaddedAttention(PagedCache(layout, LOAD.num_blocks(8)))
    return Kit(model, attention, layout, CpuDevice(), FakeDeviceSampler())


def test_decode_reads_the_kv_of_every_token_and_its_scales() -> None:
    wide, narrow = (Shape(64, 4096, dtype) for dtype in (KVDtype.BF16, KVDtype.FP8_E4M3))
    assert wide.decode_bytes == 64 * 4096 * 8 * 2 * 128 * 2
    assert narrow.decode_bytes == 64 * 4096 * 8 * 2 * 130


def test_prefill_counts_what_each_token_sees() -> None:
    shape = Shape(2, 5, KVDtype.BF16, num_q_heads=4, num_kv_heads=2, head_dim=16)
    assert shape.prefill_flop(5) == 2 * 4 * 4 * 16 * (1 + 2 + 3 + 4 + 5)
    assert shape.prefill_flop(2) == 2 * 4 * 4 * 16 * (4 + 5)


def test_the_dummy_has_eight_billion_weights() -> None:
    assert 7.9e9 < sum(each.num_elements for each in prepared_tensors(SHAPE_8B)) < 8.1e9


def test_steps_with_graphs_and_without_give_the_same_tokens(kit: Kit) -> None:
    with_graphs, without = (DummyDecoding(kit, LOAD, graphs=graphs) for graphs in (True, False))
    check_same_tokens(with_graphs, without, 5, what="graphs")
    assert torch.allclose(with_graphs.queue(with_graphs.loaded()), without.queue(without.loaded()))


def test_steps_that_differ_are_noticed(kit: Kit) -> None:
    ahead, behind = (DummyDecoding(kit, LOAD, graphs=False) for _ in range(2))
    steps = [ahead.step() for _ in range(6)]
    assert len({tuple(step) for step in steps}) > 1
    with pytest.raises(BenchmarkError, match="here"):
        check_same_tokens(ahead, behind, 6, what="here")


def test_a_bare_step_has_contexts_half_way_through_their_growth(kit: Kit) -> None:
    batch = DummyDecoding(kit, LOAD, graphs=False).loaded()
    assert batch.context_lens.tolist() == [20 + 12 + 1] * 3
    assert len(set(batch.block_tables.flatten().tolist())) == 3 * 5


def test_without_a_gpu_it_says_so_and_measures_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    main(["--quick"])
    out, err = capsys.readouterr()
    line = json.loads(out)
    assert (line["metric"], line["baseline"], line["reason"]) == ("missing", "cuda", "torch sees no CUDA device")
    assert "nothing was measured" in err

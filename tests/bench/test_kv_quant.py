"""Perplexity through a paged pool is that of the textbook; capacity counts scales and padding."""

import math

import pytest
import torch

from bench.common.harness import BenchmarkError
from bench.common.teacher_forced import Foretold, foretell
from bench.common.text import TEXT, excerpt
from bench.kv_quant import capacity_line, check_repeats, equal_share_line, perplexity_line
from engine.attention.interface import LayerAttention
from engine.attention.torch_paged import TorchAttention
from engine.families import parse_model_config
from engine.models.transformer import Transformer
from engine.ops.torch_ops import TorchOps
from engine.paged_cache import PagedCache
from engine.tensor_map import prepared_tensors
from kv_cache.layout import KVCacheLayout, KVDtype

LAYERS, BLOCK_SIZE, VOCAB = 2, 8, 96
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": LAYERS, "head_dim": 8,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 256, "eos_token_id": 2,
}  # fmt: skip
TOKENS = [(11 * i * i + 5 * i) % VOCAB for i in range(37)]


def model(scale: float = 0.3) -> Transformer:
    config = parse_model_config(CONFIG)
    draw = torch.Generator().manual_seed(1)
    weights = {each.name: torch.randn(each.shape, generator=draw) * scale for each in prepared_tensors(config)}
    return Transformer(config, weights, TorchOps())


def scores(dtype: KVDtype, chunk_tokens: int, scale: float = 0.3) -> Foretold:
    layout = KVCacheLayout("m", "1", LAYERS, 2, 8, BLOCK_SIZE, dtype)
    attention = TorchAttention(PagedCache(layout, 8), (LayerAttention(8**-0.5),) * LAYERS)
    return foretell(model(scale), attention, TOKENS, [6, 1, 4, 0, 7], BLOCK_SIZE, chunk_tokens)


def test_chunks_do_not_change_what_is_foretold() -> None:
    whole, chunks = scores(KVDtype.FP32, 64), scores(KVDtype.FP32, 5)
    assert whole.surprise.shape == whole.likeliest.shape == (len(TOKENS) - 1,)
    torch.testing.assert_close(chunks.surprise, whole.surprise, rtol=1e-4, atol=1e-4)
    assert torch.equal(chunks.likeliest, whole.likeliest)


def test_each_token_is_foretold_from_those_before_it_alone() -> None:
    config_free = scores(KVDtype.FP32, 7)
    last = TOKENS[-1]
    try:
        TOKENS[-1] = (last + 1) % VOCAB
        other = scores(KVDtype.FP32, 7)
    finally:
        TOKENS[-1] = last
    assert torch.equal(other.surprise[:-1], config_free.surprise[:-1])
    assert other.surprise[-1] != config_free.surprise[-1]
    assert torch.equal(other.likeliest, config_free.likeliest)


def test_a_model_that_knows_nothing_has_the_perplexity_of_its_vocabulary() -> None:
    assert scores(KVDtype.FP32, 16, scale=0.0).perplexity == pytest.approx(VOCAB)


def test_the_pool_is_what_is_read_so_narrow_kv_is_felt_within_a_chunk() -> None:
    exact, narrow = scores(KVDtype.FP32, 64), scores(KVDtype.INT8, 64)
    assert not torch.equal(exact.surprise, narrow.surprise)
    assert narrow.perplexity == pytest.approx(exact.perplexity, rel=0.05)


def test_another_answer_to_the_same_text_is_an_error() -> None:
    one, other = scores(KVDtype.FP32, 64), scores(KVDtype.FP8_E4M3, 64)
    check_repeats([one], [scores(KVDtype.FP32, 64)])
    with pytest.raises(BenchmarkError):
        check_repeats([one], [other])


def said(*surprises: float) -> Foretold:
    return Foretold(torch.tensor(surprises, dtype=torch.float64), torch.zeros(len(surprises), dtype=torch.int64))


def test_the_change_of_perplexity_is_of_all_texts_together_and_its_ratio_text_by_text() -> None:
    ours, exact = [said(1.0, 2.0), said(3.0, 3.0)] * 3, [said(1.0, 1.0), said(3.0, 2.0)] * 3
    line = perplexity_line("int8", ours, exact, seed=0)
    assert line.value == pytest.approx(math.exp(0.5) - 1)
    assert line.ratio == pytest.approx(math.exp(-0.5))
    assert (line.n, line.baseline_value) == (6, 0.0)


def test_the_share_of_equal_tokens_counts_places() -> None:
    line = equal_share_line("int8", [[1, 2, 3, 4], [9, 9, 9, 9]], [[1, 2, 3, 5], [1, 2, 3, 4]], seed=0)
    assert line.value == pytest.approx(3 / 8)
    assert line.n == 2


@pytest.mark.parametrize(("head_dim", "ratio"), [(64, 2 * 64 / 66), (128, 2 * 128 / 130)])
@pytest.mark.parametrize("dtype", [KVDtype.INT8, KVDtype.FP8_E4M3])
def test_capacity_counts_scales(head_dim: int, ratio: float, dtype: KVDtype) -> None:
    # Pages of these sizes need no padding.
    line = capacity_line("m", KVCacheLayout("m", "1", 30, 4, head_dim, 64, dtype))
    assert line.ratio == pytest.approx(ratio, rel=1e-3)
    assert line.baseline_value % 64 == line.value % 64 == 0


def test_capacity_counts_padding() -> None:
    padded = capacity_line("m", KVCacheLayout("m", "1", 30, 3, 64, 16, KVDtype.INT8))
    # 6336 bytes a page of int8, padded to 6400; 12288 of bf16.
    assert padded.ratio == pytest.approx(12288 / 6400, rel=1e-3)


def test_the_shipped_text_is_long_enough_and_begins_again_behind_its_end() -> None:
    assert len(TEXT.read_text(encoding="utf-8").split()) > 3000
    assert excerpt([1, 2, 3], 2, 5) == [3, 1, 2, 3, 1]

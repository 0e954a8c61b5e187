"""What is not as described is refused before anything is queued."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.kernels.blocks import convert_blocks, gather_blocks, requantise_blocks, scatter_blocks
from engine.kernels.gates import gated
from engine.kernels.norms import add_rms_norm, rms_norm
from engine.kernels.sampling import SamplingRows, sample, sampling_rows
from engine.kernels.store_kv import rotate_and_store_kv, store_kv
from engine.ops.interface import Gate
from engine.ops.triton_ops import TritonOps
from engine.sequence import SamplingParams
from kv_cache.layout import KVCacheLayout, KVDtype

LAYOUT = KVCacheLayout("m", "1", 3, 2, 16, 8, KVDtype.BF16)
POOL = torch.zeros(LAYOUT.pool_bytes(2), dtype=torch.uint8)
IDS = torch.zeros(1, dtype=torch.int32)
CPU = torch.device("cpu")


def heads(num_heads: int = 2, num_tokens: int = 3) -> Tensor:
    return torch.zeros((num_tokens, num_heads, 16), dtype=torch.bfloat16)


def slots(num_tokens: int = 3) -> Tensor:
    return torch.full((num_tokens,), -1)


def test_k_and_v_that_do_not_fit_a_pool() -> None:
    with pytest.raises(ValueError, match="heads of K"):
        store_kv(POOL, LAYOUT, 0, heads(3), heads(), slots())
    with pytest.raises(ValueError, match="do not fit"):
        store_kv(POOL, LAYOUT, 0, heads(), heads(num_tokens=2), slots())
    with pytest.raises(ValueError, match="both be"):
        store_kv(POOL, LAYOUT, 0, heads(), heads().float(), slots())
    with pytest.raises(ValueError, match="heads must be contiguous"):
        store_kv(POOL, LAYOUT, 0, heads(4)[:, ::2], heads(), slots())
    with pytest.raises(ValueError, match="slots must be"):
        store_kv(POOL, LAYOUT, 0, heads(), heads(), slots(2))
    with pytest.raises(ValueError, match="no layer 3"):
        store_kv(POOL, LAYOUT, 3, heads(), heads(), slots())
    with pytest.raises(ValueError, match="cannot hold"):
        rotate_and_store_kv(POOL, LAYOUT, 0, heads(1), heads(), torch.zeros(3, 16), slots())
    with pytest.raises(ValueError, match="rotation"):
        rotate_and_store_kv(POOL, LAYOUT, 0, heads(4), heads(), torch.zeros(3, 8), slots())


def test_memory_that_is_no_pool() -> None:
    with pytest.raises(ValueError, match="uint8 vector"):
        store_kv(POOL.view(torch.bfloat16), LAYOUT, 0, heads(), heads(), slots())
    with pytest.raises(ValueError, match="whole pages"):
        store_kv(POOL[16:], LAYOUT, 0, heads(), heads(), slots())
    with pytest.raises(ValueError, match="aligned"):
        store_kv(POOL[8 : 8 + LAYOUT.page_bytes], LAYOUT, 0, heads(), heads(), slots())


def test_blocks_that_cannot_be_moved() -> None:
    staging = torch.zeros(LAYOUT.page_bytes, dtype=torch.uint8)
    with pytest.raises(ValueError, match="int32 vector"):
        gather_blocks(POOL, LAYOUT, IDS.long(), range(1), staging)
    with pytest.raises(ValueError, match="consecutive layers"):
        gather_blocks(POOL, LAYOUT, IDS, range(4), staging)
    with pytest.raises(ValueError, match="are not"):
        scatter_blocks(POOL, LAYOUT, IDS, range(2), staging)
    with pytest.raises(ValueError, match="model_id"):
        convert_blocks(POOL, LAYOUT, IDS, 8, IDS, replace(LAYOUT, model_id="n"), range(1), staging)
    fewer = replace(LAYOUT, num_kv_heads=1, total_kv_heads=2)
    with pytest.raises(ValueError, match="kv heads"):
        convert_blocks(POOL, fewer, IDS, 8, IDS, LAYOUT, range(1), staging)
    with pytest.raises(ValueError, match="dtype only"):
        requantise_blocks(staging, replace(LAYOUT, block_size=16), POOL, LAYOUT, IDS, range(1))


def test_no_blocks_are_moved_without_a_launch() -> None:
    nothing = torch.zeros(0, dtype=torch.uint8)
    gather_blocks(POOL, LAYOUT, IDS[:0], range(3), nothing)
    convert_blocks(POOL, LAYOUT, IDS, 0, IDS[:0], LAYOUT, range(3), nothing)
    requantise_blocks(nothing, LAYOUT, POOL, LAYOUT, IDS[:0], range(3))
    store_kv(POOL, LAYOUT, 0, heads(num_tokens=0), heads(num_tokens=0), slots(0))


def test_activations_that_norms_and_gates_do_not_take() -> None:
    x, weight = torch.zeros(2, 3, 8), torch.ones(8)
    with pytest.raises(ValueError, match="activations"):
        rms_norm(x.double(), weight, 1e-5)
    with pytest.raises(ValueError, match="contiguous"):
        rms_norm(x.transpose(0, 1), weight, 1e-5)
    with pytest.raises(ValueError, match="no fp32 weights"):
        rms_norm(x, torch.ones(2, 8), 1e-5)
    with pytest.raises(ValueError, match="cannot be added"):
        add_rms_norm(x[:, 0], x[:, 0].half(), weight, 1e-5)
    with pytest.raises(ValueError, match="two halves"):
        gated(torch.zeros(2, 7), Gate.SILU)
    with pytest.raises(ValueError, match="activations"):
        TritonOps(torch.float64)


def test_logits_that_cannot_be_sampled_from() -> None:
    rows = sampling_rows([SamplingParams(max_tokens=1)], [0], CPU)
    with pytest.raises(ValueError, match="fp32"):
        sample(torch.zeros(1, 8, dtype=torch.bfloat16), rows)
    with pytest.raises(ValueError, match="fp32"):
        sample(torch.zeros(1, 2_000_000), rows)
    with pytest.raises(ValueError, match="does not fit 2 rows"):
        sample(torch.zeros(2, 8), rows)


def test_sampling_parameters_keep_their_values_on_the_device() -> None:
    params = SamplingParams(max_tokens=1, temperature=0.7, top_p=0.9, min_p=0.05, top_k=7, seed=(1 << 64) - 3)
    rows = sampling_rows([params, params], [5, 1 << 40], CPU)
    assert isinstance(rows, SamplingRows)
    assert (rows.temperature.tolist(), rows.top_p.tolist(), rows.min_p.tolist()) == ([0.7] * 2, [0.9] * 2, [0.05] * 2)
    assert rows.top_k.tolist() == [7, 7]
    assert rows.seed.tolist() == [-3, -3]
    assert rows.position.tolist() == [5, 1 << 40]

"""Kernels on a real GPU give what the host gives."""

import importlib
from dataclasses import replace

import pytest
import torch

from engine.sampler import Sampler, SampleRow
from engine.sequence import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

CASES = [
    pytest.param(module, name, id=f"{module}: {name}")
    for module in ("store", "layer", "block", "sample", "ops")
    for name in importlib.import_module(f"tests.support.{module}_cases").CASES
]


@pytest.mark.parametrize(("module", "name"), CASES)
def test_a_kernel_gives_what_the_host_gives(module: str, name: str) -> None:
    cases = importlib.import_module(f"tests.support.{module}_cases")
    cases.check(cases.CASES[name], cases.run(cases.CASES[name], "cuda"))


@pytest.mark.parametrize(
    "changes",
    [{}, {"top_p": 0.9}, {"top_k": 50}, {"top_k": 20, "top_p": 0.8, "temperature": 0.7}, {"min_p": 0.05}],
    ids=str,
)
def test_rows_of_a_large_vocabulary_are_sampled_as_on_the_host(changes: dict[str, float]) -> None:
    """A mass within a millionth of top-p's limit may be decided otherwise: one row in many thousands."""
    from engine.kernels.sampling import sample, sampling_rows

    num_rows, vocab_size = 64, 151936
    logits = torch.randn((num_rows, vocab_size), generator=torch.Generator().manual_seed(9)) * 2.5
    base = SamplingParams(max_tokens=1)
    params = [replace(base, seed=seed, **changes) for seed in range(num_rows)]  # type: ignore[arg-type]
    positions = list(range(100, 100 + num_rows))
    chosen = sample(logits.cuda(), sampling_rows(params, positions, torch.device("cuda"))).tolist()
    rows = [SampleRow(row, (), (), position) for row, position in zip(params, positions, strict=True)]
    expected = [found.token_id for found in Sampler().sample(logits, rows)]  # type: ignore[union-attr]
    assert sum(ours != theirs for ours, theirs in zip(chosen, expected, strict=True)) <= 1


def test_pages_far_beyond_two_gigabytes_are_written_where_they_belong() -> None:
    """Places in a pool do not fit into 32 bits."""
    from engine.kernels.store_kv import store_kv
    from kv_cache.layout import KVCacheLayout, KVDtype

    layout = KVCacheLayout("m", "1", 32, 8, 128, 128, KVDtype.INT8)
    num_blocks = 9 * (1 << 30) // layout.block_bytes
    pool = torch.zeros(layout.pool_bytes(num_blocks), dtype=torch.uint8, device="cuda")
    k = torch.full((1, 8, 128), 3.0, dtype=torch.bfloat16, device="cuda")
    slot = torch.tensor([num_blocks * 128 - 1], device="cuda")
    store_kv(pool, layout, 31, k, k, slot)
    page = pool[layout.page_offset(num_blocks - 1, 31) :]
    # Codes of K and V, and scales, which have no zero bytes here.
    assert int((pool[: -layout.page_bytes] != 0).sum()) == 0
    assert int((page == 127).sum()) >= 2 * 8 * 128

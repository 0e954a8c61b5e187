"""Attention of chunks of prompts over a paged pool, without a GPU: interpreted, and compiled in advance."""

import pytest
import torch
from torch import Tensor

from engine.attention.interface import LayerAttention
from engine.kernels.prefill_attention import ChunkRows, prefill_attention
from kv_cache.layout import KVCacheLayout, KVDtype
from tests.support.attention_cases import PREFILL_CASES, check
from tests.support.attention_compilations import KEPT, compile_attention
from tests.support.compiled_kernels import GPUS, Report, spills, widths
from tests.support.triton_programs import INTERPRETED, run_program

LAYOUT = KVCacheLayout("m", "1", 2, 2, 64, 16, KVDtype.BF16)
# What multiplies matrices: of a warp, of four warps, and of the tensor memory that came after them.
TENSOR_CORES = {"sm_80": "HMMA", "sm_90": "HGMMA", "sm_100": "UTCHMMA"}


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """What the kernel made of each case."""
    folder = tmp_path_factory.mktemp("interpreted")
    answers: dict[str, Tensor] = torch.load(
        run_program("tests.support.attention_cases", ["prefill"], INTERPRETED, folder)
    )
    return answers


@pytest.fixture(scope="module", params=GPUS)
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Report]]:
    """A GPU, and what the kernel became on it, by KV dtype."""
    gpu: str = request.param
    return gpu, compile_attention("prefill", gpu, tmp_path_factory.mktemp("compiled"))


@pytest.mark.parametrize("name", PREFILL_CASES)
def test_chunks_attend_as_the_textbook_says(interpreted: dict[str, Tensor], name: str) -> None:
    check(PREFILL_CASES[name], interpreted[name])


@pytest.mark.parametrize("kept", KEPT)
def test_the_compiled_kernel_spills_nothing_and_uses_the_best_tensor_cores(
    compiled: tuple[str, dict[str, Report]], kept: KVDtype
) -> None:
    gpu, reports = compiled
    assert not spills(reports[kept.value])
    assert any(opcode.startswith(TENSOR_CORES[gpu]) for opcode in reports[kept.value]["opcodes"])


@pytest.mark.parametrize("kept", KEPT)
def test_the_compiled_kernel_copies_k_and_v_16_bytes_at_a_time(
    compiled: tuple[str, dict[str, Report]], kept: KVDtype
) -> None:
    _, reports = compiled
    copies = widths(reports[kept.value], "LDGSTS")
    assert copies[128] >= 8
    assert set(copies) <= {32, 128}


def call(
    *, q: Tensor | None = None, out: Tensor | None = None, num_tokens: int = 5, query_start: Tensor | None = None
) -> None:
    pool = torch.zeros(LAYOUT.pool_bytes(2), dtype=torch.uint8)
    q = torch.zeros((5, 4, 64), dtype=torch.bfloat16) if q is None else q
    query_start = torch.tensor([0, 2, 5], dtype=torch.int32) if query_start is None else query_start
    rows = ChunkRows(torch.zeros((2, 1), dtype=torch.int32), torch.ones(2, dtype=torch.int32), query_start)
    out = torch.empty_like(q) if out is None else out
    prefill_attention(pool, LAYOUT, 0, q, rows, num_tokens, LayerAttention(0.125), out)


def test_what_is_not_as_described_is_refused_before_anything_is_queued() -> None:
    with pytest.raises(ValueError, match="3 heads over 2 kv heads"):
        call(q=torch.zeros((5, 3, 64)))
    with pytest.raises(ValueError, match=r"out is \[4, 4, 64\]"):
        call(out=torch.zeros((4, 4, 64)))
    with pytest.raises(ValueError, match=r"query_start must be int32 \[3\]"):
        call(query_start=torch.tensor([0, 5], dtype=torch.int32))
    with pytest.raises(ValueError, match="query_start is on meta"):
        call(query_start=torch.zeros(3, dtype=torch.int32, device="meta"))
    with pytest.raises(ValueError, match="6 tokens of 5"):
        call(num_tokens=6)

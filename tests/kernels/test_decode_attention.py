"""Attention of single tokens over a paged pool, without a GPU: interpreted, and compiled in advance."""

import dataclasses

import pytest
import torch
from torch import Tensor

from engine.attention.interface import LayerAttention
from engine.kernels.decode_attention import decode_attention, decode_scratch, most_pieces, plan_decode
from kv_cache.layout import KVCacheLayout, KVDtype
from tests.support.attention_cases import DECODE_CASES, check
from tests.support.attention_compilations import KEPT, compile_attention
from tests.support.compiled_kernels import GPUS, Report, spills, widths
from tests.support.triton_programs import INTERPRETED, run_program

CPU = torch.device("cpu")
LAYOUT = KVCacheLayout("m", "1", 2, 2, 64, 16, KVDtype.BF16)
SPEC = LayerAttention(0.125)


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """What the kernels made of each case."""
    folder = tmp_path_factory.mktemp("interpreted")
    answers: dict[str, Tensor] = torch.load(
        run_program("tests.support.attention_cases", ["decode"], INTERPRETED, folder)
    )
    return answers


@pytest.fixture(scope="module", params=GPUS)
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    """What the kernel became on a GPU, by KV dtype."""
    return compile_attention("decode", request.param, tmp_path_factory.mktemp("compiled"))


@pytest.mark.parametrize("name", DECODE_CASES)
def test_single_tokens_attend_as_the_textbook_says(interpreted: dict[str, Tensor], name: str) -> None:
    check(DECODE_CASES[name], interpreted[name])


@pytest.mark.parametrize("kept", KEPT)
def test_the_compiled_kernel_spills_nothing_and_uses_tensor_cores(compiled: dict[str, Report], kept: KVDtype) -> None:
    report = compiled[kept.value]
    assert not spills(report)
    assert any("HMMA" in opcode for opcode in report["opcodes"])


@pytest.mark.parametrize("kept", KEPT)
def test_the_compiled_kernel_copies_k_and_v_16_bytes_at_a_time(compiled: dict[str, Report], kept: KVDtype) -> None:
    copies, loads = widths(compiled[kept.value], "LDGSTS"), widths(compiled[kept.value], "LDG")
    # A tile of K and one of V, each 64 tokens of 128, for 128 threads, in each of two stages before the loop and in it.
    tile_copies = 2 * 64 * 128 * kept.itemsize // (128 * 16)
    assert copies[128] >= 2 * tile_copies
    # Besides, 32 bits: block ids and pairs of scales, and numbers that are the same for a whole program.
    assert set(copies) <= {32, 128}
    assert set(loads) <= {32, 128}
    assert loads[32] <= 8


def pieces(context_lens: list[int], window: int | None = None) -> tuple[list[int], int]:
    """The first piece of each row and of what would follow, and the length of a piece."""
    rows = plan_decode(
        torch.zeros((len(context_lens), 1), dtype=torch.int32),
        torch.tensor(context_lens, dtype=torch.int32),
        window,
        LAYOUT,
    )
    return rows.first_piece.tolist(), int(rows.piece_len)


def test_contexts_are_cut_into_pieces_of_one_length() -> None:
    assert pieces([1, 5, 130]) == ([0, 1, 2, 4], 128)
    assert pieces([0, 0]) == ([0, 0, 0], 128)
    # Without rows that share, as many as there is room for.
    assert pieces([4096]) == ([0, 2], 2048)
    assert pieces([4096], window=100) == ([0, 1], 128)


@pytest.mark.parametrize("context_lens", [[100000, *[1] * 50], [128] * 40, [1 << 20], [129] * 7, [1] * 200])
def test_there_are_never_more_pieces_than_programs(context_lens: list[int]) -> None:
    first_piece, piece_len = pieces(context_lens)
    assert first_piece[-1] <= most_pieces(len(context_lens), LAYOUT.num_kv_heads, CPU)
    assert all(
        (high - low - 1) * piece_len < length <= (high - low) * piece_len
        for low, high, length in zip(first_piece[:-1], first_piece[1:], context_lens, strict=True)
    )


def call(
    *,
    pool: Tensor | None = None,
    layer: int = 0,
    q: Tensor | None = None,
    out: Tensor | None = None,
    spec: LayerAttention = SPEC,
    scratch_rows: int = 3,
    **changed: Tensor,
) -> None:
    pool = torch.zeros(LAYOUT.pool_bytes(2), dtype=torch.uint8) if pool is None else pool
    q = torch.zeros((3, 4, 64), dtype=torch.bfloat16) if q is None else q
    rows = plan_decode(torch.zeros((3, 1), dtype=torch.int32), torch.ones(3, dtype=torch.int32), None, LAYOUT)
    rows = dataclasses.replace(rows, **changed)
    scratch = decode_scratch(scratch_rows, 4, LAYOUT, CPU)
    decode_attention(pool, LAYOUT, layer, q, rows, spec, scratch, torch.empty_like(q) if out is None else out)


def test_what_is_not_as_described_is_refused_before_anything_is_queued() -> None:
    with pytest.raises(ValueError, match="uint8"):
        call(pool=torch.zeros(LAYOUT.pool_bytes(2)))
    with pytest.raises(ValueError, match="whole blocks"):
        call(pool=torch.zeros(LAYOUT.pool_bytes(2) + LAYOUT.page_bytes, dtype=torch.uint8))
    with pytest.raises(ValueError, match="no layer 2"):
        call(layer=2)
    with pytest.raises(ValueError, match="3 heads over 2 kv heads"):
        call(q=torch.zeros((3, 3, 64)))
    with pytest.raises(ValueError, match="must be fp32, fp16 or bf16"):
        call(q=torch.zeros((3, 4, 64), dtype=torch.float64))
    with pytest.raises(ValueError, match="tokens, heads, 64"):
        call(q=torch.zeros((3, 4, 32)))
    with pytest.raises(ValueError, match="must be contiguous"):
        call(q=torch.zeros((3, 8, 64))[:, ::2])
    with pytest.raises(ValueError, match=r"out \[2, 4, 64\]"):
        call(out=torch.zeros((2, 4, 64)))
    with pytest.raises(ValueError, match="block tables are int32"):
        call(block_tables=torch.zeros((3, 1), dtype=torch.int64))
    with pytest.raises(ValueError, match="block tables are on meta"):
        call(block_tables=torch.zeros((3, 1), dtype=torch.int32, device="meta"))
    with pytest.raises(ValueError, match="2 block tables"):
        call(block_tables=torch.zeros((2, 1), dtype=torch.int32))
    with pytest.raises(ValueError, match=r"context_lens must be int32 \[3\]"):
        call(context_lens=torch.ones(2, dtype=torch.int32))
    with pytest.raises(ValueError, match="window of None in a layer with one of 8"):
        call(spec=LayerAttention(0.125, window=8))
    with pytest.raises(ValueError, match="scratch for"):
        call(scratch_rows=1)

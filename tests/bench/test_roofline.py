"""The formula of the roofline, the counts of bytes and operations, and what is drawn."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench.common.harness import BenchmarkError, Pair
from bench.common.roofline_chart import Point, frame, save_png, text_chart
from bench.common.roofs import NativeMeter, Roof, TorchMeter, roof_meter
from bench.roofline import DecodeCase, DecodeStep, PrefillWork, decode_case, share_line
from engine.batch import Batch
from engine.families import parse_model_config
from engine.tensor_map import prepared_tensors
from kv_cache.layout import KVDtype

ROOF = Roof(bytes_per_s=10e9, flop_per_s=60e9)
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "head_dim": 8,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 256, "eos_token_id": 2,
}  # fmt: skip


def test_work_is_bound_by_its_bytes_or_by_its_operations() -> None:
    assert ROOF.bound_s(10e9, 30e9) == 1.0
    assert ROOF.bound_s(10e9, 120e9) == 2.0
    assert ROOF.attainable(2.0) == 20e9
    assert ROOF.attainable(6.0) == ROOF.attainable(100.0) == 60e9


def test_the_share_of_a_bound_is_the_bound_over_the_time_taken() -> None:
    line = share_line("m", "v", "roofline", [Pair(2.0, 1.0), Pair(4.0, 2.8), Pair(1.0, 0.6), Pair(2, 1), Pair(2, 1)], 0)
    assert (line.value, line.ratio, line.baseline_value) == (0.5, 0.5, 1.0)


@pytest.mark.parametrize(
    ("group", "dtype", "intensity"),
    [(1, KVDtype.FP32, 0.5), (7, KVDtype.FP32, 3.5), (3, KVDtype.BF16, 3.0), (3, KVDtype.INT8, 6 * 64 / 66)],
)
def test_decode_does_half_an_operation_a_byte_for_each_query_head_at_fp32(
    group: int, dtype: KVDtype, intensity: float
) -> None:
    case = DecodeCase(group, dtype, 5)
    assert case.flop / case.size_bytes == pytest.approx(intensity)


def test_narrow_kv_gets_more_layers_to_fill_the_same_memory() -> None:
    wide, narrow = (decode_case(3, dtype, 1 << 28) for dtype in (KVDtype.FP32, KVDtype.INT8))
    assert (wide.num_layers, narrow.num_layers) == (16, 62)
    assert decode_case(3, KVDtype.FP32, 1).num_layers == 2


def test_prefill_counts_products_causal_attention_and_one_row_of_logits() -> None:
    config, tokens = parse_model_config(CONFIG), 10
    work = PrefillWork(config, tokens)
    weights = sum(each.num_elements for each in prepared_tensors(config) if each.name.startswith("layers."))
    norms = 3 * 2 * 48
    assert work.product_flop == 2 * tokens * (weights - norms)
    assert len(work.products) == 4 * 3
    assert work.flop - work.product_flop == 3 * 6 * 4 * 8 * 55 + 2 * 96 * 48


@pytest.mark.parametrize("dtype", [KVDtype.FP32, KVDtype.INT8])
def test_attention_that_is_wrong_is_not_timed(dtype: KVDtype, monkeypatch: pytest.MonkeyPatch) -> None:
    work = DecodeStep(DecodeCase(3, dtype, 2, rows=2, context=32), seed=1)
    work.check()
    right = work._backend.attend

    def wrong(layer: int, q: Tensor, batch: Batch) -> Tensor:
        return right(layer, q, batch) * (1.0 if layer == 0 else 1.01)

    monkeypatch.setattr(work._backend, "attend", wrong)
    with pytest.raises(BenchmarkError, match=f"group3:{dtype.value}"):
        work.check()


def test_the_last_token_of_every_context_is_attended_to() -> None:
    work = DecodeStep(DecodeCase(1, KVDtype.FP32, 2, rows=2, context=32), seed=1)
    assert work._batch.context_lens.tolist() == [32, 32]
    assert sorted(work._batch.block_tables.flatten().tolist()) == [0, 1, 2, 3]


def test_roofs_are_measured_with_a_compiler_and_without() -> None:
    for meter in (roof_meter(1 << 20), TorchMeter(1 << 20)):
        roof = meter.measure()
        assert roof.bytes_per_s > 0
        assert roof.flop_per_s > 0


def test_all_of_the_memory_is_read() -> None:
    meter = roof_meter(1 << 16)
    if not isinstance(meter, NativeMeter):
        pytest.skip("there is no C compiler")
    # One sum of a vector: each of its floats is of every lanes-th number.
    values = torch.arange(1 << 14, dtype=torch.float32)
    found = meter._read(values.data_ptr(), values.nbytes, 1024)
    assert found == pytest.approx(float(values[:: meter.lanes].double().sum()), rel=1e-3)


def test_points_and_roof_are_where_they_belong() -> None:
    points = [Point("low", 0.5, 2e9), Point("high", 100.0, 45e9)]
    view = frame(ROOF, points)
    assert view.column(view.left) == 0
    assert view.row(view.top) > view.row(45e9) > view.row(2e9) > view.row(view.bottom) == 0
    lines = text_chart(ROOF, points).splitlines()
    grid = [line[10:] for line in lines if line[9:10] == "|"]
    where = {letter: (row, line.index(letter)) for row, line in enumerate(grid) for letter in "ab" if letter in line}
    assert where["b"][0] < where["a"][0], "what does more is further up"
    assert where["a"][1] < where["b"][1], "what is more intense is further right"
    assert "40.0% of the roof" in lines[-2]
    assert "75.0% of the roof" in lines[-1]


def test_the_chart_is_drawn_into_a_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "new" / "chart.png"
    assert save_png(ROOF, [Point("a", 1.0, 5e9)], path)
    assert path.read_bytes().startswith(b"\x89PNG")

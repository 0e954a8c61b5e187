"""Weights that are stored narrower: the same model within their precision, mapped, and never taken for another."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.attention.interface import LayerAttention
from engine.attention.torch_paged import TorchAttention
from engine.batch import BatchRow, build_batch
from engine.models import load_model
from engine.models.transformer import Transformer
from engine.ops.interface import Ops
from engine.ops.native_ops import best_cpu_ops
from engine.ops.torch_ops import TorchOps
from engine.paged_cache import PagedCache
from engine.prepare import prepare_model
from engine.prepared_model import PreparedModel, checkpoint_tensors, open_prepared
from engine.tensor_map import prepared_tensors
from engine.weight_dtypes import WeightDtype, stored, stored_forms
from engine.weights import TensorForm, map_weights
from kv_cache.layout import KVCacheLayout, KVDtype
from runtime.errors import KvferryError
from tests.support.tiny_checkpoints import edit_json, make_model, save_checkpoint

_NARROW = [WeightDtype.BF16, WeightDtype.FP16, WeightDtype.INT8]
_TOKENS = [5, 9, 33, 2, 71, 8, 8, 40, 3, 17]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("source"), make_model("qwen3"))


def _prepared(source: Path, dtype: WeightDtype | None) -> PreparedModel:
    return prepare_model(source, source.parent / "cache", lambda *_: None, dtype)


def _logits(model: PreparedModel, ops: Ops) -> Tensor:
    """Of every position of one prompt."""
    config = model.config
    layout = KVCacheLayout(
        model_id="m",
        model_revision="r",
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=16,
        dtype=KVDtype.FP32,
    )
    layers = [LayerAttention(config.head_dim**-0.5)] * config.num_layers
    decoder = load_model(model, ops)
    assert isinstance(decoder, Transformer)
    batch = build_batch([BatchRow(_TOKENS, 0, [0], 0)], 16)
    with torch.inference_mode():
        hidden = decoder.forward(batch, TorchAttention(PagedCache(layout, 1), layers), lambda _: None)
        return decoder.logits(hidden).clone()


@pytest.mark.parametrize("dtype", _NARROW)
def test_a_narrow_model_has_nearly_the_logits_of_the_whole_one(source: Path, dtype: WeightDtype) -> None:
    whole = _logits(_prepared(source, None), TorchOps())
    narrow = _prepared(source, dtype)
    by_torch, native = _logits(narrow, TorchOps()), _logits(narrow, best_cpu_ops())
    # Who computes does not matter; how it is stored does, a little.
    torch.testing.assert_close(native, by_torch, rtol=1e-4, atol=1e-4)
    error = ((native - whole).norm() / whole.norm()).item()
    assert 0 < error < 0.05


@pytest.mark.parametrize("dtype", _NARROW)
def test_a_model_says_how_it_is_stored_and_is_another_model(source: Path, dtype: WeightDtype) -> None:
    whole, narrow = _prepared(source, WeightDtype.FP32), _prepared(source, dtype)
    assert narrow.weight_dtype is dtype
    assert whole == _prepared(source, None)
    assert narrow.path.name == f"{whole.path.name}-{dtype.value}"
    assert open_prepared(narrow.path) == narrow
    revisions = {_prepared(source, each).revision for each in WeightDtype}
    assert len(revisions) == len(WeightDtype)
    assert narrow.weights_path.stat().st_size < whole.weights_path.stat().st_size


def test_a_prepared_directory_is_used_as_it_is_or_refused(source: Path, tmp_path: Path) -> None:
    model = _prepared(source, WeightDtype.BF16)
    for wanted in (None, WeightDtype.BF16):
        assert prepare_model(model.path, tmp_path, lambda *_: None, wanted) == model
    with pytest.raises(KvferryError, match="was prepared in bf16, not int8: name its source"):
        prepare_model(model.path, tmp_path, lambda *_: None, WeightDtype.INT8)


@pytest.mark.parametrize("dtype", list(WeightDtype))
def test_a_decoder_reads_its_weights_where_they_are_mapped(
    source: Path, dtype: WeightDtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _prepared(source, dtype)
    mapped = map_weights(model.weights_path)
    monkeypatch.setattr("engine.models.map_weights", lambda _: mapped)
    decoder = load_model(model, best_cpu_ops())
    assert isinstance(decoder, Transformer)
    addresses = {tensor.data_ptr() for tensor in mapped.values()}
    linears = [decoder._lm_head] + [linear for layer in decoder._layers for linear in (layer.qkv, layer.attention_out)]
    assert all(linear.weight.data_ptr() in addresses for linear in linears)
    assert all(linear.scales is None or linear.scales.data_ptr() in addresses for linear in linears)


def test_only_projections_are_int8(source: Path) -> None:
    model = _prepared(source, WeightDtype.INT8)
    forms = model.tensor_forms()
    assert forms["embed.weight"].dtype is torch.bfloat16
    assert forms["final_norm.weight"].dtype is torch.float32
    assert forms["layers.0.q_norm.weight"].dtype is torch.float32
    qkv = forms["layers.0.qkv.weight"]
    assert qkv.dtype is torch.int8
    assert forms["layers.0.qkv.scales"] == TensorForm(qkv.shape[:1], torch.float32)
    sizes = [form.dtype.itemsize for form in forms.values()]
    assert sizes == sorted(sizes, reverse=True)


def test_fp32_is_stored_in_the_order_in_which_it_is_read(source: Path) -> None:
    tensors = prepared_tensors(_prepared(source, None).config)
    assert list(stored_forms(tensors, WeightDtype.FP32)) == [tensor.name for tensor in tensors]


@pytest.mark.parametrize("dtype", list(WeightDtype))
def test_the_checkpoint_can_be_read_back_within_the_precision(source: Path, dtype: WeightDtype) -> None:
    whole, narrow = (checkpoint_tensors(_prepared(source, each)) for each in (None, dtype))
    for name, values in whole.items():
        # Half a step: of 8 bits of mantissa, or of 127 of a row's largest.
        step = (
            values.abs() / 256 if dtype in (WeightDtype.BF16, WeightDtype.FP16) else values.abs().amax(-1, True) / 253
        )
        assert (narrow[name] - values).abs().le(step + 1e-7).all() or values.dim() == 1
        assert values.dim() == 2 or torch.equal(narrow[name], values)


def test_rows_of_zeros_and_numbers_that_fp16_lacks() -> None:
    form = TensorForm((2, 3), torch.int8)
    values = torch.tensor([[0.0, 0.0, 0.0], [1.0, -2.54, 0.01]])
    assert stored("layers.0.qkv.weight", form, values).tolist() == [[0, 0, 0], [50, -127, 0]]
    scales = stored("layers.0.qkv.scales", TensorForm((2,), torch.float32), values)
    assert torch.allclose(scales, torch.tensor([1.0, 0.02]))
    with pytest.raises(KvferryError, match=r"w\.weight has numbers beyond the range of float16"):
        stored("w.weight", TensorForm((1, 1), torch.float16), torch.tensor([[70000.0]]))


def test_a_model_without_native_code_is_not_stored_otherwise(tmp_path: Path) -> None:
    foreign = save_checkpoint(tmp_path / "source", make_model("llama_gqa"))
    edit_json(foreign / "config.json", model_type="foreign")
    with pytest.raises(KvferryError, match="without native code weights stay as they are, not bf16"):
        _prepared(foreign, WeightDtype.BF16)

"""The operations in C against those in torch, for each instruction set that this machine has."""

from collections.abc import Sequence
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.native import Level, NativeUnavailable, kernels
from engine.ops import native_ops
from engine.ops.interface import Gate, Linear, Ops
from engine.ops.native_ops import NativeOps, best_cpu_ops
from engine.ops.torch_ops import TorchOps

_DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8]


def _levels() -> Sequence[Level]:
    try:
        return [level for level in Level if level <= kernels().level]
    except NativeUnavailable:
        return []


pytestmark = pytest.mark.skipif(not _levels(), reason="the C kernels were not built")


@pytest.fixture(params=_levels(), ids=lambda level: level.name)
def ops(request: pytest.FixtureRequest) -> NativeOps:
    return NativeOps(level=request.param)


def _linear(rows: int, columns: int, dtype: torch.dtype, *, bias: bool, seed: int = 0) -> Linear:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) / columns**0.5
    scales = None
    if dtype is torch.int8:
        scales = weight.abs().amax(dim=1) / 127
        weight = (weight / scales.unsqueeze(1)).round()
    return Linear(weight.to(dtype), torch.randn(rows, generator=generator) if bias else None, scales)


def _rows(tokens: int, columns: int, seed: int = 1, extra: int = 0) -> Tensor:
    """[tokens, columns], each token `extra` numbers further from the next than it must be."""
    wide = torch.randn(tokens, columns + extra, generator=torch.Generator().manual_seed(seed))
    return wide[:, :columns]


def _product(x: Tensor, linear: Linear) -> Tensor:
    """In fp64, so that only the tested side rounds."""
    weight = linear.weight.double()
    if linear.scales is not None:
        weight = weight * linear.scales.double().unsqueeze(1)
    y = x.double() @ weight.t()
    return y if linear.bias is None else y + linear.bias.double()


def _close(found: Tensor, expected: Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(found.double(), expected.double(), rtol=tolerance, atol=tolerance)


@settings(deadline=None, max_examples=60)
@given(
    level=st.sampled_from(_levels() or [Level.PLAIN_C]),
    dtype=st.sampled_from(_DTYPES),
    tokens=st.integers(1, 70),
    rows=st.integers(1, 40),
    columns=st.one_of(st.integers(1, 70), st.sampled_from([767, 768, 769, 1600])),
    bias=st.booleans(),
    extra=st.integers(0, 5),
)
def test_products_are_those_of_torch_for_any_shape(
    level: Level, dtype: torch.dtype, tokens: int, rows: int, columns: int, bias: bool, extra: int
) -> None:
    ops = NativeOps(level=level)
    linear = _linear(rows, columns, dtype, bias=bias)
    x = _rows(tokens, columns, extra=extra)
    expected = _product(x, linear)
    _close(ops.linear(x, linear), expected)
    _close(ops.logits(x, linear), expected)
    target = _rows(tokens, rows, seed=2, extra=extra)
    summed = target.double() + expected
    ops.add_linear(target, x, linear)
    _close(target, summed)


@pytest.mark.parametrize("dtype", _DTYPES)
def test_many_rows_are_multiplied_as_few_are(ops: NativeOps, dtype: torch.dtype) -> None:
    """Enough for x to be turned in several blocks."""
    linear = _linear(9, 70, dtype, bias=True)
    x = _rows(590, 70)
    _close(ops.linear(x, linear), _product(x, linear))
    target = torch.ones(590, 9)
    ops.add_linear(target, x, linear)
    _close(target, _product(x, linear) + 1)


@settings(deadline=None, max_examples=60)
@given(
    level=st.sampled_from(_levels() or [Level.PLAIN_C]),
    dtype=st.sampled_from(_DTYPES),
    threads=st.integers(1, 3),
    tokens=st.one_of(st.integers(1, 120), st.sampled_from([288, 289, 300])),
    rows=st.integers(1, 40),
    columns=st.one_of(st.integers(1, 70), st.sampled_from([767, 768, 769, 1600])),
    bias=st.booleans(),
    extra=st.integers(0, 5),
)
def test_products_that_turn_x_are_those_of_torch_for_any_shape(
    level: Level, dtype: torch.dtype, threads: int, tokens: int, rows: int, columns: int, bias: bool, extra: int
) -> None:
    ops = NativeOps(level=level, threads=threads)
    ops.many_rows = 1
    linear = _linear(rows, columns, dtype, bias=bias)
    x = _rows(tokens, columns, extra=extra)
    expected = _product(x, linear)
    _close(ops.linear(x, linear), expected)
    wide = _rows(tokens, rows + extra, seed=2)
    around, summed = wide[:, rows:].clone(), wide[:, :rows].double() + expected
    ops.add_linear(wide[:, :rows], x, linear)
    _close(wide[:, :rows], summed)
    assert torch.equal(wide[:, rows:], around)


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("columns", [33, 1601])
def test_a_row_among_many_is_the_same_to_the_last_bit_whatever_it_is_computed_with(
    ops: NativeOps, dtype: torch.dtype, columns: int
) -> None:
    linear = _linear(21, columns, dtype, bias=True)
    x = _rows(310, columns)
    together = ops.linear(x, linear).clone()
    threaded = NativeOps(level=ops.level, threads=2)
    assert torch.equal(threaded.linear(x, linear), together)
    for first, last in ((0, ops.many_rows), (200, 300), (7, 300)):
        assert torch.equal(ops.linear(x[first:last], linear), together[first:last])


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("columns", [33, 1601])
def test_a_row_is_the_same_to_the_last_bit_whatever_it_is_computed_with(
    ops: NativeOps, dtype: torch.dtype, columns: int
) -> None:
    linear = _linear(13, columns, dtype, bias=True)
    x = _rows(64, columns)
    alone = torch.cat([ops.linear(x[i : i + 1], linear).clone() for i in range(64)])
    for tokens in (2, 5, 7, 16, ops.many_rows - 1):
        assert torch.equal(ops.linear(x[:tokens], linear), alone[:tokens])


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("turned", [False, True])
def test_a_number_that_is_not_finite_spoils_its_row_and_no_other(
    ops: NativeOps, dtype: torch.dtype, bad: float, turned: bool
) -> None:
    ops.many_rows = 1 if turned else ops.many_rows
    linear = _linear(6, 21, dtype, bias=False)
    for position in (0, 20):
        x = _rows(9, 21)
        x[4, position] = bad
        finite = ops.linear(x, linear).isfinite()
        assert not finite[4].any()
        assert finite[[0, 1, 2, 3, 5, 6, 7, 8]].all()


def test_fp16_weights_of_all_kinds_keep_their_value(ops: NativeOps) -> None:
    every = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.float16)
    found = ops.embed(torch.arange(len(every)), every.unsqueeze(1).expand(-1, 17).contiguous())
    torch.testing.assert_close(found[:, 16], every.float(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(found[:, 0], every.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_embedding_copies_rows(ops: NativeOps, dtype: torch.dtype) -> None:
    table = _rows(10, 19).to(dtype)
    ids = torch.tensor([9, 0, 3, 3])
    first = ops.embed(ids, table)
    assert torch.equal(first, table[ids].float())
    ops.embed(torch.tensor([1, 1, 1, 1]), table)
    assert torch.equal(first, table[ids].float())  # the next call made another tensor


@pytest.mark.parametrize("bad", [10, -1])
def test_a_token_beyond_the_vocabulary_is_refused(ops: NativeOps, bad: int) -> None:
    with pytest.raises(IndexError, match="beyond the vocabulary of 10"):
        ops.embed(torch.tensor([0, bad]), torch.zeros(10, 4))


@pytest.mark.parametrize("size", [1, 16, 19, 64])
def test_norms_of_tokens_and_of_heads_are_those_of_torch(ops: NativeOps, size: int) -> None:
    reference, weight = TorchOps(), _rows(3, size, seed=5)
    x = _rows(6, size, extra=7)
    _close(ops.rms_norm(x, weight[0], 1e-6), reference.rms_norm(x, weight[0], 1e-6))
    # Some heads of a wider matrix, as q and k are.
    heads = _heads(size)
    _close(ops.rms_norm(heads, weight, 1e-6), reference.rms_norm(heads, weight, 1e-6))
    _close(ops.rms_norm(heads, weight[1], 1e-6), reference.rms_norm(heads, weight[1], 1e-6))


def _heads(size: int) -> Tensor:
    """[4, 3, size], a part of [4, 5, size]."""
    return torch.randn(4, 5, size, generator=torch.Generator().manual_seed(6))[:, :3]


def test_a_norm_of_zeros_is_zero_and_one_of_nan_is_nan(ops: NativeOps) -> None:
    x = torch.zeros(3, 20)
    x[1, 19] = torch.nan
    found = ops.rms_norm(x, torch.ones(20), 1e-6)
    assert not found[[0, 2]].any()
    assert found[1].isnan().all()


@pytest.mark.parametrize("gate", list(Gate))
def test_gates_are_within_a_millionth_of_the_truth(ops: NativeOps, gate: Gate) -> None:
    x = torch.cat((torch.linspace(-30, 30, 4001), torch.tensor([0.0, -0.0, 1e-30, -1e-6, 80.0, -80.0])))
    up = torch.full_like(x, 2.0)
    found = ops.gated(torch.cat((x, up)).unsqueeze(0), gate)[0].double()
    z = x.double()
    if gate is Gate.GELU_TANH:
        z = 2 * (2 / torch.pi) ** 0.5 * (z + 0.044715 * z**3)
    expected = 2 * x.double() * torch.sigmoid(z)
    # The error of z itself grows with it, and so does that of e^z.
    allowed = expected.abs() * (1e-6 + 2e-7 * z.abs()) + 1e-35
    assert ((found - expected).abs() <= allowed).all()


@pytest.mark.parametrize("gate", list(Gate))
@pytest.mark.parametrize("size", [1, 16, 37])
def test_gates_of_rows_are_those_of_torch(ops: NativeOps, gate: Gate, size: int) -> None:
    gate_up = _rows(5, 2 * size, extra=3)
    expected = TorchOps().gated(gate_up.clone(), gate)
    _close(ops.gated(gate_up, gate), expected)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_gate_that_is_not_finite_stays_so(ops: NativeOps, bad: float) -> None:
    for gate in Gate:
        gate_up = torch.ones(1, 40)
        gate_up[0, 3] = gate_up[0, 39] = bad
        finite = ops.gated(gate_up, gate)[0].isfinite()
        # A gate at minus infinity is shut, or nothing that can be used.
        assert not finite[19]
        assert not finite[3] or bad == -torch.inf
        assert finite.sum() >= 18


def test_results_of_one_method_live_until_its_next_call(ops: NativeOps) -> None:
    linear = _linear(8, 8, torch.float32, bias=False)
    x = _rows(3, 8)
    product, logits = ops.linear(x, linear), ops.logits(x, linear)
    normed = ops.rms_norm(x, torch.ones(8), 1e-6)
    gated = ops.gated(product.clone(), Gate.SILU)
    copies = [value.clone() for value in (product, logits, normed, gated)]
    other = torch.zeros(3, 8)
    ops.add_linear(other, x, linear)
    ops.embed(torch.tensor([0]), x)
    assert all(torch.equal(value, copy) for value, copy in zip((product, logits, normed, gated), copies, strict=True))


def test_a_larger_result_and_then_a_smaller_one_are_right(ops: NativeOps) -> None:
    linear = _linear(8, 8, torch.float32, bias=False)
    for tokens in (2, 50, 2, 3):
        x = _rows(tokens, 8, seed=tokens)
        _close(ops.linear(x, linear), _product(x, linear))


@pytest.mark.parametrize(
    "x", [torch.zeros(2, 8, dtype=torch.float64), torch.zeros(2, 7), torch.zeros(8, 2).t(), torch.zeros(2, 16)[:, ::2]]
)
def test_activations_that_c_would_misread_are_refused(ops: NativeOps, x: Tensor) -> None:
    linear = _linear(8, 8, torch.float32, bias=False)
    with pytest.raises(ValueError, match="fp32"):
        ops.linear(x, linear)
    with pytest.raises(ValueError, match="fp32"):
        ops.add_linear(torch.zeros(2, 8), x, linear)


@pytest.mark.parametrize(
    "linear",
    [
        Linear(torch.zeros(8, 8, dtype=torch.float64)),
        Linear(torch.zeros(8, 8).t()[:, :4]),
        Linear(torch.zeros(8, 8, dtype=torch.int8)),
        Linear(torch.zeros(8, 8), scales=torch.ones(8)),
        Linear(torch.zeros(8, 8), torch.zeros(7)),
        Linear(torch.zeros(8, 8), torch.zeros(8, dtype=torch.float64)),
    ],
)
def test_weights_that_c_would_misread_are_refused(ops: NativeOps, linear: Linear) -> None:
    with pytest.raises(ValueError):
        ops.linear(torch.zeros(2, 8), linear)


def test_ids_norms_and_sums_that_c_would_misread_are_refused(ops: NativeOps) -> None:
    with pytest.raises(ValueError, match="int64"):
        ops.embed(torch.zeros(2, dtype=torch.int32), torch.zeros(2, 2))
    with pytest.raises(ValueError, match="does not fit"):
        ops.rms_norm(torch.zeros(2, 8), torch.ones(7), 1e-6)
    with pytest.raises(ValueError, match="cannot normalise"):
        ops.rms_norm(torch.zeros(2, 8, 3).transpose(1, 2), torch.ones(8), 1e-6)
    with pytest.raises(ValueError, match="cannot be added"):
        ops.add_linear(torch.zeros(3, 8), torch.zeros(2, 8), _linear(8, 8, torch.float32, bias=False))


def test_an_instruction_set_that_the_machine_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="this machine runs"):
        NativeOps(level=cast(Level, max(Level) + 1))


def test_torch_computes_where_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise NativeUnavailable("no compiler")

    assert isinstance(best_cpu_ops(), NativeOps)
    monkeypatch.setattr(native_ops, "kernels", refuse)
    assert isinstance(best_cpu_ops(), TorchOps)


def test_torch_has_the_same_results_for_all_dtypes() -> None:
    reference: Ops = TorchOps()
    for dtype in _DTYPES:
        linear = _linear(7, 11, dtype, bias=True)
        x = _rows(3, 11)
        _close(reference.linear(x, linear), _product(x, linear))
        target = torch.ones(3, 7)
        reference.add_linear(target, x, linear)
        _close(target, _product(x, linear) + 1)

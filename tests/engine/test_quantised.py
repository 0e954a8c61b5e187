import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.quantised import dequantised, quantised
from kv_cache.layout import KVDtype
from kv_transfer.quantise import Tiles, convert, storage

DTYPES = [(KVDtype.INT8, torch.int8), (KVDtype.FP8_E4M3, torch.uint8)]
FLOATS = st.floats(width=32) | st.sampled_from([0.0, -0.0, 1e-45, 3e38, 448.0, 447.9, 2.0**-9, 3 * 2.0**-10, 6e4 * 127])


@pytest.mark.parametrize(("dtype", "codes_dtype"), DTYPES)
@settings(deadline=None, max_examples=150)
@given(values=st.lists(FLOATS, min_size=3, max_size=3))
def test_a_row_is_quantised_as_a_sender_would(dtype: KVDtype, codes_dtype: torch.dtype, values: list[float]) -> None:
    spread = torch.linspace(-1, 1, 61) * torch.tensor(values).nan_to_num(0, 1, 1).abs().max()
    check(torch.cat([torch.tensor(values), spread])[None], dtype, codes_dtype)


@pytest.mark.parametrize(("dtype", "codes_dtype"), DTYPES)
def test_random_rows_are_quantised_as_a_sender_would(dtype: KVDtype, codes_dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(3)
    rows = torch.randn((400, 64), generator=draw)
    check(rows * 10 ** torch.linspace(-12, 12, 400)[:, None], dtype, codes_dtype)


def check(rows: torch.Tensor, dtype: KVDtype, codes_dtype: torch.dtype) -> None:
    codes, scales = quantised(rows, codes_dtype)
    want = Tiles(dtype, np.empty(rows.shape, storage(dtype)), np.empty(rows.shape[:-1], np.float16))
    convert(Tiles(KVDtype.FP32, rows.numpy()), want)
    assert want.scales is not None
    assert codes.numpy().tobytes() == want.values.tobytes()
    assert scales.numpy().tobytes() == want.scales.tobytes()
    back = np.empty(rows.shape, np.float32)
    convert(want, Tiles(KVDtype.FP32, back))
    torch.testing.assert_close(dequantised(codes, scales), torch.from_numpy(back), rtol=0, atol=0, equal_nan=True)

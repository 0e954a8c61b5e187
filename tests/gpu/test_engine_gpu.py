"""A whole engine on a real GPU gives the text of the CPU, with and without captured steps."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.build import plan_engine
from tests.support.device_texts import built, options_for, texts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

MODEL = Path(__file__).parents[1] / "data" / "tiny-real"


@pytest.mark.parametrize("kv_cache_dtype", ["fp32", "int8"])
@pytest.mark.parametrize("graphs", [True, False])
def test_a_gpu_gives_the_text_of_the_cpu(
    graphs: bool, kv_cache_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.execution.graphs import GraphPool

    options = replace(options_for(MODEL, tmp_path), kv_cache_dtype=kv_cache_dtype)  # type: ignore[arg-type]
    expected = texts(built(options, plan_engine(options, available_bytes=None)))
    if not graphs:
        monkeypatch.setattr(GraphPool, "fits", lambda pool, batch: False)
    options = replace(options, device="cuda")
    assert texts(built(options, plan_engine(options, available_bytes=None))) == expected

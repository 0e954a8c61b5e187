"""The attention backend for CUDA, without a GPU: interpreted."""

from pathlib import Path

import pytest
import torch

from engine.attention.triton import TritonAttention
from tests.support.attention_steps import LAYERS, LAYOUT, expected
from tests.support.triton_programs import INTERPRETED, run_program


def test_steps_of_prompts_chunks_and_tokens_attend_as_the_textbook_says(tmp_path: Path) -> None:
    outputs = torch.load(run_program("tests.support.attention_steps", [], INTERPRETED, tmp_path))
    for output, right in zip(outputs, expected(), strict=True):
        torch.testing.assert_close(output.double(), right, rtol=1e-5, atol=1e-5)


def test_every_layer_of_the_pool_must_be_described() -> None:
    with pytest.raises(ValueError, match="1 layers of attention for a pool of 2"):
        TritonAttention(torch.zeros(LAYOUT.pool_bytes(1), dtype=torch.uint8), LAYOUT, LAYERS[:1])

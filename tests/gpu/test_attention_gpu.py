"""Paged attention of the kernels on a real GPU is the textbook's."""

import pytest
import torch

from tests.support.attention_cases import DECODE_CASES, PREFILL_CASES, check, decoded, prefilled
from tests.support.attention_steps import attended, expected

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("name", DECODE_CASES)
def test_single_tokens_attend_as_the_textbook_says(name: str) -> None:
    check(DECODE_CASES[name], decoded(DECODE_CASES[name], "cuda"))


@pytest.mark.parametrize("name", PREFILL_CASES)
def test_chunks_attend_as_the_textbook_says(name: str) -> None:
    check(PREFILL_CASES[name], prefilled(PREFILL_CASES[name], "cuda"))


def test_steps_of_prompts_chunks_and_tokens_attend_as_the_textbook_says() -> None:
    for output, right in zip(attended("cuda"), expected(), strict=True):
        torch.testing.assert_close(output.double(), right, rtol=1e-5, atol=1e-5)

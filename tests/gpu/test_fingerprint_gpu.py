"""The page fingerprints of the kernel on a real GPU are those of the host."""

import pytest
import torch

from tests.support.page_cases import CASES, on_device, on_host

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("name", CASES)
def test_a_gpu_gives_the_fingerprints_of_the_host(name: str) -> None:
    assert on_device(CASES[name], "cuda") == on_host(CASES[name])

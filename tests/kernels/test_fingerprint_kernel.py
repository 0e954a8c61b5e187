"""The page fingerprints of the GPU kernel are those of the host, without a GPU: in Triton's interpreter."""

import json

import pytest
import torch
from torch import Tensor

from engine.kernels.fingerprint import page_fingerprints
from tests.support.page_cases import CASES, NUM_LAYERS, layout, on_host
from tests.support.triton_programs import INTERPRETED, run_program

pytestmark = pytest.mark.timeout(900)

LAYOUT = layout(512)


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[int]]]:
    """The kernel's fingerprints of each case."""
    folder = tmp_path_factory.mktemp("interpreted")
    answers: dict[str, list[list[int]]] = json.loads(
        run_program("tests.support.page_cases", [], INTERPRETED, folder).read_text()
    )
    return answers


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_gives_the_fingerprints_of_the_host(interpreted: dict[str, list[list[int]]], name: str) -> None:
    assert interpreted[name] == on_host(CASES[name])


def test_the_values_never_change(interpreted: dict[str, list[list[int]]]) -> None:
    """Workers of different versions compare them."""
    assert interpreted["one page"] == on_host(CASES["one page"]) == [[0xE4C66CA0B77EFCC3]]


def test_swapping_two_blocks_changes_the_fingerprints_of_both(interpreted: dict[str, list[list[int]]]) -> None:
    first, second = interpreted["in order"]
    moved_second, moved_first = interpreted["swapped"]
    changed = [*first, *second, *moved_first, *moved_second]
    assert len(set(changed)) == len(changed) == 4 * (NUM_LAYERS - 1)


def test_the_same_bytes_have_another_fingerprint_in_every_place(interpreted: dict[str, list[list[int]]]) -> None:
    found = [value for block in interpreted["the same everywhere"] for value in block]
    assert len(set(found)) == len(found) == 3 * NUM_LAYERS


def call(
    pool: Tensor | None = None,
    block_ids: Tensor | None = None,
    layers: range = range(NUM_LAYERS),
    base_seed: int = 0,
) -> Tensor:
    if pool is None:
        pool = torch.zeros(LAYOUT.pool_bytes(2), dtype=torch.uint8)
    if block_ids is None:
        block_ids = torch.tensor([1], dtype=torch.int32)
    return page_fingerprints(pool, LAYOUT, block_ids, first_block=0, layers=layers, base_seed=base_seed)


def test_what_is_not_as_described_is_refused_before_anything_is_queued() -> None:
    spare = torch.zeros(LAYOUT.pool_bytes(2) + 8, dtype=torch.uint8)
    with pytest.raises(ValueError, match="aligned to 16 bytes"):
        call(spare[8:])
    with pytest.raises(ValueError, match="whole blocks"):
        call(spare)
    with pytest.raises(ValueError, match="int32"):
        call(block_ids=torch.tensor([1]))
    with pytest.raises(ValueError, match="block ids are on meta"):
        call(block_ids=torch.tensor([1], dtype=torch.int32, device="meta"))
    with pytest.raises(ValueError, match="consecutive layers"):
        call(layers=range(NUM_LAYERS + 1))
    with pytest.raises(ValueError, match="consecutive layers"):
        call(layers=range(0, NUM_LAYERS, 2))
    with pytest.raises(ValueError, match="64 bits"):
        call(base_seed=1 << 64)


def test_no_blocks_and_no_layers_have_no_fingerprints() -> None:
    assert call(block_ids=torch.empty(0, dtype=torch.int32)).shape == (0, NUM_LAYERS)
    assert call(layers=range(1, 1)).shape == (1, 0)

"""What kernels become on GPUs that are not there: compiled in advance, and read from the machine code."""

import pytest

from tests.support.compilations import COMPILATIONS
from tests.support.compiled_kernels import GPUS, Report, compile_kernels, spills, widths

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Report]]:
    """What each kernel became on each GPU."""
    return compile_kernels(["tests.support.compilations"], tmp_path_factory.mktemp("compiled"))


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("name", COMPILATIONS)
def test_no_kernel_keeps_in_memory_what_belongs_in_registers(
    compiled: dict[str, dict[str, Report]], name: str, gpu: str
) -> None:
    assert not spills(compiled[name][gpu])


# At least so many instructions move 16 bytes a thread, and at most so many fewer: (loads, others, stores, others).
# Narrow are only the numbers of a token, row or block, and scales, of which a head has two bytes.
MOVES = {
    "fingerprint": (16, 7, 0, 1),
    "store bf16": (6, 5, 4, 0),
    "store fp8_e4m3": (6, 5, 4, 9),
    "store int8": (6, 5, 4, 9),
    "rms norm of heads": (4, 0, 2, 0),
    "add and rms norm": (6, 0, 4, 0),
    "gated": (4, 0, 2, 0),
    "gather blocks": (4, 1, 4, 0),
    "convert bf16 to int8": (2, 3, 1, 1),
    "convert fp8_e4m3 to bf16": (1, 7, 2, 0),
    "sample": (8, 7, 0, 1),
}


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("name", COMPILATIONS)
def test_what_is_contiguous_is_moved_16_bytes_at_a_time(
    compiled: dict[str, dict[str, Report]], name: str, gpu: str
) -> None:
    wide_loads, other_loads, wide_stores, other_stores = MOVES[name]
    loads, stores = widths(compiled[name][gpu], "LDG"), widths(compiled[name][gpu], "STG")
    assert loads.pop(128) >= wide_loads
    assert sum(loads.values()) <= other_loads
    assert stores.pop(128, 0) >= wide_stores
    assert sum(stores.values()) <= other_stores


@pytest.mark.parametrize("gpu", GPUS)
def test_a_block_of_threads_that_samples_fits_into_the_registers(
    compiled: dict[str, dict[str, Report]], gpu: str
) -> None:
    """A multiprocessor has 65536, and such a block has 512 threads."""
    assert compiled["sample"][gpu]["registers"] <= 128

"""Kernels give what the host gives, without a GPU: in Triton's interpreter."""

import importlib

import pytest

from tests.support.interpreted_kernels import Results, interpret_kernels

pytestmark = pytest.mark.timeout(900)

MODULES = [f"tests.support.{name}_cases" for name in ("store", "layer", "block", "sample", "ops")]
CASES = [
    pytest.param(module, name, id=f"{module.split('.')[-1].removesuffix('_cases')}: {name}")
    for module in MODULES
    for name in importlib.import_module(module).CASES
]


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What the kernels made of each case."""
    return interpret_kernels(MODULES, tmp_path_factory.mktemp("interpreted"))


@pytest.mark.parametrize(("module", "name"), CASES)
def test_a_kernel_gives_what_the_host_gives(interpreted: Results, module: str, name: str) -> None:
    cases = importlib.import_module(module)
    cases.check(cases.CASES[name], interpreted[module][name])

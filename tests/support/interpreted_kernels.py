"""Runs kernels in Triton's interpreter, which must be chosen in the environment: TRITON_INTERPRET=1.

Run as a program with a file for the results and the names of modules. Such a module has a dict `CASES`, and
`run(case, device)`, which gives tensors by name. `interpret_kernels` starts that program.
"""

import importlib
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from tests.support.triton_programs import INTERPRETED, run_program

Results = dict[str, dict[str, dict[str, Tensor]]]


def interpret_kernels(modules: Iterable[str], folder: Path) -> Results:
    """{module: {case: what `run` gave}}."""
    results: Results = torch.load(run_program(__name__, list(modules), INTERPRETED, folder))
    return results


def _results(modules: list[str]) -> Results:
    found: Results = {}
    for name in modules:
        module = importlib.import_module(name)
        found[name] = {key: module.run(case, "cpu") for key, case in module.CASES.items()}
    return found


if __name__ == "__main__":
    torch.save(_results(sys.argv[2:]), sys.argv[1])

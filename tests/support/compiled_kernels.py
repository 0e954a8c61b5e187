"""Compiles kernels for GPUs that need not be there, and says what came out.

Run as a program with a file for the answers and the names of modules, each with a dict `COMPILATIONS` of
`Compilation`s by name. Triton's interpreter must not be chosen in the environment. Answers, as JSON:

    {name: {"sm_90": {"opcodes": {"LDG.E.128": 4, ...}, "registers": 64, "stack_bytes": 0, "local_bytes": 0,
                      "shared_bytes": 0}}}

`compile_kernels` starts that program; `spills` and `widths` read its answers.
"""

import importlib
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.support.triton_programs import run_program

CAPABILITIES = (80, 90, 100)
GPUS = tuple(f"sm_{capability}" for capability in CAPABILITIES)
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_OPCODE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE)
_USAGE = re.compile(r"\b(REG|STACK|LOCAL|SHARED):(\d+)")
_USAGE_NAMES = {"REG": "registers", "STACK": "stack_bytes", "LOCAL": "local_bytes", "SHARED": "shared_bytes"}
_WIDTH = re.compile(r"\.(?:U|S)?(8|16|32|64|128|256)(?:\.|$)")

Report = dict[str, Any]
"""What one kernel became on one GPU."""


@dataclass(frozen=True, slots=True)
class Compilation:
    """A kernel as its launcher calls it.

    `types`: those of the arguments that are no constants, by name: "*bf16", "i32". `aligned`: the arguments among them
    that are divisible by 16, as the launcher's would be.
    """

    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)
    aligned: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 3

    def source(self) -> Any:
        """What triton.compile takes."""
        names = self.kernel.arg_names
        signature = {name: self.types.get(name, "constexpr") for name in names}
        aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in self.aligned}
        return ASTSource(self.kernel, signature, dict(self.constants), aligned)


def compile_kernels(modules: Iterable[str], folder: Path) -> dict[str, dict[str, Report]]:
    """The answers of this program for the compilations of these modules."""
    answers: dict[str, dict[str, Report]] = json.loads(run_program(__name__, list(modules), {}, folder).read_text())
    return answers


def spills(report: Report) -> list[str]:
    """What shows that a kernel keeps values in memory that should be in registers; empty if nothing does."""
    found = [name for name in report["opcodes"] if name.startswith(("LDL", "STL"))]
    return found + [f"{name} {report[name]}" for name in ("stack_bytes", "local_bytes") if report[name]]


def widths(report: Report, opcode: str) -> dict[int, int]:
    """Instructions with this opcode (LDG, STG, LDGSTS, ...) by the bits that each moves a thread: {128: 4, 32: 1}."""
    found: Counter[int] = Counter()
    for name, count in report["opcodes"].items():
        if name.split(".")[0] == opcode:
            width = _WIDTH.search(name)
            found[int(width[1]) if width else 32] += count
    return dict(found)


def inspect(compilation: Compilation, capability: int) -> Report:
    """What the compiler makes of it."""
    return _report(_compiled(compilation, capability))


def _compiled(compilation: Compilation, capability: int) -> Any:
    return triton.compile(
        compilation.source(),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": compilation.num_warps, "num_stages": compilation.num_stages},
    )


def _report(compiled: Any) -> Report:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = dict(_USAGE.findall(_run("cuobjdump", "--dump-resource-usage", file.name)))
        opcodes = Counter(_OPCODE.findall(_run("nvdisasm", "-c", "-ndf", file.name)))
    # Shared memory is taken at the launch, so the binary does not tell.
    usage["SHARED"] = compiled.metadata.shared
    return {"opcodes": opcodes, **{_USAGE_NAMES[name]: int(value) for name, value in usage.items()}}


def _run(tool: str, *arguments: str) -> str:
    return subprocess.run([_TOOLS / tool, *arguments], capture_output=True, text=True, timeout=60, check=True).stdout


def _compilations(modules: list[str]) -> dict[str, Compilation]:
    found: dict[str, Compilation] = {}
    for module in modules:
        found.update(importlib.import_module(module).COMPILATIONS)
    return found


def _inspect_all(modules: list[str]) -> dict[str, dict[str, Report]]:
    """One kernel is taken apart, by another process, while the next one is compiled."""
    with ThreadPoolExecutor(1) as pool:
        reports = {
            name: {
                f"sm_{capability}": pool.submit(_report, _compiled(compilation, capability))
                for capability in CAPABILITIES
            }
            for name, compilation in _compilations(modules).items()
        }
        return {name: {gpu: found.result() for gpu, found in gpus.items()} for name, gpus in reports.items()}


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(_inspect_all(sys.argv[2:])))

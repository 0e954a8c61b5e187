"""Compiles kernels for GPUs that need not be there, and says what came out.

Run as a program with a file for the answers: `{"sm_90": {"opcodes": {name: count}, "usage": "REG:64 STACK:0 ..."}}`.
Triton's interpreter must not be chosen in the environment.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.kernels import fingerprint

CAPABILITIES = (80, 90, 100)
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_OPCODE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE)
_ALIGNED = [["tt.divisibility", 16]]


def fingerprint_source(page_bytes: int) -> Any:
    """The fingerprint kernel, as `page_fingerprints` calls it."""
    pointers = {"pool": "*i64", "block_ids": "*i32", "constants": "*i64", "found": "*i64"}
    numbers = {"first_block": "i32", "first_layer": "i32", "num_layers": "i32", "base_seed": "u64"}
    signature = {**pointers, **numbers, "PAGE_WORDS": "constexpr"}
    aligned = {(list(signature).index(name),): _ALIGNED for name in ("pool", "constants", "found")}
    return ASTSource(fingerprint._page_fingerprints, signature, {"PAGE_WORDS": page_bytes // 8}, aligned)


def inspect(source: Any, capability: int) -> dict[str, Any]:
    """What the compiler made of it."""
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 1})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _run("cuobjdump", "--dump-resource-usage", file.name)
        opcodes = Counter(_OPCODE.findall(_run("nvdisasm", "-c", file.name)))
    return {"opcodes": opcodes, "usage": usage.strip().splitlines()[-1].strip()}


def _run(tool: str, *arguments: str) -> str:
    return subprocess.run([_TOOLS / tool, *arguments], capture_output=True, text=True, timeout=60, check=True).stdout


if __name__ == "__main__":
    results = {f"sm_{capability}": inspect(fingerprint_source(8192), capability) for capability in CAPABILITIES}
    Path(sys.argv[1]).write_text(json.dumps(results))

"""Starts programs that use Triton another way than the tests' own process does.

The interpreter is chosen by the environment before kernels are imported, and ahead-of-time compilation needs it
unset, so each has a process of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INTERPRETED = {"TRITON_INTERPRET": "1"}


def run_program(module: str, arguments: list[str], environment: dict[str, str], folder: Path) -> Path:
    """Run `python -m module FILE arguments...`; the file, in this folder, holds the answers.

    Triton's cache is in the folder too, so nothing comes from earlier runs. It may take minutes on a busy machine:
    tests that wait for it have a `timeout` of their own.
    """
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    file = folder / "answers"
    done = subprocess.run(
        [sys.executable, "-m", module, str(file), *arguments],
        cwd=ROOT,
        env={**inherited, "TRITON_CACHE_DIR": str(folder / "cache"), **environment},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    return file

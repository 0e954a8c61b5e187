"""Where a number comes from: the machine, what ran on it, and the commit."""

import functools
import os
import platform
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_CPUINFO = Path("/proc/cpuinfo")
_GIT_TIMEOUT_S = 10.0


def machine() -> dict[str, str | int]:
    """CPU model, cores this process may use, kernel, Python, and torch if it is loaded."""
    facts: dict[str, str | int] = {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }
    torch = sys.modules.get("torch")  # Loading it just to ask would cost seconds and change what is measured.
    if torch is not None:
        facts["torch"] = str(torch.__version__)
    return facts


@functools.cache
def commit(root: Path = ROOT) -> str:
    """The commit checked out at `root`, or "unknown" where there is no git or no repository."""
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return found.stdout.strip() or "unknown"


@functools.cache
def _cpu_model() -> str:
    try:
        lines = _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine() or "unknown")

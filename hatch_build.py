"""Builds the C helper of kv_transfer where there is a compiler. Where there is none, kvferry runs without it."""

import os
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_SOURCE = Path("kv_transfer/native/pages.c")
_TARGET = _SOURCE.with_suffix(".so")
_FLAGS = ("-std=c11", "-O3", "-fPIC", "-shared", "-fvisibility=hidden")
_TIMEOUT_S = 120.0


class NativeHelperHook(BuildHookInterface):  # type: ignore[type-arg]
    """For wheels and editable installs. The sdist carries the source."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; with success the wheel is one of this platform, else one of any."""
        if self.target_name != "wheel":
            return
        target = Path(self.root, _TARGET)
        target.unlink(missing_ok=True)
        reason = compile_helper(Path(self.root, _SOURCE), target)
        if reason:
            self.app.display_warning(f"kvferry is installed without its C helper, and moves KV slower: {reason}")
            return
        build_data["artifacts"].append(f"/{_TARGET}")
        build_data["pure_python"] = False
        # Plain C, no Python ABI: one file for every Python of this platform.
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

    def clean(self, versions: list[str]) -> None:
        """Remove what was built."""
        Path(self.root, _TARGET).unlink(missing_ok=True)


def compile_helper(source: Path, target: Path) -> str:
    """Why it could not be built, or nothing. CC names another compiler than the system's cc, as is the custom."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if not compiler or shutil.which(compiler[0]) is None:
        return f"there is no C compiler {' '.join(compiler)!r}"
    # Beside the target and then renamed: a process that has the old one mapped keeps it.
    built = target.with_suffix(f".{os.getpid()}.tmp")
    try:
        command = [*compiler, *_FLAGS, "-o", str(built), str(source)]
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, check=False
        )
        if done.returncode:
            return f"{' '.join(compiler)} failed: {done.stderr.strip()[-500:]}"
        built.replace(target)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    finally:
        built.unlink(missing_ok=True)
    return ""
